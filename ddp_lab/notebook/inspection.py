"""Shift-Tab in `%%distributed` cells: what a name is on a rank.

[Note: inspection of ranks]
Jupyter asks the kernel with the cell's whole text and the cursor's place; IPython's hooks get only the name that
stands there, which does not tell in what kind of cell. So the kernel's own `do_inspect` is stood in for, which has had
the same arguments since ipykernel 6; what is not asked of a rank, or not answered in time, goes on to it.
"""

from __future__ import annotations

import re
from typing import Any

from IPython.utils.tokenutil import token_at_cursor

from . import completion

__all__ = ["load", "unload"]

_SECONDS = 1.0
_WORD = re.compile(r"\w*")
_TITLE = "\x1b[31m{}:\x1b[39m"


def load(shell: Any) -> None:
    """Lets an IPython kernel's inspection ask ranks; without effect in a terminal."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return
    unload(shell)
    own = kernel.do_inspect

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        reply = _inspect(code, cursor_pos, detail_level)
        return own(code, cursor_pos, detail_level, omit_sections) if reply is None else reply

    kernel.do_inspect = do_inspect


def unload(shell: Any) -> None:
    """Takes it away."""
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        vars(kernel).pop("do_inspect", None)


def _inspect(code: str, cursor: int, detail: int) -> dict[str, Any] | None:
    """The kernel's reply; None if it is for the kernel to answer."""
    cell = completion.CELL.match(code)
    if cell is None or cursor < cell.end():
        return None
    text = _name_at(code[cell.end() :], cursor - cell.end())
    rank = completion.first_rank(cell["options"])
    answer = completion.ask(cell["options"], "help", _SECONDS, text=text, source=detail > 0) if text else None
    if answer is None or "sections" not in answer:
        return None
    data = {"text/plain": _as_text(answer["sections"], rank)} if answer["sections"] else {}
    return {"status": "ok", "found": bool(data), "data": data, "metadata": {}}


def _name_at(code: str, cursor: int) -> str:
    """The name at the cursor with its attributes and subscripts; within a call, the function's."""
    word = _WORD.match(code, cursor)
    path = completion.PATH.search(code[: word.end() if word is not None else cursor])
    if path is not None and "[" in path.group():
        return path.group().strip()
    return str(token_at_cursor(code, cursor))


def _as_text(sections: list[tuple[str, str]], rank: int) -> str:
    lines = [f"{_TITLE.format('Rank')} {rank}"]
    for title, text in sections:
        lines.append(f"{_TITLE.format(title)}{chr(10) if chr(10) in text else ' '}{text}")
    return "\n".join(lines)
