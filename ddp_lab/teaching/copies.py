"""Copies of the lessons for a class: without solutions for students, or with them."""

from __future__ import annotations

import copy
import json
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from .. import lesson_files
from ..errors import DdpLabError
from ..files import write_text
from .lessons import Lesson, lessons, source, tags

SUPPORT = ("checks", "images", "recordings")
_NAMED = 3  # files in an error
_KINDS = {".py", ".svg", ".npz"}
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)\s]+)\)")


def copy_lessons(into: Path, solutions: bool = False) -> list[Path]:
    """Writes all lessons and the files that they need into a folder.

    Folded answers to predictions and questions stay: readers open them after they have run the cell. Links to files
    that are not copied become the command that opens the page, or the name of the source file. Nothing is written if
    that would replace an edited notebook.

    Args:
        into: the folder; it may exist.
        solutions: keep the cells tagged ``solution``.

    Returns:
        The notebooks.

    Raises:
        DdpLabError: a notebook there differs, or the folder can't be written, or is that of the lessons.
    """
    if into.resolve() == (lesson_files.home() / "tutorials").resolve():
        raise DdpLabError(f"{into} is where the lessons are: name another folder")
    copied = {into / one.path.name: _notebook(one, solutions) for one in lessons()}
    edited = [path for path, notebook in copied.items() if path.exists() and not _same(path, notebook)]
    if edited:
        names = ", ".join(map(str, edited[:_NAMED])) + (f" and {len(edited) - _NAMED} more" if edited[_NAMED:] else "")
        raise DdpLabError(
            f"{names} would be overwritten, but somebody edited {'it' if len(edited) == 1 else 'them'}. Nothing "
            "was written. Move edited notebooks to another folder, or name an empty folder"
        )
    try:
        copy_support(into)
        for path, notebook in copied.items():
            if not path.exists():
                write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    except OSError as error:
        raise DdpLabError(f"can't write {error.filename or into}: {error.strerror}") from error
    return list(copied)


def copy_support(into: Path) -> None:
    """Writes what lessons import and open: checks, images, recordings."""
    home = lesson_files.home() / "tutorials"
    for folder in SUPPORT:
        (into / folder).mkdir(parents=True, exist_ok=True)
        for file in sorted((home / folder).iterdir()):
            if file.suffix in _KINDS:
                shutil.copyfile(file, into / folder / file.name)


def _notebook(lesson: Lesson, solutions: bool) -> dict[str, Any]:
    """The lesson without outputs, which a reader of the clone may have stored."""
    notebook = copy.deepcopy(lesson.notebook)
    notebook["cells"] = [cell for cell in notebook["cells"] if solutions or "solution" not in tags(cell)]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
        else:
            cell["source"] = _LINK.sub(_copied_link, source(cell))
    return notebook


def _copied_link(link: re.Match[str]) -> str:
    """A link of a lesson as a copy has it."""
    label, target = link.groups()
    if "/" not in target or target.startswith(SUPPORT):
        return link[0]
    path = posixpath.normpath(f"tutorials/{target}")
    page, kind = posixpath.splitext(path.removeprefix("tutorials/site/"))
    return f"{label} (`ddp-lab docs {page}`)" if kind in (".md", ".ipynb") else f"`{path}`"


def _same(path: Path, notebook: dict[str, Any]) -> bool:
    """Whether a file holds the same cells, whatever they have shown."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [source(cell) for cell in cells] == [source(cell) for cell in notebook["cells"]]
    except (OSError, ValueError, LookupError, TypeError):  # it can't be read, or is not a notebook
        return False
