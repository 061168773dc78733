"""Cells as a script for torchrun: which cells belong to it, what each becomes, and what stands around them."""

from __future__ import annotations

import builtins
import re
import symtable
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from IPython.core.error import UsageError

from ...errors import DdpLabError
from ...formatting import enumeration
from ..options import distributed_parser
from . import frame
from .cells import NotebookCell
from .imports import Imports, gather
from .plain_code import PlainCode, plain
from .settings import StartSettings
from .source_text import awaits, bound_names, indented, is_empty, parsed

__all__ = ["ExportedScript", "export"]

_OF_RANKS = re.compile(r"(?:\s*%%(?:time|capture|prun)\b[^\n]*\n)*\s*%%distributed\b([^\n]*)(?:\n|$)")
_MARK = re.compile(r"\s*#[ \t]*(no[ \t]+)?export[ \t]*(?:\n|$)", re.IGNORECASE)
_GIVEN = {"__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__annotations__", "__debug__"}
# Options of %%distributed that a script has no use for, and why.
_DROPPED = {
    "timeout": "a script has no limit of time for a part",
    "dashboard": "`ddp-lab run` records the script",
    "no_wait": "the script waits until this part has ended",
    "quiet": "the script prints its outputs",
}


@dataclass(frozen=True)
class ExportedScript:
    """A script and what was lost on the way to it.

    Attributes:
        text: the script.
        cells: number of the cells in it.
        command: starts it, with as many ranks as the notebook had.
        notes: in words, what was left out.
    """

    text: str
    cells: int
    command: str
    notes: tuple[str, ...]


@dataclass
class _Part:
    """A cell on its way into the script."""

    name: str
    code: PlainCode
    ranks: Sequence[int] | None = None
    remarks: tuple[str, ...] = ()


def export(cells: Sequence[NotebookCell], settings: StartSettings, origin: str, script: str) -> ExportedScript:
    """Translates cells.

    Args:
        cells: in their order.
        settings: of the start of the ranks.
        origin: the notebook's name, for the script's first line.
        script: the script's name, for the command that starts it.

    Raises:
        DdpLabError: no cell can be exported.
    """
    parts, left_out = _parts(cells, settings)
    if not parts:
        why = f"; left out: {', '.join(left_out)}" if left_out else ""
        remedy = "run `%%distributed` cells first, or begin plain cells with `# export`"
        raise DdpLabError(f"{origin} has no cell to export{why}: {remedy}")
    modules = {module for part in parts for module in part.code.modules}
    used = set(_words("\n".join(part.code.text for part in parts)))
    imports, first = Imports(), ["import torch", "import torch.distributed as dist"]
    first += ["import ddp_lab"] if "ddp_lab" in used else []
    codes = gather([part.code.text for part in parts], imports, [*(f"import {one}" for one in sorted(modules)), *first])
    bodies = [_body(part, code, number) for number, (part, code) in enumerate(zip(parts, codes, strict=True), start=1)]
    text = "\n\n".join(body for body in bodies if body)
    if "display" in used and not any("display" in bound_names(parsed(part.code.text)) for part in parts):
        imports.add_line("from IPython.display import display")
    pushes = any(part.code.pushes for part in parts)
    made = frame.around(
        text, imports, settings, origin, script, pushes=pushes, events=f"{frame.EVENTS}.run_until_complete(" in text
    )
    pushed = {name for part in parts for name in part.code.pushed}
    undefined = [
        name
        for name in _undefined(
            made.partition(f"# %% {frame.OURS} the end")[0] if not text else made.partition(text)[0], bodies
        )
        if name not in pushed
    ]
    notes = [f"left out: {one}" for one in left_out]
    notes += [f"{part.name}: `{line}` became a comment" for part in parts for line in part.code.untranslated]
    if undefined:
        them = "it before it is read" if len(undefined) == 1 else "them before they are read"
        notes.append(
            f"{enumeration(undefined)}: no exported cell defines {them}; write `# export` in the first line of the "
            "plain cell that does"
        )
    return ExportedScript(made, len(parts), frame.command(settings, script), tuple(notes))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d]\w*", text)


# -- which cells


def _parts(cells: Iterable[NotebookCell], settings: StartSettings) -> tuple[list[_Part], list[str]]:
    """The cells that belong to the script; and which of the others a reader may miss."""
    parts: list[_Part] = []
    notes: list[str] = []
    unmarked = 0
    for cell in cells:
        on_ranks = _OF_RANKS.match(cell.text)
        body = cell.text if on_ranks is None else cell.text[on_ranks.end() :]
        mark = _MARK.match(body)
        if mark is not None:
            body = body[mark.end() :]
        refused = mark is not None and mark[1] is not None
        if on_ranks is None and mark is None:
            unmarked += 1
        if refused or (on_ranks is None and mark is None) or not body.strip():
            continue
        if cell.left_out:
            notes.append(f"{cell.name} ({cell.left_out})")
            continue
        try:
            made = _part(cell.name, body, None if on_ranks is None else on_ranks[1], settings)
        except (SyntaxError, UsageError) as error:
            notes.append(f"{cell.name} ({str(error).splitlines()[0]})")
            continue
        if isinstance(made, str):
            notes.append(f"{cell.name} ({made})")
        else:
            parts.append(made)
    if unmarked:
        plural = "cell that does" if unmarked == 1 else "cells that do"
        notes.append(f"{unmarked} plain {plural} not begin with `# export`")
    return parts, notes


def _part(name: str, body: str, line: str | None, settings: StartSettings) -> _Part | str:
    """One cell; or why it is left out."""
    if line is None:
        code = plain(body, of_client=True)
        return "it has only lines for notebooks" if is_empty(code.text) else _checked(_Part(name, code))
    options = distributed_parser().parse_line(line)
    if options is None:
        return "it shows a help text"
    if options.cluster is not None and options.cluster != settings.name:
        return f"it runs on the cluster {options.cluster}"
    remarks = [
        f"left out: --{option.replace('_', '-')}; {why}" for option, why in _DROPPED.items() if getattr(options, option)
    ]
    named = f"{name}: {options.name}" if options.name else name
    return _checked(_Part(named, plain(body), options.ranks, tuple(remarks)))


def _checked(part: _Part) -> _Part:
    """Raises SyntaxError for code that Python accepts in a notebook only."""
    compile(_body(part, part.code.text, 1), "<cell>", "exec", dont_inherit=True)
    return part


# -- what a cell becomes


def _body(part: _Part, code: str, number: int) -> str:
    """The part of the script that does what the cell did; "" if nothing is left of it."""
    code = "\n".join(line.rstrip() if not line.strip() else line for line in code.strip("\n").split("\n"))
    if not code.strip():
        return ""
    before = ""
    if awaits(parsed(code)):
        before, code = _coroutine(code, f"cell_{number}")
    if part.ranks is not None and not is_empty(code):
        code = f"if {_condition(part.ranks)}:\n{indented(code)}"
    return "\n".join([f"# %% {part.name}", *(f"# {remark}" for remark in part.remarks), before + code])


def _condition(ranks: Sequence[int]) -> str:
    return f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in ({', '.join(map(str, ranks))})"


def _coroutine(code: str, name: str) -> tuple[str, str]:
    """A function that awaits, whose variables are global, and the line that runs it."""
    names = bound_names(parsed(code))
    declared = f"    global {', '.join(names)}\n" if names else ""
    return f"async def {name}():\n{declared}{indented(code)}\n\n\n", f"{frame.EVENTS}.run_until_complete({name}())"


# -- names


def _undefined(start: str, bodies: Sequence[str]) -> list[str]:
    """Names that a script reads before it defines them, in alphabetical order.

    Args:
        start: the part of the script above its cells.
        bodies: what the cells became. At their top, a name must be defined before; in functions, anywhere.
    """
    if re.search(r"^[ \t]*from .* import \*", "\n".join(bodies), re.MULTILINE):
        return []
    defined = _names(start)[0]
    missing: set[str] = set()
    later: set[str] = set()
    for body in bodies:
        own, read, inside = _names(body)
        defined |= own
        missing |= read - defined
        later |= inside
    return sorted(name for name in missing | (later - defined) if name not in _GIVEN and not hasattr(builtins, name))


def _names(code: str) -> tuple[set[str], set[str], set[str]]:
    """The global names that code defines, that it reads at its top, and that its functions and classes read."""
    defined: set[str] = set()
    read: set[str] = set()
    inside: set[str] = set()
    for scope in _scopes(symtable.symtable(code, "script", "exec")):
        at_top = scope.get_type() == "module"
        for symbol in scope.get_symbols():
            name = symbol.get_name()
            if (symbol.is_assigned() or symbol.is_imported()) and (at_top or symbol.is_declared_global()):
                defined.add(name)
            if symbol.is_referenced() and (at_top or symbol.is_global()):
                (read if at_top else inside).add(name)
    return defined, read, inside


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)
