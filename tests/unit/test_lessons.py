"""How a lesson is built: what its header says, how soon it asks something, how long its cells are, how it ends."""

from __future__ import annotations

import re

import pytest

from tests.notebooks.running import LESSONS, Cell, read, tags

HEADER = ("Before", "You will be able to", "Time", "Hardware")
CELLS_BEFORE_AN_EXERCISE = 12
LINES_OF_AN_EXERCISE = 20
# Minutes, for a reader who meets the subject for the first time.
WORDS_A_MINUTE, LINES_A_MINUTE, A_PREDICTION, AN_EXERCISE, A_QUESTION = 130, 15, 0.5, 5, 0.5
_MARKUP = re.compile(r"<[^>]+>|\]\([^)]*\)|[#*|`\[\]]")


@pytest.fixture(params=LESSONS, ids=lambda path: path.stem)
def cells(request: pytest.FixtureRequest) -> list[Cell]:
    """The cells of a lesson as stored."""
    return list(read(request.param).cells)


def test_header(cells: list[Cell]) -> None:
    """A lesson begins with what to know before, what one learns, how long it takes, and on what it runs."""
    found = re.findall(r"^\* \*\*([^*]+):\*\* \S", cells[0].source, re.MULTILINE)
    assert tuple(found) == HEADER


def test_time(cells: list[Cell]) -> None:
    """The time that a lesson states is within a quarter of what its text, code and tasks take."""
    [stated] = re.findall(r"^\* \*\*Time:\*\* about (\d+) minutes", cells[0].source, re.MULTILINE)
    text = [cell.source for cell in cells if cell.cell_type == "markdown"]
    code = [cell.source for cell in cells if cell.cell_type == "code" and "solution" not in tags(cell)]
    words = sum(len(_MARKUP.sub(" ", source).split()) for source in text)
    lines = sum(len([line for line in source.splitlines() if line.strip()]) for source in code)
    minutes = words / WORDS_A_MINUTE + lines / LINES_A_MINUTE
    minutes += A_PREDICTION * len(numbered(cells, "prediction")) + AN_EXERCISE * len(numbered(cells, "exercise"))
    minutes += A_QUESTION * len(questions(cells))
    assert abs(int(stated) - minutes) <= 0.25 * minutes, f"{stated} minutes are stated, it takes {minutes:.0f}"


def test_pace(cells: list[Cell]) -> None:
    """At most 12 cells precede the first exercise, and the cell of an exercise has at most 20 lines."""
    assert place(cells, "exercise-1") <= CELLS_BEFORE_AN_EXERCISE
    for number in numbered(cells, "exercise"):
        source = cells[place(cells, f"exercise-{number}")].source
        assert len(source.splitlines()) <= LINES_OF_AN_EXERCISE, f"exercise {number}"


def test_predictions(cells: list[Cell]) -> None:
    """A reader commits to a prediction before a cell runs, and compares it afterwards; no text asks for another."""
    predicted, compared = numbered(cells, "prediction"), numbered(cells, "compare")
    assert predicted == compared == [str(index + 1) for index in range(len(predicted))]
    assert predicted
    for number in predicted:
        before, after = (place(cells, f"{part}-{number}") for part in ("prediction", "compare"))
        assert cells[before].source == f"predict({number})"
        assert cells[after].source == f"compare({number})"
        assert "**Predict:**" in cells[before - 1].source
        assert any(cell.cell_type == "code" for cell in cells[before + 1 : after])
    assert sum(cell.source.count("**Predict:**") for cell in cells) == len(predicted)


def test_end(cells: list[Cell]) -> None:
    """Before the cluster is stopped, a lesson ends with a summary and three questions with folded answers."""
    assert "## Summary" in cells[-2].source
    assert len(questions(cells)) == 3


def numbered(cells: list[Cell], part: str) -> list[str]:
    """The numbers of a lesson's exercises, predictions or comparisons, in the order of their cells."""
    return [tag.partition("-")[2] for cell in cells for tag in tags(cell) if re.fullmatch(rf"{part}-\d+", tag)]


def place(cells: list[Cell], tag: str) -> int:
    """The index of the one cell with this tag."""
    [index] = [index for index, cell in enumerate(cells) if tag in tags(cell)]
    return index


def questions(cells: list[Cell]) -> list[str]:
    """The questions at the end, each with a folded answer."""
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.findall(r"^\d\. (.+?)\n\s*<details>", text.partition("## Questions")[2], re.MULTILINE | re.DOTALL)
