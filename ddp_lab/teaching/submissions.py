"""The notebooks of a class: whose each is, of which lesson, and what came of it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DdpLabError
from ..printable import printable, printable_lines
from .lessons import Lesson, checks_of, lessons, source, tags
from .marks import Mark, last_check, marks
from .run import Limits, need_nbclient, run


@dataclass(frozen=True)
class Judged:
    """A notebook of a student.

    Attributes:
        student: the name of the folder or file.
        lesson: its number, ``"5"`` or ``"A"``; "" if the notebook is not one of a lesson.
        notebook: the file, relative to the folder of the class.
        marks: one for each exercise.
        problem: why the notebook was not run, or not to its end; "" if it was.
        seconds: how long it ran.
    """

    student: str
    lesson: str
    notebook: str
    marks: list[Mark] = field(default_factory=list)
    problem: str = ""
    seconds: float = 0.0


def judge(folder: Path, limits: Limits) -> Iterator[Judged]:
    """Runs the notebooks of a class one after the other.

    Args:
        folder: holds a folder or a notebook for each student.
        limits: of time, for each notebook.

    Yields:
        Each result at once.

    Raises:
        DdpLabError: there is no notebook, or the packages that run one are missing.
    """
    need_nbclient()
    paths = [path for path in sorted(folder.rglob("*.ipynb")) if not _hidden(path.relative_to(folder))]
    if not paths:
        raise DdpLabError(f"{folder} holds no notebook: give a folder with one folder or notebook for each student")
    by_checks = {one.checks: one for one in lessons()}
    for path in paths:
        yield _judge(path, folder, by_checks, limits)


def _judge(path: Path, folder: Path, by_checks: dict[str, Lesson], limits: Limits) -> Judged:
    name = printable(path.relative_to(folder).as_posix())
    notebook, problem = _read(path)
    if notebook is None:
        return Judged(_student(path, folder, None), "", name, problem=problem)
    lesson = by_checks.get(checks_of(notebook.cells)) or _named(path, by_checks)
    student = _student(path, folder, lesson)
    if lesson is None:
        return Judged(student, "", name, problem="imports the checks of no lesson")
    began = time.monotonic()
    done = run(notebook, last_check(lesson, notebook.cells), limits)
    found = marks(lesson, notebook.cells, done)
    return Judged(student, lesson.number, name, found, done.problem, time.monotonic() - began)


def _hidden(path: Path) -> bool:
    """Whether Jupyter keeps it for itself, such as a checkpoint."""
    return any(part.startswith(".") for part in path.parts)


def _read(path: Path) -> tuple[Any, str]:
    """A notebook as nbformat reads it, in today's format; else None and why it can't be read."""
    import nbformat

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it mends
            notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            source(cell), tags(cell), cell.cell_type
    except (OSError, ValueError, LookupError, AttributeError, TypeError, nbformat.ValidationError) as error:
        lines = printable_lines(str(error)).splitlines() or [type(error).__name__]
        return None, f"can't be read as a notebook: {lines[0][:200]}"
    return notebook, ""


def _named(path: Path, by_checks: dict[str, Lesson]) -> Lesson | None:
    """The lesson whose name is in the file's name."""
    return next((one for one in by_checks.values() if one.path.stem in path.stem), None)


def _student(path: Path, folder: Path, lesson: Lesson | None) -> str:
    """The student's folder; of a notebook that is in none, the file's name without the lesson's."""
    first, *below = path.relative_to(folder).parts
    if below:
        return printable(first)
    name = path.stem.replace(lesson.path.stem, "") if lesson else path.stem
    return printable(name.strip(" -_.()") or folder.resolve().name)
