"""Teaching a class: what lessons say about themselves, copies without solutions, and marks read from outputs."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from ddp_lab import lesson_files, teaching
from ddp_lab.cli.main import main
from ddp_lab.lesson_files import VERDICT
from ddp_lab.teaching.lessons import source, tags
from ddp_lab.teaching.submissions import Run, last_check, marks

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


@pytest.fixture
def lesson() -> teaching.Lesson:
    """Lesson 5, which has two exercises."""
    [found] = [one for one in teaching.lessons() if one.number == "5"]
    return found


def shown(number: int, right: bool, why: str = "because") -> dict[str, Any]:
    """An output of a check."""
    verdict = {"exercise": number, "right": right, "why": why}
    return {"output_type": "display_data", "data": {VERDICT: verdict, "text/plain": why}, "metadata": {}}


ERROR = {"output_type": "error", "ename": "NameError", "evalue": "\x1b[31mname 'x'\nis not", "traceback": []}


def handed_in(lesson: teaching.Lesson, outputs: dict[str, list[Any]], sources: dict[str, str]) -> list[Any]:
    """The cells of a student's notebook after its run: outputs and sources by tag."""
    cells = json.loads(json.dumps(lesson.notebook["cells"]))
    for cell in cells:
        for tag in tags(cell):
            cell.update({"source": sources[tag]} if tag in sources else {})
            cell.update({"outputs": outputs[tag]} if tag in outputs else {})
    return [cell for cell in cells if "solution" not in tags(cell)]


def test_lessons_are_read_from_their_headers(lesson: teaching.Lesson, capsys: pytest.CaptureFixture[str]) -> None:
    """Number, title, time, prerequisites, exercises and checks; every notebook of a lesson is found, in order. The
    command lists them: number, minutes, what to read first, title."""
    assert (lesson.name, lesson.title) == ("lesson 5", "data parallel in fifty lines")
    assert f"about {lesson.minutes} minutes" in source(lesson.notebook["cells"][0])
    assert lesson.before == ["1"]
    assert lesson.header["You will be able to"].startswith("average gradients over ranks")
    assert (lesson.exercises, lesson.checks) == ([1, 2], "lesson_05")
    found = teaching.lessons()
    assert [one.path.name for one in found] == sorted(path.name for path in TUTORIALS.glob("*_*.ipynb"))
    assert all(one.exercises and (TUTORIALS / "checks" / f"{one.checks}.py").is_file() for one in found)
    assert main(["lessons"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["lesson", "minutes", "read", "first", "title"]
    assert len(lines) == len(teaching.lessons())
    assert [line.split() for line in lines if "fifty" in line] == [
        ["5", str(lesson.minutes), "1", "data", "parallel", "in", "fifty", "lines"]
    ]


def test_appendices_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An appendix has a letter; a header without bullets states nothing; other notebooks are left out."""
    monkeypatch.setattr(lesson_files, "home", lambda: tmp_path)
    (tmp_path / "tutorials").mkdir()
    for name, title in {"A_x": "# Appendix A: x", "10_y": "# Lesson 10: y", "Untitled": ""}.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(title)])
        nbformat.write(notebook, tmp_path / "tutorials" / f"{name}.ipynb")
    found = teaching.lessons()
    assert [(one.name, one.title, one.minutes, one.before) for one in found] == [
        ("lesson 10", "y", None, []),
        ("appendix A", "x", None, []),
    ]


def test_students_get_no_solutions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies are valid notebooks without solutions and outputs; folded answers, checks and recordings are there. With
    --solutions all cells are there."""
    copied = teaching.copy_lessons(tmp_path)
    assert {path.name for path in copied} == {one.path.name for one in teaching.lessons()}
    for path in copied:
        notebook, original = (nbformat.read(one, as_version=4) for one in (path, TUTORIALS / path.name))
        nbformat.validate(notebook)
        left = [cell for cell in original.cells if "solution" not in tags(cell)]
        assert _cells(notebook.cells) == _cells(left)
        assert len(left) < len(original.cells)
        assert not any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    text = (tmp_path / "05_data_parallel_in_fifty_lines.ipynb").read_text()
    assert "<summary><b>Answer</b></summary>" in text
    assert "# Solution" not in text
    assert "unfold the solution" not in "".join(path.read_text() for path in copied)
    for folder in ("checks", "images", "recordings"):
        kept = {path.name for path in (TUTORIALS / folder).iterdir() if path.is_file()}
        assert {path.name for path in (tmp_path / folder).iterdir()} == kept
    assert main(["lessons", "--solutions", str(tmp_path / "teacher")]) == 0
    assert f"{len(teaching.lessons())} lessons with solutions are in {tmp_path}" in capsys.readouterr().out
    for one in teaching.lessons():
        copied = nbformat.read(tmp_path / "teacher" / one.path.name, as_version=4)
        assert _cells(copied.cells) == _cells(one.notebook["cells"])


def _cells(cells: list[Any]) -> list[tuple[str, str]]:
    """Each cell's id, and the source of one with code: links in the others may differ."""
    return [(cell["id"], source(cell) if cell["cell_type"] == "code" else "") for cell in cells]


def test_links_of_copies_lead_somewhere(tmp_path: Path) -> None:
    """A relative link names a file of the copy; in the place of others stand pages of the site and source files."""
    copied = teaching.copy_lessons(tmp_path)
    text = "".join(
        cell.source
        for path in copied
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "markdown"
    )
    links = re.findall(r"\]\((?!https?:)([^)\s#]+)", text) + re.findall(r"(?:src|href)=\"([^\"]+)", text)
    assert len(links) > len(copied)
    assert [one for one in links if not (tmp_path / one).is_file()] == []
    pages = re.findall(r"`ddp-lab docs ([^`]+)`", text)
    assert {"how_to/hosts", "guide/performance", "notebooks/quickstart"} <= set(pages)
    root = TUTORIALS.parent
    assert [
        one for one in pages if not ((TUTORIALS / "site" / f"{one}.md").is_file() or (root / f"{one}.ipynb").is_file())
    ] == []
    files = re.findall(r"`((?:ddp_lab|csrc)/\S+\.\w+)`", text)
    assert {"ddp_lab/notebook/magics.py", "csrc/reduce/reducer.cpp"} <= set(files)
    assert [one for one in files if not (root / one).is_file()] == []


def test_an_edited_notebook_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named, with what to do, and nothing is written; one that was only run is kept as it is."""
    edited, executed, deleted, *_ = teaching.copy_lessons(tmp_path)
    for path, change in (
        (edited, lambda cell: cell.update(source="mine")),
        (executed, lambda cell: cell.update(outputs=[nbformat.v4.new_output("stream", text="it ran")])),
    ):
        notebook = nbformat.read(path, as_version=4)
        change(notebook.cells[1])
        nbformat.write(notebook, path)
    deleted.unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["lessons", "--student", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"{edited} would be overwritten, but somebody edited it" in error
    assert "Move edited notebooks to another folder" in error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    edited.unlink()
    assert main(["lessons", "--student", str(tmp_path)]) == 0
    assert edited.exists()
    assert deleted.exists()
    assert executed.read_bytes() == before[executed]


def test_marks_are_read_from_the_checks(lesson: teaching.Lesson) -> None:
    """The verdict counts that a check displays as data, not its words; errors of the exercise's own cells are named. A
    check behind the end of the run has no mark, and a check or exercise that was interrupted has an error."""
    everything = set(range(100))
    right = {"check-1": [shown(1, False), shown(1, True)], "check-2": [shown(2, True)]}
    done = [("passed", ""), ("passed", "")]
    forged = {"output_type": "display_data", "data": {VERDICT: "Right", "text/plain": "Right: yes"}, "metadata": {}}
    for outputs, sources, expected in (
        (right, {}, done),
        (right | {"exercise-1": [ERROR]}, {}, done),
        (right | {"check-2": [shown(2, False)]}, {}, [done[0], ("not yet", "untouched")]),
        (right | {"check-2": [shown(2, False)]}, {"exercise-2": "x"}, [done[0], ("not yet", "because")]),
        (
            right | {"check-2": [shown(2, False)], "exercise-2": [ERROR]},
            {"exercise-2": "x"},
            [done[0], ("error", "NameError: name 'x'; because")],
        ),
        (right | {"check-1": [ERROR]}, {}, [("error", "NameError: name 'x'"), done[1]]),
        (right | {"check-1": [shown(2, True)]}, {}, [("error", "check(1) showed no verdict"), done[1]]),
        (right | {"check-1": [forged]}, {}, [("error", "check(1) showed no verdict"), done[1]]),
        (right, {"check-1": "check( 1 ); # mine"}, done),
        (right, {"check-1": "print('Right: yes')"}, [("no check", "the cell check(1) was changed"), done[1]]),
        (right, {"check-1": "check(1) or check(2)"}, [("no check", "the cell check(1) was changed"), done[1]]),
    ):
        cells = handed_in(lesson, outputs, sources)
        found = marks(lesson, cells, Run(everything))
        assert [(one.state, one.why) for one in found] == expected, (outputs, sources)
    cells = handed_in(lesson, {"check-1": [shown(1, False)], "check-2": [shown(2, True)]}, {"exercise-1": "x"})
    first, second = (next(i for i, cell in enumerate(cells) if f"check-{one}" in tags(cell)) for one in (1, 2))
    assert last_check(lesson, cells) == second
    ended = marks(lesson, cells, Run(set(range(second)), {first - 1: "ran longer than 5 s"}, "the kernel died"))
    assert [(one.state, one.why) for one in ended] == [
        ("error", f"cell {first} ran longer than 5 s; because"),
        ("not run", "the kernel died"),
    ]
    interrupted = marks(lesson, cells, Run(set(range(100)), {second: "ran longer than 5 s"}))
    assert (interrupted[1].state, interrupted[1].why) == ("error", "check(2) ran longer than 5 s")
    del cells[first]
    assert marks(lesson, cells, Run(set(range(100))))[0].why == "there is no cell check(1)"


def test_results_are_a_table(tmp_path: Path) -> None:
    """A row for each notebook, and why an exercise is not passed; spreadsheets get no formula."""
    judged = [
        teaching.Judged(
            "ada", "5", "ada/5.ipynb", [teaching.Mark(1, "passed"), teaching.Mark(2, "not yet", "=1+\x1b[1")]
        ),
        teaching.Judged("bob", "", "bob/x.ipynb", problem="can't be read"),
        teaching.Judged(
            "=cyd", "5", "c/5.ipynb", [teaching.Mark(1, "not run", "dead"), teaching.Mark(2, "passed")], "dead"
        ),
    ]
    lines = teaching.as_text(judged).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["student", "lesson", "exercise", "1", "exercise", "2", "notebook"],
        ["ada", "5", "passed", "not", "yet", "ada/5.ipynb"],
        ["bob", "?", "bob/x.ipynb"],
        ["=cyd", "5", "not", "run", "passed", "c/5.ipynb"],
    ]
    assert lines[5:8] == [
        "ada/5.ipynb, exercise 2, not yet: =1+\\x1b[1",
        "bob/x.ipynb: can't be read",
        "c/5.ipynb: dead",
    ]
    assert lines[-1] == "3 students, 3 notebooks; all exercises passed in 0 of them"
    rows = list(csv.reader(teaching.as_csv(judged).splitlines()))
    assert rows[2] == ["ada", "5", "ada/5.ipynb", "2", "not yet", "'=1+\x1b[1"]
    assert rows[3] == ["bob", "", "bob/x.ipynb", "", "", "can't be read"]
    assert rows[4][0] == "'=cyd"
    assert teaching.as_json(judged)["notebooks"][0]["marks"][0] == {"exercise": 1, "state": "passed", "why": ""}


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without notebooks, options without --check, and nbclient that is not installed."""
    assert main(["lessons", "--check", str(tmp_path)]) == 1
    assert "holds no notebook" in capsys.readouterr().err
    for options in (["--json", str(tmp_path / "x.json")], ["--student", str(tmp_path), "--timeout", "3"]):
        with pytest.raises(SystemExit):
            main(["lessons", *options])
        assert re.search(r"--(json|timeout) needs --check DIR", capsys.readouterr().err)
    monkeypatch.setitem(sys.modules, "nbclient", None)
    assert main(["lessons", "--check", str(tmp_path)]) == 1
    assert "run `pip install 'ddp_lab[notebooks]'`" in capsys.readouterr().err
