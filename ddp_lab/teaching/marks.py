"""What a student's notebook shows for each exercise, read from the outputs of its check cells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..lesson_files import VERDICT
from .lessons import Lesson, source, tags
from .run import Run

PASSED, NOT_YET, ERROR, NOT_RUN, NO_CHECK = "passed", "not yet", "error", "not run", "no check"
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_CHECK = r"check\(\s*{}\s*\)\s*;?\s*(?:#.*)?"


@dataclass(frozen=True)
class Mark:
    """The result of an exercise.

    Attributes:
        exercise: its number.
        state: ``"passed"``, ``"not yet"``, ``"error"`` (a cell of the exercise, or its check, raised an error),
            ``"not run"`` (the notebook ended before the check) or ``"no check"`` (the cell with the check is missing or
            was changed).
        why: what is missing or wrong.
    """

    exercise: int
    state: str
    why: str = ""


def last_check(lesson: Lesson, cells: list[Any]) -> int:
    """The index of the last cell that checks an exercise; -1 if none does."""
    return max((_check(cells, number) for number in lesson.exercises), default=-1)


def marks(lesson: Lesson, cells: list[Any], run: Run) -> list[Mark]:
    """A mark for each exercise.

    Args:
        lesson: the original.
        cells: the student's, after they have run.
        run: how they have run.
    """
    return [_mark(lesson, cells, run, number) for number in lesson.exercises]


def _mark(lesson: Lesson, cells: list[Any], run: Run, number: int) -> Mark:
    check = _check(cells, number)
    if check < 0:
        changed = any(f"check-{number}" in tags(cell) for cell in cells)
        why = f"the cell check({number}) was changed" if changed else f"there is no cell check({number})"
        return Mark(number, NO_CHECK, why)
    if check not in run.ran:
        return Mark(number, NOT_RUN, run.problem)
    if check in run.stopped:
        return Mark(number, ERROR, f"check({number}) {run.stopped[check]}")
    verdict = _verdict(cells[check], number)
    if verdict is not None and verdict.get("right") is True:
        return Mark(number, PASSED)
    answers = _answers(cells, number, check)
    if verdict is not None and [source(cells[one]) for one in answers] == _given(lesson, number):
        return Mark(number, NOT_YET, "untouched")
    errors = [one for one in (_error(cells, run, index) for index in answers) if one][-1:]
    if verdict is None:
        errors += [_error(cells, run, check) or f"check({number}) showed no verdict"]
        return Mark(number, ERROR, "; ".join(errors))
    return Mark(number, ERROR if errors else NOT_YET, "; ".join([*errors, str(verdict.get("why"))]))


def _check(cells: list[Any], number: int) -> int:
    """The index of the last cell that is nothing but the check of an exercise; -1 if there is none."""
    pattern = re.compile(_CHECK.format(number))
    found = (index for index, cell in enumerate(cells) if cell["cell_type"] == "code")
    return max((index for index in found if pattern.fullmatch(source(cells[index]).strip())), default=-1)


def _verdict(cell: Any, number: int) -> dict[str, Any] | None:
    """What a check has displayed as JSON; None if it has displayed nothing of the kind."""
    shown = [one["data"].get(VERDICT) for one in cell["outputs"] if "data" in one]
    verdicts = (one for one in reversed(shown) if isinstance(one, dict) and one.get("exercise") == number)
    return next(verdicts, None)


def _answers(cells: list[Any], number: int, check: int) -> list[int]:
    """The code cells in which a student solves an exercise: from the exercise's to the check."""
    begin = [index for index in range(check) if f"exercise-{number}" in tags(cells[index])]
    if not begin:
        return []
    return [index for index in range(begin[-1], check) if cells[index]["cell_type"] == "code"]


def _given(lesson: Lesson, number: int) -> list[str]:
    """The exercise's cells as the lesson has them."""
    cells = lesson.notebook["cells"]
    return [source(cells[index]) for index in _answers(cells, number, _check(cells, number))]


def _error(cells: list[Any], run: Run, index: int) -> str:
    """Why a cell failed; "" if it did not."""
    if index in run.stopped:
        return f"cell {index + 1} {run.stopped[index]}"
    return next(_errors(cells[index]), "")


def _errors(cell: Any) -> Iterator[str]:
    for output in cell["outputs"]:
        if output["output_type"] == "error":
            lines = _ANSI.sub("", str(output["evalue"])).strip().splitlines()
            yield f"{output['ename']}: {lines[0]}" if lines else str(output["ename"])
