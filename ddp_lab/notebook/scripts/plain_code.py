"""The code of one cell as plain Python: magics, shell commands and what a plain cell asks of the cluster."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from IPython.core.inputtransformer2 import TransformerManager

from .source_text import Edit, bound_names, parsed, replaced, segment

__all__ = ["PUSHED", "PlainCode", "plain"]

PUSHED = "pushed_by_rank_0"
"""The function in a script that does for all ranks what a push does in a notebook."""

_RUN_THEIR_CODE = {"time", "capture", "prun"}
_ONLY_IN_NOTEBOOKS = {"load_ext", "reload_ext", "unload_ext", "cluster", "matplotlib", "config", "xmode", "autoreload"}
_ONLY_IN_NOTEBOOKS |= {"pinfo", "pinfo2", "precision", "pprint", "colors"}
_METHODS = {"run_line_magic", "run_cell_magic", "system", "getoutput"}


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
        return f"globals().update({PUSHED}({code[begin:end]}))"
    names = [key.value if isinstance(key, ast.Constant) else None for key in given.keys]
    made.pushed |= {str(name) for name in names}
    texts = [str(name) for name in names if isinstance(name, str) and name.isidentifier()]
    if len(set(texts)) < len(names) or not names:
        return f"globals().update({PUSHED}({code[begin:end]}))"
    return _assignment(texts, [code[slice(*segment(code, value))] for value in given.values], own)


def _assignment(names: Sequence[str], values: Sequence[str], own: Sequence[str]) -> str:
    """Assigns the values of rank 0.

    An object of the notebook whose name a push gives to another one gets a second name: a temporary folder, for
    example, would be removed without one.
    """
    given = f"{PUSHED}({values[0] if len(values) == 1 else '(' + ', '.join(values) + ')'})"
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
