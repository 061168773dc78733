"""Runs a lesson with wrong and right answers, and asks what its checks say to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_lab.lesson_files import VERDICT

from . import running

LESSONS = running.PROJECT / "tutorials"

_EACH_CHOICE = """
for choice in predict.__self__._predictions[{number} - 1].choices:
    predict({number}, choice)
    compare({number})
"""

Wrong = Mapping[str, Mapping[str, str]]
"""Exercise's number -> wrong answer -> what the check says to it."""


def executed(
    lesson: str,
    wrong: Wrong,
    environment: Mapping[str, str] = running.KERNEL_ENVIRONMENT,
    shorter: Mapping[str, str] | None = None,
) -> running.Notebook:
    """The lesson after "Run all", with answers.

    Args:
        lesson: the file's stem.
        wrong: answers to try.
        environment: of the kernel.
        shorter: what takes long there -> what is run in its place.
    """
    notebook = answered(lesson, wrong)
    for text, other in (shorter or {}).items():
        [long] = [cell for cell in notebook.cells if text in cell.source]
        long.source = long.source.replace(text, other)
    return running.execute(notebook, LESSONS, environment)


def answered(lesson: str, wrong: Wrong) -> running.Notebook:
    """The lesson before it is run.

    The untouched exercises are followed by wrong answers, then the solution, each with its check; the comparison of a
    prediction by that of each choice.
    """
    notebook = running.read(LESSONS / f"{lesson}.ipynb")
    for compare in [cell for cell in notebook.cells if _number("compare", cell)]:
        number = _number("compare", compare)
        each = running.copy_of(compare, _EACH_CHOICE.format(number=number), f"each-choice-{number}")
        each.metadata.tags = []
        after = notebook.cells.index(compare) + 1
        notebook.cells[after:after] = [each]
    for number, answers in wrong.items():
        exercise, check, solution = (
            running.tagged(notebook, f"{part}-{number}") for part in ("exercise", "check", "solution")
        )
        tried = []
        notebook.cells.remove(solution)
        for index, answer in enumerate([*answers, None]):
            name = f"{number}-{index}"
            tried += [
                solution if answer is None else running.copy_of(exercise, answer, f"answer-{name}"),
                running.copy_of(check, name=f"verdict-{name}"),
            ]
        after = notebook.cells.index(check) + 1
        notebook.cells[after:after] = tried
    return notebook


def judge(notebook: running.Notebook, wrong: Wrong) -> None:
    """Asserts what each check says to the untouched exercise, to each wrong answer and to the solution.

    Every exercise of the lesson must have wrong answers. A check counts the exercises that are solved. A lesson begins
    with a picture, or a live widget. Of the choices of each prediction, one came true.
    """
    judge_predictions(notebook)
    first = [cell for cell in notebook.cells if not _number("prediction", cell)][:6]
    assert {running.PLOTLY, running.WIDGET} & set().union(
        *(running.mime_types(cell) for cell in first if cell.cell_type == "code")
    )
    exercises = [tag for cell in notebook.cells for tag in running.tags(cell) if tag.startswith("check-")]
    assert {tag.removeprefix("check-") for tag in exercises} == set(wrong)
    for solved, (number, answers) in enumerate(wrong.items()):
        assert "Not yet: " in running.text(running.cell(notebook, f"check-{number}"))
        for index, (answer, expected) in enumerate(answers.items()):
            checked = running.cell(notebook, f"verdict-{number}-{index}")
            verdict = running.text(checked)
            assert "Not yet: " in verdict, answer
            assert "Right: " not in verdict, answer
            assert expected in verdict, answer
            assert expected in _data(checked, number, right=False)["why"], answer
        accepted = running.cell(notebook, f"verdict-{number}-{len(answers)}")
        last = running.text(accepted)
        assert "Right: " in last, last
        assert "Not yet: " not in last, last
        assert last.endswith(f"\n{solved + 1} of {len(wrong)} exercises solved")
        assert "text/html" in running.mime_types(accepted)
        assert _data(accepted, number, right=True)


def _data(cell: running.Cell, number: str, right: bool) -> Any:
    """The verdict as `ddp-lab lessons --check` reads it."""
    [found] = [output.data[VERDICT] for output in cell.outputs if VERDICT in output.get("data", {})]
    assert (found["exercise"], found["right"]) == (int(number), right)
    return found


def judge_predictions(notebook: running.Notebook) -> None:
    """Asserts that a comparison asks for a prediction that is missing, and that one choice of each came true."""
    numbers = [_number("compare", cell) for cell in notebook.cells if _number("compare", cell)]
    assert numbers == [str(index + 1) for index in range(len(numbers))]
    for number in numbers:
        assert "You made no prediction" in running.text(running.tagged(notebook, f"compare-{number}"))
        each = running.text(running.cell(notebook, f"each-choice-{number}"))
        assert each.count("✓ As you predicted:") == 1, each
        assert each.count("✗ Not as you predicted:") >= 1, each


def _number(part: str, cell: running.Cell) -> str:
    """The number of a lesson's prediction or comparison; "" for another cell."""
    return next((tag.partition("-")[2] for tag in running.tags(cell) if tag.startswith(f"{part}-")), "")
