"""Notebooks and lessons as they are stored: clean, short, with links that lead somewhere; how a lesson is built."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.running import LESSONS, NOTEBOOKS, PROJECT, QUICKSTART, Cell, module_of, read, tagged, tags
from tutorials import checks

HEADER = ("Before", "You will be able to", "Time", "Hardware")
CELLS_BEFORE_AN_EXERCISE = 12
LINES_OF_AN_EXERCISE = 20
# Minutes, for a reader who meets the subject for the first time.
WORDS_A_MINUTE, LINES_A_MINUTE, A_PREDICTION, AN_EXERCISE, A_QUESTION = 130, 15, 0.5, 5, 0.5
_MARKUP = re.compile(r"<[^>]+>|\]\([^)]*\)|[#*|`\[\]]")
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
_MOST_CELLS = {"notebooks": 20, "tutorials": 33}
_MOST_OF_THE_LAST = 45  # a whole investigation
_ANSWER = "<details><summary><b>Answer</b></summary>"
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


@each_notebook
def test_is_valid_clean_and_short(path: Path) -> None:
    """A stored notebook is nbformat 4.5 for any Python 3 kernel, with cell ids and without outputs. It has at most 20
    cells, a lesson 33 without its predictions (the last one 45); lines are readable."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs, cell.id
            assert cell.execution_count is None, cell.id
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    cells = [cell for cell in notebook.cells if not cell.source.startswith(("predict(", "compare("))]
    most = _MOST_OF_THE_LAST if path.stem.startswith("14_") else _MOST_CELLS[path.parent.name]
    assert len(cells) <= most
    assert not [line for cell in notebook.cells for line in cell.source.splitlines() if len(line) > 140]


@each_notebook
def test_links_and_clusters(path: Path) -> None:
    """Every link to a file of the project names one that exists. A notebook begins with a cluster and ends with
    stopping it; one that opens recordings first starts it later. The hosted notebook installs ddp_lab before."""
    cells = read(path).cells
    targets = [link for cell in cells if cell.cell_type == "markdown" for link, _ in _LINK.findall(cell.source)]
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert local, "a notebook says where to go next"
    assert [target for target in local if not (path.parent / target).exists()] == []
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    if code[0].startswith("WHEEL = "):
        del code[0]
    assert "%load_ext ddp_lab" in code[0]
    first = "\n".join(code) if "Timeline.load(" in code[0] else code[0]  # recordings need no ranks
    assert "%cluster start" in first
    assert code[-1].strip() == "%cluster stop"


@each_lesson
def test_begin_and_end(path: Path) -> None:
    """A lesson begins with which it is, what to know before, what one learns, how long it takes, and on what it runs.
    Before the cluster is stopped, it ends with a summary and three questions with folded answers; it links source, and
    paper or torch."""
    cells = list(read(path).cells)
    text = [cell.source for cell in cells if cell.cell_type == "markdown"]
    number, _, _ = path.stem.partition("_")
    assert text[0].startswith(f"# Lesson {int(number)}: " if number.isdigit() else f"# Appendix {number}: ")
    assert tuple(re.findall(r"^\* \*\*([^*]+):\*\* \S", text[0], re.MULTILINE)) == HEADER
    assert re.search(r"\]\(\.\./(ddp_lab|csrc)/", text[-1])
    assert re.search(r"\]\(https://(arxiv\.org/abs/2006\.15704|docs\.pytorch\.org/)", "\n".join(text))
    assert "## Summary" in cells[-2].source
    assert len(questions(cells)) == 3


@each_lesson
def test_time(path: Path) -> None:
    """The time that a lesson states is within a quarter of what its text, code and tasks take."""
    cells = list(read(path).cells)
    [stated] = re.findall(r"^\* \*\*Time:\*\* about (\d+) minutes", cells[0].source, re.MULTILINE)
    text = [cell.source for cell in cells if cell.cell_type == "markdown"]
    code = [cell.source for cell in cells if cell.cell_type == "code" and "solution" not in tags(cell)]
    words = sum(len(_MARKUP.sub(" ", source).split()) for source in text)
    lines = sum(len([line for line in source.splitlines() if line.strip()]) for source in code)
    minutes = words / WORDS_A_MINUTE + lines / LINES_A_MINUTE
    minutes += A_PREDICTION * len(numbered(cells, "prediction")) + AN_EXERCISE * len(numbered(cells, "exercise"))
    minutes += A_QUESTION * len(questions(cells))
    assert abs(int(stated) - minutes) <= 0.25 * minutes, f"{stated} minutes are stated, it takes {minutes:.0f}"


@each_lesson
def test_exercises(path: Path) -> None:
    """An exercise has one cell to write in, of at most 20 lines, a check of one line after it, and one folded solution
    after that. At most 12 cells precede the first one."""
    notebook = read(path)
    found = Counter(tag for cell in notebook.cells for tag in tags(cell))
    numbers = [tag.removeprefix("exercise-") for tag in found if tag.startswith("exercise-")]
    assert numbers, "a lesson has exercises"
    assert place(notebook.cells, "exercise-1") <= CELLS_BEFORE_AN_EXERCISE
    for number in numbers:
        parts = [tagged(notebook, f"{part}-{number}") for part in ("exercise", "check", "solution")]
        places = [notebook.cells.index(part) for part in parts]
        assert places == list(range(places[0], places[0] + 3))
        before = notebook.cells[places[0] - 1]
        assert before.cell_type == "markdown" or before.source.startswith("predict(")
        assert len(parts[0].source.splitlines()) <= LINES_OF_AN_EXERCISE, f"exercise {number}"
        assert parts[1].source == f"check({number})"
        assert parts[2].metadata.jupyter.source_hidden is True


@each_lesson
def test_predictions(path: Path) -> None:
    """A reader commits to a prediction before a cell runs, and compares it afterwards; no text asks for another. After
    each cell that asks for one, and before the next one that does, there is one folded answer."""
    cells = list(read(path).cells)
    predicted, compared = numbered(cells, "prediction"), numbered(cells, "compare")
    assert predicted == compared == [str(index + 1) for index in range(len(predicted))]
    assert len(predicted) >= 1
    for number in predicted:
        before, after = (place(cells, f"{part}-{number}") for part in ("prediction", "compare"))
        assert cells[before].source == f"predict({number})"
        assert cells[after].source == f"compare({number})"
        assert "**Predict:**" in cells[before - 1].source
        assert any(cell.cell_type == "code" for cell in cells[before + 1 : after])
    assert sum(cell.source.count("**Predict:**") for cell in cells) == len(predicted)
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert sum(text.count("**Predict") for text in texts) >= 3
    marks = [mark for text in texts for mark in dict.fromkeys(re.findall(rf"\*\*Predict|{_ANSWER}", text))]
    assert marks[::2] == ["**Predict"] * (len(marks) // 2)
    assert marks[1::2] == [_ANSWER] * (len(marks) // 2)
    assert sum(text.count(_ANSWER) for text in texts) == sum(text.count("\n</details>") for text in texts)


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


def test_lesson_6_and_the_quickstart() -> None:
    """The lesson with most code has cells of at most 20 lines, and lines of at most 88 characters. In the quickstart, a
    paragraph stands before every code cell."""
    [path] = [path for path in LESSONS if path.stem.startswith("06_")]
    cells = [cell.source.splitlines() for cell in read(path).cells if cell.cell_type == "code"]
    assert max(map(len, cells)) <= 20
    assert max(len(line) for lines in cells for line in lines) <= 88
    kinds = [cell.cell_type for cell in read(QUICKSTART).cells]
    assert kinds == ["markdown", "code"] * (len(kinds) // 2)


def test_verdicts_are_readable() -> None:
    """White on the colours of ✓ and ✗ has a contrast of 4.5 at least, in every theme."""
    for _, colour in (checks._RIGHT_BADGE, checks._WRONG_BADGE):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
        assert 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) >= 4.5, colour


def test_every_lesson_is_run() -> None:
    """Each lesson and appendix has a module of tests, `test_lesson_NN.py` or `test_appendix_x.py`."""
    folder = PROJECT / "tests" / "notebooks"
    modules = [each for kind in ("lesson", "appendix") for each in folder.glob(f"test_{kind}_*.py")]
    assert {path.stem for path in modules} == {f"test_{module_of(path.stem)}" for path in LESSONS}
