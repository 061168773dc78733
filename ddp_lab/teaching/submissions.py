"""The notebooks of a class: whose each is, of which lesson, what came of it, and the results as a table."""

from __future__ import annotations

import csv
import io
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DdpLabError
from ..formatting import counted
from ..lesson_files import VERDICT
from ..printable import printable, printable_lines
from .copies import copy_support
from .lessons import Lesson, checks_of, lessons, source, tags

PASSED, NOT_YET, ERROR, NOT_RUN, NO_CHECK = "passed", "not yet", "error", "not run", "no check"
_ANSWERS_WITHIN = 20  # seconds in which an interrupted cell must end
_TOO_LONG = "TooLong"
_LONGEST = 240  # characters of a reason in the text; JSON and CSV have all
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_CHECK = r"check\(\s*{}\s*\)\s*;?\s*(?:#.*)?"


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


@dataclass(frozen=True)
class Limits:
    """How long a notebook may run, in seconds.

    Attributes:
        cell: a cell that takes longer is interrupted; the notebook continues.
        notebook: the whole notebook; it ends there.
    """

    cell: float = 120.0
    notebook: float = 1200.0


@dataclass
class Run:
    """What came of running a notebook; the outputs are in its cells.

    Attributes:
        ran: indices of the cells that ran.
        stopped: index of a cell -> why it was interrupted.
        problem: why the notebook ended early; "" if it did not.
    """

    ran: set[int] = field(default_factory=set)
    stopped: dict[int, str] = field(default_factory=dict)
    problem: str = ""


def need_nbclient() -> None:
    """Imports nbclient and nbformat, which run notebooks.

    Raises:
        DdpLabError: nbclient or nbformat is not installed.
    """
    from ..output import quick_nbformat

    quick_nbformat.install()
    try:
        import nbclient  # noqa: F401
        import nbformat  # noqa: F401
    except ImportError as error:
        raise DdpLabError(f"{error.name} is not installed: run `pip install 'ddp_lab[notebooks]'`") from error


def run(notebook: Any, last: int, limits: Limits) -> Run:
    """Runs the code cells in order, beside the lessons' own checks and recordings; an error does not end it.

    Args:
        notebook: of nbformat; outputs that are stored in it are removed.
        last: index of the last cell to run.
        limits: of time.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory(prefix="ddp_lab-class-", ignore_cleanup_errors=True) as private:
        folder, runtime = Path(private, "tutorials"), Path(private, "runtime")
        runtime.mkdir(mode=0o700)
        copy_support(folder)
        return _in_a_kernel(notebook, last, limits, folder, runtime)


def _in_a_kernel(notebook: Any, last: int, limits: Limits, folder: Path, runtime: Path) -> Run:
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    done, ends = Run(), time.monotonic() + limits.notebook

    def note(cell: Any, cell_index: int, execute_reply: Any) -> None:
        if execute_reply["content"].get("ename") == _TOO_LONG:
            done.stopped[cell_index] = f"ran longer than {_limit(limits, ends)}"

    class Client(NotebookClient):
        def output(self, outs: Any, msg: Any, display_id: str | None, cell_index: int) -> Any:
            """Drops what is printed: nobody reads it, and a loop may print without end."""
            return None if msg["msg_type"] == "stream" else super().output(outs, msg, display_id, cell_index)

    # Sockets are files that only this user can open, not TCP ports.
    kernel = AsyncKernelManager(transport="ipc", connection_file=str(runtime / "kernel.json"))
    client = Client(
        notebook,
        kernel,
        allow_errors=True,
        timeout_func=lambda cell: max(1.0, min(limits.cell, ends - time.monotonic())),
        interrupt_on_timeout=True,
        error_on_timeout={"ename": _TOO_LONG},
        iopub_timeout=_ANSWERS_WITHIN,  # of an interrupted cell, too
        raise_on_iopub_timeout=True,
        on_cell_error=note,
        resources={"metadata": {"path": str(folder)}},
    )
    client.owns_km = True  # it ends the kernel too
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(runtime)}  # the user's detached clusters stay out of reach
    place = "while it started"
    try:
        with client.setup_kernel(env=environment):
            for index, cell in enumerate(notebook.cells[: last + 1]):
                if time.monotonic() >= ends:
                    done.problem = f"the notebook ran longer than {limits.notebook:g} s"
                    break
                place = f"in cell {index + 1}"
                client.execute_cell(cell, index)
                done.ran.add(index)
    except CellTimeoutError:
        done.problem = f"the notebook ended {place}, which ran too long and ignored an interrupt"
    except DeadKernelError:
        done.problem = f"the kernel died {place}"
    except RuntimeError as error:
        done.problem = f"the kernel failed {place}: {error}"
    return done


def _limit(limits: Limits, ends: float) -> str:
    """The limit that a cell has reached: its own, or the notebook's."""
    return f"{limits.cell:g} s" if time.monotonic() < ends else f"the {limits.notebook:g} s of the notebook"


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
