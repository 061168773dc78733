"""Runs a lesson with wrong and right answers, and asks what its checks say to them."""

from __future__ import annotations

from collections.abc import Mapping

from . import running

LESSONS = running.PROJECT / "tutorials"

Wrong = Mapping[str, Mapping[str, str]]
"""Exercise's number -> wrong answer -> what the check says to it."""


def executed(
    lesson: str, wrong: Wrong, environment: Mapping[str, str] = running.KERNEL_ENVIRONMENT
) -> running.Notebook:
    """The lesson after "Run all", with answers.

    Args:
        lesson: the file's stem.
        wrong: answers to try.
        environment: of the kernel.
    """
    return running.execute(answered(lesson, wrong), LESSONS, environment)


def answered(lesson: str, wrong: Wrong) -> running.Notebook:
    """The lesson before it is run; the untouched exercises are followed by wrong answers and the solution."""
    notebook = running.read(LESSONS / f"{lesson}.ipynb")
    for number, answers in wrong.items():
        exercise, check, solution = (
            running.tagged(notebook, f"{part}-{number}") for part in ("exercise", "check", "solution")
        )
        tried = []
        for index, answer in enumerate([*answers, solution.source]):
            name = f"{number}-{index}"
            tried += [
                running.copy_of(exercise, answer, f"answer-{name}"),
                running.copy_of(check, name=f"verdict-{name}"),
            ]
        after = notebook.cells.index(check) + 1
        notebook.cells[after:after] = tried
    return notebook


def judge(notebook: running.Notebook, wrong: Wrong) -> None:
    """Asserts what each check says to the untouched exercise, to each wrong answer and to the solution.

    Every exercise of the lesson must have wrong answers. A check counts the exercises that are solved. A lesson begins
    with a picture, or a live widget.
    """
    first = [cell for cell in notebook.cells[:6] if cell.cell_type == "code"]
    assert {running.PLOTLY, running.WIDGET} & set().union(*map(running.mime_types, first))
    exercises = [tag for cell in notebook.cells for tag in running.tags(cell) if tag.startswith("check-")]
    assert {tag.removeprefix("check-") for tag in exercises} == set(wrong)
    for solved, (number, answers) in enumerate(wrong.items()):
        assert "Not yet: " in running.text(running.cell(notebook, f"check-{number}"))
        for index, (answer, expected) in enumerate(answers.items()):
            verdict = running.text(running.cell(notebook, f"verdict-{number}-{index}"))
            assert "Not yet: " in verdict, answer
            assert "Right: " not in verdict, answer
            assert expected in verdict, answer
        last = running.text(running.cell(notebook, f"verdict-{number}-{len(answers)}"))
        assert "Right: " in last, last
        assert "Not yet: " not in last, last
        assert last.endswith(f"\n{solved + 1} of {len(wrong)} exercises solved")
        assert "text/html" in running.mime_types(running.cell(notebook, f"verdict-{number}-{len(answers)}"))
