"""The results of a class as a text, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..formatting import counted
from ..printable import printable
from .marks import PASSED
from .submissions import Judged

_LONGEST = 240  # characters of a reason in the text; JSON and CSV have all
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def as_text(judged: Sequence[Judged]) -> str:
    """A row for each notebook with a column for each exercise; below, why an exercise is not passed."""
    most = max((mark.exercise for one in judged for mark in one.marks), default=0)
    rows = [["student", "lesson", *(f"exercise {number + 1}" for number in range(most)), "notebook"]]
    for one in judged:
        states = {mark.exercise: mark.state for mark in one.marks}
        rows.append(
            [one.student, one.lesson or "?", *(states.get(number + 1, "") for number in range(most)), one.notebook]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(["", *_reasons(judged)] if any(_reasons(judged)) else []), "", _total(judged)])


def _reasons(judged: Sequence[Judged]) -> Iterator[str]:
    for one in judged:
        if one.problem:
            yield _short(f"{one.notebook}: {one.problem}")
        for mark in one.marks:
            if mark.state != PASSED and mark.why != one.problem:
                yield _short(f"{one.notebook}, exercise {mark.exercise}, {mark.state}: {mark.why}")


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def _total(judged: Sequence[Judged]) -> str:
    whole = sum(bool(one.marks) and all(mark.state == PASSED for mark in one.marks) for one in judged)
    students = len({one.student for one in judged})
    return (
        f"{counted(students, 'student')}, {counted(len(judged), 'notebook')}; all exercises passed in {whole} of them"
    )


def as_json(judged: Sequence[Judged]) -> dict[str, Any]:
    """All results."""
    return {"notebooks": [asdict(one) for one in judged]}


def as_csv(judged: Sequence[Judged]) -> str:
    """A row for each exercise of each notebook; spreadsheets take no cell for a formula."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(["student", "lesson", "notebook", "exercise", "state", "why"])
    for one in judged:
        marks: list[tuple[object, ...]] = [(mark.exercise, mark.state, mark.why) for mark in one.marks]
        for exercise, state, why in marks or [("", "", one.problem)]:
            row = [one.student, one.lesson, one.notebook, exercise, state, why]
            table.writerow([f"'{cell}" if str(cell).startswith(_FORMULA) else cell for cell in row])
    return written.getvalue()
