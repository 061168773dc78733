"""Cells as a script for torchrun: which cells belong to it, what each becomes, and what stands around them."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import TransformerManager

from ...errors import DdpLabError
from ...formatting import enumeration
from ..options import distributed_parser
from . import frame
from .cells import NotebookCell
from .imports import Imports, gather
from .settings import StartSettings
from .source_text import Edit, awaits, bound_names, indented, is_empty, parsed, replaced, segment

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
_PUSHED = "pushed_by_rank_0"  # a function of the script that does for all ranks what a push does in a notebook
_RUN_THEIR_CODE = {"time", "capture", "prun"}
_ONLY_IN_NOTEBOOKS = {"load_ext", "reload_ext", "unload_ext", "cluster", "matplotlib", "config", "xmode", "autoreload"}
_ONLY_IN_NOTEBOOKS |= {"pinfo", "pinfo2", "precision", "pprint", "colors"}
_METHODS = {"run_line_magic", "run_cell_magic", "system", "getoutput"}


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


@dataclass
class PlainCode:
    """A cell's code without IPython's syntax.

    Attributes:
        text: the code.
        modules: which modules the translation uses.
        pushed: names that are assigned by a push.
        pushes: whether there is a push.
        untranslated: what became a comment.
    """

    text: str
    modules: set[str] = field(default_factory=set)
    pushed: set[str] = field(default_factory=set)
    pushes: bool = False
    untranslated: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Magic:
    """A magic or shell command as IPython's transformation writes it."""

    method: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, value: ast.expr | None) -> _Magic | None:
        """The magic that an expression runs; None if it runs none."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return None
        shell, method = value.func.value, value.func.attr
        if not isinstance(shell, ast.Call) or not isinstance(shell.func, ast.Name) or shell.func.id != "get_ipython":
            return None
        texts = tuple(one.value for one in value.args if isinstance(one, ast.Constant) and isinstance(one.value, str))
        return cls(method, texts) if method in _METHODS and texts and len(texts) == len(value.args) else None

    def __str__(self) -> str:
        """As in the notebook."""
        if self.method == "run_cell_magic":
            name, line, body = self.arguments
            return f"%%{name} {line}".rstrip() + f"\n{body}".rstrip()
        if self.method == "run_line_magic":
            return f"%{' '.join(self.arguments)}".rstrip()
        return f"!{self.arguments[0]}"

    @property
    def name(self) -> str:
        """The magic's name; "!" for a shell command."""
        return self.arguments[0] if self.method.startswith("run_") else "!"


def plain(text: str, *, of_client: bool = False) -> PlainCode:
    """The code of a cell, or of a part of one, without IPython's syntax.

    Args:
        text: as in the notebook, without the line of `%%distributed`.
        of_client: whether it ran in the notebook's own process; there, `lab` is the cluster.

    Raises:
        SyntaxError: the code is not valid.
    """
    code: str = TransformerManager().transform_cell(text)  # type: ignore[no-untyped-call]
    made, edits = PlainCode(code), []
    tree = parsed(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Expr, ast.Assign)):
            edit = _edit_of_magic(made, code, node)
            if edit is not None:
                edits.append(edit)
    if of_client:
        edits += _edits_of_cluster(made, code, tree)
    made.text = replaced(code, edits)
    return made


def _edit_of_magic(made: PlainCode, code: str, node: ast.Expr | ast.Assign) -> Edit | None:
    """Replaces a statement that runs a magic."""
    magic = _Magic.of(node.value)
    if magic is None:
        return None
    begin, end = segment(code, node)
    new = _translated(made, magic, isinstance(node, ast.Assign))
    if new is not None and isinstance(node, ast.Assign):
        new = code[begin : segment(code, node.value)[0]] + new
    if new is not None and ("\n" not in new or node.col_offset == 0):
        return begin, end, new or ("pass" if node.col_offset else "")
    made.untranslated.append(str(magic).splitlines()[0])
    return begin, end, _comment(str(magic), in_block=node.col_offset > 0)


def _comment(words: str, in_block: bool) -> str:
    first, *rest = words.splitlines()
    lines = [f"{'pass  ' if in_block else ''}# not translated: {first}", *(f"#     {line}".rstrip() for line in rest)]
    return "\n".join(lines)


def _translated(made: PlainCode, magic: _Magic, assigned: bool) -> str | None:
    """A magic as Python; None if there is no translation."""
    if magic.name == "!":
        return _of_shell(made, magic.arguments[0], magic.method == "getoutput")
    if magic.name in _ONLY_IN_NOTEBOOKS and not assigned:
        return ""
    if magic.name in _RUN_THEIR_CODE:
        body = magic.arguments[-1]
        inner = plain(body)
        if assigned and not _is_expression(inner.text):
            return None
        _take(made, inner)
        return inner.text.strip("\n")
    if magic.method == "run_cell_magic":
        name, line, body = magic.arguments
        return _of_shell(made, body, False, "bash") if name in ("bash", "sh") and not line.strip() else None
    simple = _LINES.get(magic.name)
    return None if simple is None or assigned else simple(made, magic.arguments[1])


def _take(made: PlainCode, inner: PlainCode) -> None:
    made.modules |= inner.modules
    made.pushed |= inner.pushed
    made.pushes = made.pushes or inner.pushes
    made.untranslated += inner.untranslated


def _is_expression(text: str) -> bool:
    body = parsed(text).body
    return len(body) == 1 and isinstance(body[0], ast.Expr)


def _of_shell(made: PlainCode, command: str, output: bool, program: str = "") -> str | None:
    """A shell command; IPython would put Python's values in the place of `{name}` and `$name`."""
    if "$" in command and not program:
        return None
    words = repr(command)
    if "{" in command and not program:
        words = f"f{words}"
        try:
            parsed(words)
        except SyntaxError:
            return None
    if command.strip().startswith(("pip ", "conda ")):
        return None
    made.modules.add("subprocess")
    given = f'["{program}", "-c", {words}]' if program else f"{words}, shell=True"
    if output:
        return f"subprocess.run({given}, stdout=subprocess.PIPE, text=True).stdout.splitlines()"
    return f"subprocess.run({given})"


def _env(made: PlainCode, line: str) -> str | None:
    name, equals, value = line.partition("=")
    if not equals:
        name, _, value = line.partition(" ")
    if not name.strip().isidentifier() or not value or {"$", "{"} & set(value):
        return None
    made.modules.add("os")
    return f"os.environ[{name.strip()!r}] = {value.strip()!r}"


def _cd(made: PlainCode, line: str) -> str | None:
    folder = line.removeprefix("-q ").strip().strip("'\"")
    if not folder or folder.startswith("-") or {"$", "{", "~"} & set(folder):
        return None
    made.modules.add("os")
    return f"os.chdir({folder!r})"


def _push(made: PlainCode, line: str) -> str | None:
    names = line.split()
    if not names or not all(name.isidentifier() for name in names):
        return None  # with --ranks
    made.pushes = True
    return _assignment(names, names, ())


_LINES: dict[str, Callable[[PlainCode, str], str | None]] = {
    "env": _env,
    "set_env": _env,
    "cd": _cd,
    "push": _push,
}
"""Line magics with a translation of their own."""


# -- what a plain cell asks of the cluster


def _edits_of_cluster(made: PlainCode, code: str, tree: ast.Module) -> list[Edit]:
    """Pushes become assignments; other statements with `lab` become comments."""
    edits = []
    own = bound_names(tree)
    for statement in tree.body:
        uses = {id(node) for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == "lab"}
        found = []
        for node in ast.walk(statement):
            edit = _edit_of_call(made, code, node, own) if isinstance(node, ast.Expr) else None
            if edit is not None:
                found.append(edit)
                uses -= {id(one) for one in ast.walk(node)}
        if uses:
            begin, end = segment(code, statement)
            made.untranslated.append(code[begin:end].splitlines()[0])
            found = [(begin, end, _comment(code[begin:end], in_block=False))]
        edits += found
    return edits


def _of_push(made: PlainCode, code: str, given: ast.expr, own: Sequence[str]) -> str:
    """Assigns the values of rank 0: to names, or to what a computed dict names; `own` are the cell's variables."""
    begin, end = segment(code, given)
    if not isinstance(given, ast.Dict):
        return f"globals().update({_PUSHED}({code[begin:end]}))"
    names = [key.value if isinstance(key, ast.Constant) else None for key in given.keys]
    made.pushed |= {str(name) for name in names}
    texts = [str(name) for name in names if isinstance(name, str) and name.isidentifier()]
    if len(set(texts)) < len(names) or not names:
        return f"globals().update({_PUSHED}({code[begin:end]}))"
    return _assignment(texts, [code[slice(*segment(code, value))] for value in given.values], own)


def _assignment(names: Sequence[str], values: Sequence[str], own: Sequence[str]) -> str:
    """Assigns the values of rank 0.

    An object of the notebook whose name a push gives to another one gets a second name: a temporary folder, for
    example, would be removed without one.
    """
    given = f"{_PUSHED}({values[0] if len(values) == 1 else '(' + ', '.join(values) + ')'})"
    kept = [name for name, value in zip(names, values, strict=True) if name in own and value != name]
    if not kept:
        return f"{', '.join(names)} = {given}"
    targets = ", ".join([*(f"{name}_in_notebook" for name in kept), f"({', '.join(names)}{',' * (len(names) == 1)})"])
    return f"{targets} = {', '.join(kept)}, {given if len(names) > 1 else f'[{given}]'}"


def _edit_of_call(made: PlainCode, code: str, node: ast.Expr, own: Sequence[str]) -> Edit | None:
    """Replaces `lab.push(values)`, and `lab.run("code")` at the top of a cell."""
    call = node.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.keywords:
        return None
    if not isinstance(call.func.value, ast.Name) or call.func.value.id != "lab" or len(call.args) != 1:
        return None
    [given] = call.args
    if call.func.attr == "push" and not any(isinstance(one, ast.Name) and one.id == "lab" for one in ast.walk(given)):
        made.pushes = True
        return (*segment(code, node), _of_push(made, code, given, own))
    text = given.value if isinstance(given, ast.Constant) else None
    if call.func.attr == "run" and isinstance(text, str) and node.col_offset == 0:
        try:
            inner = plain(text)
        except SyntaxError:
            return None
        _take(made, inner)
        return (*segment(code, node), inner.text.strip("\n"))
    return None
