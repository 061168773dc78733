"""Tab and Shift-Tab in `%%distributed` cells: names and attributes as they are on a rank, and the help on a name there.

The rank answers from a thread beside its running cell (`ddp_lab.engine.cells.name_lookup`). If it does not answer in
time, the notebook answers from its own names.

[Note: inspection of ranks]
Jupyter sends the kernel the cell's whole text and the cursor's place; IPython's hooks get only the name there, without
the kind of cell. So we wrap the kernel's own `do_inspect`, which has had the same arguments since ipykernel 6; requests
that are not for a rank, or not answered in time, are passed on to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.utils.tokenutil import token_at_cursor

from ..errors import ClusterError
from ..formatting import parse_ranks
from ..protocol.entry_points import CLUSTER
from ..protocol.messages import Complete, Completions, LookUp, Page, Request

__all__ = ["ask", "load", "unload"]

_R = TypeVar("_R")
_COMPLETE_SECONDS, _INSPECT_SECONDS = 0.3, 1.0
_WORD = re.compile(r"\w*")
_TITLE = "\x1b[31m{}:\x1b[39m"
_CELL = re.compile(r"\s*%%distributed\b(?P<options>[^\n]*)\n")
_CLUSTER = re.compile(r"--cluster[ =](?P<name>\S+)")
_RANKS = re.compile(r"--ranks[ =](?P<ranks>\S+)")
# A name with attributes and literal subscripts, up to the cursor.
_PATH = re.compile(r"""(?:[^\W\d]\w*(?:\[(?:\d+|'[^'\n]*'|"[^"\n]*")\])*\s*\.\s*)*(?:[^\W\d]\w*)?$""")


def load(shell: Any) -> None:
    """Makes completion in an IPython shell, and inspection in its kernel if it has one, ask ranks."""
    unload(shell)
    shell.Completer.custom_matchers.append(_matcher)
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return
    own = kernel.do_inspect

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        reply = _inspect(code, cursor_pos, detail_level)
        return own(code, cursor_pos, detail_level, omit_sections) if reply is None else reply

    kernel.do_inspect = do_inspect


def unload(shell: Any) -> None:
    """Undoes that."""
    matchers = shell.Completer.custom_matchers
    matchers[:] = [each for each in matchers if each is not _matcher]
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        vars(kernel).pop("do_inspect", None)


@context_matcher(identifier="ddp_lab.rank_names")  # type: ignore[untyped-decorator, unused-ignore]
def _matcher(context: CompletionContext) -> dict[str, Any]:
    cell = _CELL.match(context.full_text)
    path = _PATH.search(context.text_until_cursor)
    if cell is None or context.cursor_line < 1 or path is None or not path.group():
        return {"completions": []}
    text = path.group()
    found = (ask(cell["options"], Complete(text), _COMPLETE_SECONDS) or Completions()).matches
    begun = text.rpartition(".")[2].strip()
    completions = [SimpleCompletion(name, type=kind) for name, kind in found]
    # The notebook's variable of the same name is not the rank's.
    return {"completions": completions, "matched_fragment": begun, "suppress": bool(found) and "." in text}


def _inspect(code: str, cursor: int, detail: int) -> dict[str, Any] | None:
    """The reply; None if the kernel is to answer."""
    cell = _CELL.match(code)
    if cell is None or cursor < cell.end():
        return None
    text = _name_at(code[cell.end() :], cursor - cell.end())
    rank = _first_rank(cell["options"])
    page = ask(cell["options"], LookUp(text, source=detail > 0), _INSPECT_SECONDS) if text else None
    sections = (page or Page()).sections
    if sections is None:
        return None
    data = {"text/plain": _as_text(sections, rank)} if sections else {}
    return {"status": "ok", "found": bool(data), "data": data, "metadata": {}}


def _name_at(code: str, cursor: int) -> str:
    """The name at the cursor with its attributes and subscripts; within a call, the function's."""
    word = _WORD.match(code, cursor)
    path = _PATH.search(code[: word.end() if word is not None else cursor])
    if path is not None and "[" in path.group():
        return path.group().strip()
    return str(token_at_cursor(code, cursor))


def _as_text(sections: Sequence[tuple[str, str]], rank: int) -> str:
    lines = [f"{_TITLE.format('Rank')} {rank}"]
    for title, text in sections:
        lines.append(f"{_TITLE.format(title)}{chr(10) if chr(10) in text else ' '}{text}")
    return "\n".join(lines)


def _first_rank(options: str) -> int:
    """The first of the ranks that a cell's line names; 0 if it names none."""
    named = _RANKS.search(options)
    try:
        return parse_ranks(named["ranks"])[0] if named is not None else 0
    except ValueError:
        return 0


def ask(options: str, request: Request[_R], seconds: float) -> _R | None:
    """The answer of the first rank on which a cell with these options would run.

    None if there is no cluster, or no answer in time.
    """
    module = sys.modules.get(CLUSTER)
    clusters = module.running_clusters() if module is not None else []
    named, rank = _CLUSTER.search(options), _first_rank(options)
    cluster = next((one for one in clusters if named is None or one.name == named["name"]), None)
    if cluster is None or rank >= cluster.world_size:
        return None
    try:
        answers: Mapping[int, _R] = cluster.wire.request([rank], request, seconds)
    except ClusterError:  # it is being stopped
        return None
    return answers.get(rank)
