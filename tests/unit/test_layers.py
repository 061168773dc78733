"""The order of packages, read from ARCHITECTURE.md: which may import which, and which libraries each side may load."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import ddp_lab

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ddp_lab"
TABLE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("## Packages")[1].split("C++, in")[0]
ROWS = re.findall(r"^\| (`.+?`) \| (\w+) \|", TABLE, re.MULTILINE)
PLACES = {name: (side, row) for row, (names, side) in enumerate(ROWS) for name in re.findall(r"[\w.]+", names)}
LIBRARIES = {
    "client": {"torch"},
    "rank": {"ipywidgets", "anywidget", "plotly", "pandas"},
    "any": {"torch", "ipywidgets", "anywidget", "plotly", "pandas"},
}
OWN_NAMES = {"_version", "__version__", "_built_for"}


@cache
def _modules() -> dict[str, ast.Module]:
    """Dotted name of each module -> its source; a package's is that of its `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


PACKAGES = {".".join(path.relative_to(ROOT).parts[:-1]) for path in PACKAGE.rglob("__init__.py")}


def _named(name: str) -> Iterator[tuple[str, ...]]:
    """What a module names in its imports from anywhere: at its top, in functions, for the type checker."""
    own = _package(name)
    for node in ast.walk(_modules()[name]):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level + 1] if node.level else ()
            module = node.module.split(".") if node.module else []
            yield from ((*base, *module, alias.name) for alias in node.names)


def _imported(name: str) -> Iterator[str]:
    """The modules behind these names, dotted."""
    for path in _named(name):
        full = ".".join(path)
        yield full if full in _modules() or len(path) == 1 else ".".join(path[:-1])


def _package(name: str) -> tuple[str, ...]:
    parts = tuple(name.split("."))
    return parts if name in PACKAGES else parts[:-1]


def _face(package: str) -> set[str]:
    """What `__all__` of a package lists: its public names and modules."""
    for node in _modules()[package].body:
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Name) and target.id == "__all__":
                return set(ast.literal_eval(node.value))
    raise AssertionError(f"{package} has no __all__")


def _room(name: str) -> str:
    """The package or sub-package of a module that has a row; of several the innermost."""
    path = name.split(".")[1:]
    return next((room for end in range(len(path), 0, -1) if (room := ".".join(path[:end])) in PLACES), "")


def test_every_package_has_its_row() -> None:
    """What stands in the package is what stands in the table; a row of a sub-package is one that exists."""
    there = {path.stem for path in PACKAGE.glob("*.py")} | {name.split(".")[1] for name in PACKAGES - {"ddp_lab"}}
    parts = {name for name in PLACES if "." in name}
    assert PLACES.keys() - parts == there - {"__init__"}
    assert {f"ddp_lab.{name}" for name in parts} <= PACKAGES


def test_packages_import_only_from_those_above() -> None:
    """In the order of the table, and never from the other side of the wire; whatever kind of import it is."""
    wrong = []
    for name in _modules().keys() - {"ddp_lab"}:
        side, row = PLACES[_room(name)]
        others = {_room(one) for one in _imported(name) if one.startswith("ddp_lab.")} & PLACES.keys()
        for other in others - {_room(name)}:
            its_side, its_row = PLACES[other]
            if its_row > row or (its_side not in (side, "any") and side != "both"):
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_the_sides_import_only_their_own_libraries() -> None:
    """The client never names torch, a rank never names ipywidgets, anywidget, plotly or pandas."""
    wrong = []
    for name in _modules().keys() - {"ddp_lab"}:
        forbidden = LIBRARIES.get(PLACES[_room(name)][0], set())
        wrong += [f"{name} imports {one}" for one in _imported(name) if one.split(".")[0] in forbidden]
    assert wrong == []


def test_no_files_import_each_other() -> None:
    """Read in some order, each file needs only what was read before."""
    needs = {
        name: {one for one in _imported(name) if one in _modules()} - {name} for name in _modules().keys() - {"ddp_lab"}
    }
    try:
        list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_what_a_package_does_not_list_is_its_own() -> None:
    """From outside of a package its `__all__` is all there is, and never a name with an underscore."""
    faces = {name: _face(name) for name in PACKAGES - {"ddp_lab"}}
    wrong = []
    for name in _modules():
        own, lazy = _package(name), name == "ddp_lab"
        named = {*_named(name), *(("ddp_lab", *path.split(".")) for path in ddp_lab._PUBLIC.values() if lazy)}
        for path in named:
            for depth in range(2, len(path)):
                package, inner = ".".join(path[:depth]), path[:depth] == own[:depth]
                if package in faces and not inner and path[depth] not in faces[package]:
                    wrong.append(f"{name} reaches into {package}: {path[depth]}")
            if path[0] == "ddp_lab" and path[:2] != own[:2] and path[-1].startswith("_") and path[-1] not in OWN_NAMES:
                wrong.append(f"{name} imports {'.'.join(path)}")
    assert sorted(wrong) == []
