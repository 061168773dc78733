"""The notebooks as they are stored: small, without outputs, and with links that lead somewhere."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from tutorials import checks

from . import running

_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
_MOST_CELLS = {"notebooks": 20, "tutorials": 33}
_MOST_OF_THE_LAST = 45  # a whole investigation
_ANSWER = "<details><summary><b>Answer</b></summary>"
each_notebook = pytest.mark.parametrize("path", running.NOTEBOOKS, ids=lambda path: path.stem)
each_lesson = pytest.mark.parametrize("path", running.LESSONS, ids=lambda path: path.stem)


@each_notebook
def test_is_valid_and_clean(path: Path) -> None:
    """A stored notebook is nbformat 4.5 for any Python 3 kernel, with cell ids and without outputs."""
    notebook = running.read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs, cell.id
            assert cell.execution_count is None, cell.id
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@each_notebook
def test_is_short(path: Path) -> None:
    """A notebook has at most 20 cells, a lesson 33 without its predictions (the last one 45); lines are readable."""
    notebook = running.read(path)
    cells = [cell for cell in notebook.cells if not cell.source.startswith(("predict(", "compare("))]
    most = _MOST_OF_THE_LAST if path.stem.startswith("14_") else _MOST_CELLS[path.parent.name]
    assert len(cells) <= most
    long = [line for cell in notebook.cells for line in cell.source.splitlines() if len(line) > 140]
    assert not long


@each_notebook
def test_links_lead_somewhere(path: Path) -> None:
    """Every link to a file of the project names a file that exists."""
    notebook = running.read(path)
    targets = [
        match.group(1)
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for match in _LINK.finditer(cell.source)
    ]
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert local, "a notebook says where to go next"
    assert [target for target in local if not (path.parent / target).exists()] == []


@each_notebook
def test_starts_and_stops_a_cluster(path: Path) -> None:
    """A notebook begins with a cluster and ends with stopping it; one that opens recordings first starts it later.

    The hosted notebook installs ddp_lab before.
    """
    code = [cell.source for cell in running.read(path).cells if cell.cell_type == "code"]
    if code[0].startswith("WHEEL = "):
        del code[0]
    assert "%load_ext ddp_lab" in code[0]
    first = "\n".join(code) if "Timeline.load(" in code[0] else code[0]  # recordings need no ranks
    assert "%cluster start" in first
    assert code[-1].strip() == "%cluster stop"


@each_lesson
def test_says_what_it_is_about(path: Path) -> None:
    """A lesson says which it is, asks for predictions, links source and paper or torch."""
    notebook = running.read(path)
    text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    number, _, _ = path.stem.partition("_")
    assert text[0].startswith(f"# Lesson {int(number)}: " if number.isdigit() else f"# Appendix {number}: ")
    assert sum(one.count("**Predict") for one in text) >= 3
    assert re.search(r"\]\(\.\./(ddp_lab|csrc)/", text[-1])
    assert re.search(r"\]\(https://(arxiv\.org/abs/2006\.15704|docs\.pytorch\.org/)", "\n".join(text))


@each_lesson
def test_answers_are_folded(path: Path) -> None:
    """After each cell that asks for a prediction, and before the next one that does, there is one folded answer."""
    texts = [cell.source for cell in running.read(path).cells if cell.cell_type == "markdown"]
    marks = [mark for text in texts for mark in dict.fromkeys(re.findall(rf"\*\*Predict|{_ANSWER}", text))]
    assert marks[::2] == ["**Predict"] * (len(marks) // 2)
    assert marks[1::2] == [_ANSWER] * (len(marks) // 2)
    assert sum(text.count(_ANSWER) for text in texts) == sum(text.count("\n</details>") for text in texts)


def test_lesson_6_fits_on_the_screen() -> None:
    """The lesson with most code has cells of at most 20 lines, and lines of at most 88 characters."""
    [path] = [path for path in running.LESSONS if path.stem.startswith("06_")]
    cells = [cell.source.splitlines() for cell in running.read(path).cells if cell.cell_type == "code"]
    assert max(map(len, cells)) <= 20
    assert max(len(line) for lines in cells for line in lines) <= 88


def test_verdicts_are_readable() -> None:
    """White on the colours of ✓ and ✗ has a contrast of 4.5 at least, in every theme."""
    for _, colour in (checks._RIGHT_BADGE, checks._WRONG_BADGE):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
        assert 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) >= 4.5, colour


def test_quickstart_explains_each_cell() -> None:
    """In the quickstart, a paragraph stands before every code cell."""
    kinds = [cell.cell_type for cell in running.read(running.QUICKSTART).cells]
    assert kinds == ["markdown", "code"] * (len(kinds) // 2)


def test_every_lesson_is_run() -> None:
    """Each lesson and appendix has a module of tests, `test_lesson_NN.py` or `test_appendix_x.py`."""
    modules = [each for kind in ("lesson", "appendix") for each in Path(__file__).parent.glob(f"test_{kind}_*.py")]
    assert {path.stem for path in modules} == {f"test_{running.module_of(path.stem)}" for path in running.LESSONS}


@each_lesson
def test_exercises_are_whole(path: Path) -> None:
    """An exercise has one cell to write in, a check of one line after it, and one folded solution after that."""
    notebook = running.read(path)
    found = Counter(tag for cell in notebook.cells for tag in running.tags(cell))
    numbers = [tag.removeprefix("exercise-") for tag in found if tag.startswith("exercise-")]
    assert numbers, "a lesson has exercises"
    for number in numbers:
        parts = [running.tagged(notebook, f"{part}-{number}") for part in ("exercise", "check", "solution")]
        places = [notebook.cells.index(part) for part in parts]
        assert places == list(range(places[0], places[0] + 3))
        before = notebook.cells[places[0] - 1]
        assert before.cell_type == "markdown" or before.source.startswith("predict(")
        assert parts[1].source == f"check({number})"
        assert parts[2].metadata.jupyter.source_hidden is True
