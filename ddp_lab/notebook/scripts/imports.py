"""The imports of cells, gathered at the top of a script: each once, in the order in which they appear."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from .source_text import Edit, bound_names, parsed, replaced, segment

__all__ = ["Imports", "gather"]

_WIDTH = 100
# After such a line an import may find another module, or the module reads the variable.
_CHANGES_IMPORTS = re.compile(
    r"\bsys\.path\b|\bos\.chdir\(|\bos\.putenv\(|\bos\.environ(?:\[[^\]]*\]\s*=[^=]|\.(?:update|setdefault|pop)\()"
)
_REST_OF_STATEMENT = re.compile(r"[ \t]*;[ \t]*")
_Import = ast.Import | ast.ImportFrom


class Imports:
    """Import statements in order, without duplicates."""

    def __init__(self) -> None:
        self.future: dict[str, None] = {}
        self._plain: dict[str, None] = {}  # lines, in order
        self._from: dict[str, dict[str, None]] = {}  # module -> names
        self._known: set[tuple[str, str]] = set()

    def add(self, node: _Import) -> None:
        """Adds a statement; what is already there is not repeated."""
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            self.future.update(dict.fromkeys(one.name for one in node.names))
            return
        for alias in node.names:
            if isinstance(node, ast.Import) and alias.asname is None:
                self._plain[f"import {alias.name}"] = None
                continue
            key = _origin(node, alias)
            if key in self._known:
                continue
            self._known.add(key)
            words = alias.name if alias.asname in (None, alias.name) else f"{alias.name} as {alias.asname}"
            if isinstance(node, ast.Import):
                self._plain[f"import {words}"] = None
            else:
                self._plain[f"from {node.module}"] = None
                self._from.setdefault(f"from {node.module}", {})[words] = None

    def add_line(self, line: str) -> None:
        """Adds a statement that is given as text."""
        for statement in ast.parse(line).body:
            assert isinstance(statement, _Import)
            self.add(statement)

    def lines(self) -> list[str]:
        """The statements, except those of `__future__`."""
        return [self._line(one) for one in self._plain]

    def _line(self, begin: str) -> str:
        if begin not in self._from:
            return begin
        names = list(self._from[begin])
        line = f"{begin} import {', '.join(names)}"
        if len(line) <= _WIDTH:
            return line
        return "\n".join([f"{begin} import (", *(f"    {name}," for name in names), ")"])


def _origin(node: _Import, alias: ast.alias) -> tuple[str, str]:
    """The name that is bound, and the object that it is bound to."""
    if isinstance(node, ast.ImportFrom):
        return alias.asname or alias.name, f"{node.module}.{alias.name}"
    if alias.asname is None:
        return (top := alias.name.partition(".")[0]), top
    return alias.asname, alias.name


def gather(cells: Sequence[str], imports: Imports, first: Iterable[str] = ()) -> list[str]:
    """Moves the imports at the top of cells into `imports`; returns the cells without them.

    An import stays where it is if code above it changes where modules are found or the environment, or if other code
    binds the same name.

    Args:
        cells: the code of each cell.
        imports: changed.
        first: import statements that come before those of the cells.
    """
    trees = [parsed(cell) for cell in cells]
    bound = {name for tree in trees for name in bound_names(tree, imports=False)}
    origins = defaultdict(set)
    for tree in trees:
        for node in tree.body:
            if isinstance(node, _Import):
                for alias in node.names:
                    name, origin = _origin(node, alias)
                    origins[name].add(origin)
    fixed = bound | {name for name, found in origins.items() if len(found) > 1}
    for line in first:
        imports.add_line(line)
    rest, movable = [], True
    for cell, tree in zip(cells, trees, strict=True):
        edits: list[Edit] = []
        for node in tree.body:
            if not isinstance(node, _Import):
                begin, end = segment(cell, node)
                movable = movable and _CHANGES_IMPORTS.search(cell, begin, end) is None
            elif _may_move(node, fixed, movable):
                imports.add(node)
                edits.append(_removal(cell, node, edits[-1] if edits else (0, 0, "")))
        rest.append(replaced(cell, edits))
    return rest


def _may_move(node: _Import, fixed: set[str], movable: bool) -> bool:
    if isinstance(node, ast.ImportFrom):
        if node.module == "__future__":
            return True
        if node.level or node.names[0].name == "*":
            return False
    return movable and not any(_origin(node, alias)[0] in fixed for alias in node.names)


def _removal(text: str, node: _Import, last: Edit) -> Edit:
    """Removes a statement, and its line if nothing else but a comment is there; `last` is the removal before it."""
    begin, end = segment(text, node)
    line_begin = text.rfind("\n", 0, begin) + 1
    alone = line_begin == begin or last[:2] == (line_begin, begin)
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end + 1
    further = _REST_OF_STATEMENT.match(text, end)
    if further is not None and further.end() < line_end and text[further.end() : line_end].strip():
        return begin, further.end(), ""
    after = text[further.end() if further is not None else end : line_end].strip()
    if alone and (not after or after.startswith("#")):
        return begin, line_end, ""
    before = text[line_begin:begin].rstrip().removesuffix(";").rstrip()
    return line_begin + len(before), end, ""  # after another statement on its line
