"""`make affected`: runs the tests that the changed files reach.

A file reaches what it imports, anywhere in it, and what it names in a string: a module that another process starts, a
script, a document, a notebook. That is read from the sources and needs no earlier run. pytest-testmon, which follows
what each test runs, sees one process: not the ranks, kernels and programs that most tests here start.

`python -m tests.affected REVISION [OPTION ...]` compares the working tree with that revision, and passes the options to
pytest. With ``--list`` it only prints the files.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import ddp_lab
from ddp_lab.protocol import entry_points

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = ("ddp_lab", "notebooks", "tests", "tutorials")
_ALL = ("pyproject.toml", "setup.py", "Makefile", "tests/conftest.py")  # reach every test
# List modules for others: what names one of their entries is followed to the module.
_LISTS = ("ddp_lab/__init__.py", "ddp_lab/protocol/entry_points.py")
# Folders whose files no test imports -> the file through which they are reached.
_HOLDERS = {
    "csrc/": "ddp_lab/native.py",
    "ddp_lab/dashboard/static/": "ddp_lab/dashboard/bundle.py",
    "notebooks/": "tests/notebooks/running.py",
    "tutorials/": "tests/notebooks/running.py",
}
# What a test's string says in place of a module's name.
_SPOKEN = {
    "%load_ext ddp_lab": "ddp_lab/notebook/magics.py",
    "%%distributed": "ddp_lab/notebook/magics.py",
    "%cluster": "ddp_lab/notebook/magics.py",
    "%reload_ext ddp_lab": "ddp_lab/notebook/magics.py",
}
# Modules whose names lead to other modules.
_FACES = {"ddp_lab": "ddp_lab", "entry_points": "ddp_lab.protocol.entry_points"}
_COMMANDS = ("ddp_lab", "ddp-lab")  # alone in a string: an argument
_CLI = "ddp_lab/cli/main.py"


def changed(revision: str) -> set[str]:
    """Files that differ from `revision`, and new ones, relative to the root."""
    differ = _git("diff", "--name-only", revision, "--")
    return {*differ, *_git("ls-files", "--others", "--exclude-standard")}


def affected(files: Iterable[str]) -> list[str]:
    """The test files that these files reach, or are."""
    files = set(files)
    if files & set(_ALL):
        return sorted(_tests())
    files |= {holder for folder, holder in _HOLDERS.items() if any(name.startswith(folder) for name in files)}
    users: dict[str, set[str]] = {}
    for user, used in graph().items():
        for name in used:
            users.setdefault(name, set()).add(user)
    reached, new = set(files), list(files)
    while new:
        more = users.get(new.pop(), set()) - reached
        reached |= more
        new += more
    return sorted(reached & _tests())


@cache
def graph() -> Mapping[str, frozenset[str]]:
    """Each Python file -> the files that it imports or names."""
    named = _by_name(_git("ls-files", "--cached", "--others", "--exclude-standard"))
    return {name: frozenset(_used(name, named) - {name}) for name in _python_files()}


def _used(name: str, named: Mapping[str, set[str]]) -> set[str]:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    used = {file for module in _imports(name, tree) for file in _files_of(module)}
    for node in ast.walk(tree) if name not in _LISTS else ():
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if name.startswith("tests/"):
            used |= {file for text, file in _SPOKEN.items() if text in node.value}
            used |= {_CLI} if node.value in _COMMANDS else set()
        for word in re.findall(r"[\w./*-]+", node.value)[:2000]:
            used |= named.get(word.rpartition("/")[2], set())
            # In the product a module's name stands alone: in a sentence it is spoken of.
            if "." in word and (name.startswith("tests/") or word == node.value):
                used |= {*_files_of(word), *_files_of(f"ddp_lab.{word.lstrip('.')}")}
    folder = Path(name).parent
    if folder.parts[:1] == ("tests",):  # what pytest loads with it
        used |= {
            str(path / "conftest.py") for path in (folder, *folder.parents) if (ROOT / path / "conftest.py").exists()
        }
    return used


def _imports(name: str, tree: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports, and public names of ddp_lab that it uses."""
    package = Path(name).parent.parts
    for node in _running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            path = [*base, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*path, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _FACES:
            yield f"{_FACES[node.value.id]}.{node.attr}"


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but what only a type checker reads; `ddp_lab` imports its public names when they are first used."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from _running(node)


def _files_of(dotted: str) -> Iterator[str]:
    """The file of a module, of the module that a name is in, or of the one that a public name leads to."""
    parts = dotted.split(".")
    if dotted.startswith("ddp_lab.protocol.entry_points.") and hasattr(entry_points, parts[-1]):
        entry = getattr(entry_points, parts[-1])
        yield from _files_of(str(getattr(entry, "module", entry)))
    if parts[0] == "ddp_lab" and len(parts) > 1:
        public = {**ddp_lab._PUBLIC, **ddp_lab._MODULES}.get(parts[1])
        parts = ["ddp_lab", *public.split(".")] if public else parts
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        files = (f"{folder}{path}{end}" for folder in ("", "notebooks/") for end in (".py", "/__init__.py"))
        found = [file for file in files if file in _python_files()]
        if found:
            yield found[0]
            return


def _by_name(files: Iterable[str]) -> Mapping[str, set[str]]:
    """A file's name -> the files called so; names that say little (`__init__.py`) are left out."""
    found: dict[str, set[str]] = {}
    for file in files:
        if Path(file).name not in ("__init__.py", "conftest.py"):
            found.setdefault(Path(file).name, set()).add(file)
    return found


@cache
def _python_files() -> frozenset[str]:
    return frozenset(str(path.relative_to(ROOT)) for folder in _SOURCES for path in (ROOT / folder).rglob("*.py"))


def _tests() -> set[str]:
    return {name for name in _python_files() if name.startswith("tests/") and Path(name).name.startswith("test_")}


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def main(revision: str, *options: str) -> int:
    """Runs them; pytest's exit code."""
    try:
        files = affected(changed(revision))
    except subprocess.CalledProcessError as error:
        print(f"{revision} is not a revision: {error.stderr.strip()}; give a commit or a branch", file=sys.stderr)
        return 2
    if not files or "--list" in options:
        print("\n".join(files) or f"no test is reached by what has changed since {revision}")
        return 0
    return subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["HEAD"])))
