"""`ddp-lab lessons --check` on planted students: its table tells right answers from wrong ones, hangs and accidents."""

from __future__ import annotations

import csv
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import ddp_lab
from ddp_lab.cli.main import main
from ddp_lab.teaching import submissions
from tests.waiting import wait_until
from tutorials import checks

from . import running
from .judging import Wrong

LESSON = "05_data_parallel_in_fifty_lines"

Change = Callable[[running.Notebook], None]
Table = Mapping[str, Mapping[int, tuple[str, str]]]
"""Student -> exercise -> state and reason."""


def wrong_answers(lesson: str) -> Wrong:
    """Those that the lesson's own tests try."""
    wrong: Wrong = importlib.import_module(f"tests.notebooks.test_{running.module_of(lesson)}").WRONG
    return wrong


def answers(lesson: str, wrong: int | None = None) -> dict[str, str]:
    """The solution of each exercise, except that exercise `wrong` gets a wrong answer."""
    original = running.read(running.PROJECT / "tutorials" / f"{lesson}.ipynb")
    found = {number: running.tagged(original, f"solution-{number}").source for number in wrong_answers(lesson)}
    return found | ({str(wrong): next(iter(wrong_answers(lesson)[str(wrong)]))} if wrong else {})


def with_answers(given: Mapping[str, str]) -> Change:
    """Writes answers below the exercises, as a student does."""

    def change(notebook: running.Notebook) -> None:
        for number, answer in given.items():
            exercise = running.tagged(notebook, f"exercise-{number}")
            added = running.copy_of(exercise, answer, f"answer-{number}")
            added.metadata.tags = []
            notebook.cells.insert(notebook.cells.index(exercise) + 1, added)

    return change


def only_exercises(notebook: running.Notebook) -> None:
    """Deletes the other experiments, which take their time."""
    kept = {"start", "set-up", *(f"{part}-{number}" for part in ("exercise", "check") for number in (1, 2))}
    notebook.cells = [cell for cell in notebook.cells if cell.id in kept]


def rewritten(**sources: str) -> Change:
    """Replaces what stands in the cells with these tags (`_` for `-`)."""

    def change(notebook: running.Notebook) -> None:
        for name, source in sources.items():
            running.tagged(notebook, name.replace("_", "-")).source = source

    return change


def without_ranks(source: str) -> Change:
    """Keeps only the checks, and a cell before them: no cluster is started."""

    def change(notebook: running.Notebook) -> None:
        exercise = running.tagged(notebook, "exercise-1")
        imports = running.copy_of(exercise, f"from checks.lesson_{LESSON[:2]} import check", "imports")
        imports.metadata.tags, exercise.source = [], source
        checks = [running.tagged(notebook, f"check-{number}") for number in (1, 2)]
        notebook.cells = [imports, exercise, *checks]

    return change


def judged(folder: Path, lesson: str, students: Mapping[str, list[Change]], *options: str) -> Table:
    """What the command writes of students who each have changed their copy of a lesson."""
    assert main(["lessons", "--student", str(folder / "copies")]) == 0
    for student, changes in students.items():
        notebook = running.read(folder / "copies" / f"{lesson}.ipynb")
        for change in changes:
            change(notebook)
        path = folder / "class" / student / f"{lesson}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(notebook))
    written = folder / "results.json"
    assert main(["lessons", "--check", str(folder / "class"), "--json", str(written), *options]) == 0
    return {
        one["student"]: {mark["exercise"]: (mark["state"], mark["why"]) for mark in one["marks"]}
        for one in json.loads(written.read_text())["notebooks"]
    }


def test_a_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right and wrong answers, a syntax error, a check that was replaced by its words."""
    students = {
        "ada": [only_exercises, with_answers(answers(LESSON)), rewritten(check_2='print("Right: so it is")')],
        "bob": [only_exercises, with_answers(answers(LESSON, wrong=1) | {"2": "%%distributed\nweight = = 1"})],
    }
    table = tmp_path / "results.csv"
    found = judged(tmp_path, LESSON, students, "--csv", str(table))
    assert found["ada"] == {1: ("passed", ""), 2: ("no check", "the cell check(2) was changed")}
    assert found["bob"][1][0] == "not yet"
    assert "Divide by world_size" in found["bob"][1][1]
    assert found["bob"][2][0] == "error"
    assert "SyntaxError" in found["bob"][2][1]
    printed = capsys.readouterr().out
    assert "ada      5       passed      no check" in printed
    assert "2 students, 2 notebooks; all exercises passed in 0 of them" in printed
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["student"], row["state"]) for row in rows[:3]] == [
        ("ada", "passed"),
        ("ada", "no check"),
        ("bob", "not yet"),
    ]


def test_nothing_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hang is interrupted; a hang that ignores it, a dead kernel and a broken file end their notebook alone."""
    monkeypatch.setattr(submissions, "_ANSWERS_WITHIN", 3)
    stubborn = (
        "import time\nwhile True:\n    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n        pass"
    )
    students = {
        "ada": [without_ranks("import time; time.sleep(600)")],
        "bob": [without_ranks(stubborn)],
        "cyd": [without_ranks("import os\nos._exit(1)")],
    }
    (tmp_path / "class" / "fay").mkdir(parents=True)
    (tmp_path / "class" / "fay" / "broken.ipynb").write_text("{")
    (tmp_path / "class" / "gus.ipynb").write_text(json.dumps(running.read(running.QUICKSTART)))
    found = judged(tmp_path, LESSON, students, "--cell-timeout", "10")
    assert found["ada"][1][0] == "error"
    assert found["ada"][1][1].startswith("cell 2 ran longer than 10 s; ")
    assert found["ada"][2][0] == "error"
    why = "the notebook ended in cell 2, which ran too long and ignored an interrupt"
    assert found["bob"] == {1: ("not run", why), 2: ("not run", why)}
    assert found["cyd"] == {1: ("not run", "the kernel died in cell 2"), 2: ("not run", "the kernel died in cell 2")}
    assert found["fay"] == found["gus"] == {}
    printed = capsys.readouterr().out
    assert "fay/broken.ipynb: can't be read as a notebook: " in printed
    assert "gus.ipynb: imports the checks of no lesson" in printed


def test_ctrl_c_keeps_the_results(tmp_path: Path) -> None:
    """After Ctrl-C the notebooks that have run are in the table and the files, and the kernel is gone."""
    for student, source in {"ada": "1 + 1", "bob": "while True: pass"}.items():
        notebook = running.read(running.PROJECT / "tutorials" / f"{LESSON}.ipynb")
        without_ranks(source)(notebook)
        (tmp_path / "class" / student).mkdir(parents=True)
        (tmp_path / "class" / student / f"{LESSON}.ipynb").write_text(json.dumps(notebook))
    table = tmp_path / "results.csv"
    command = [sys.executable, "-m", "ddp_lab", "lessons", "--check", str(tmp_path / "class"), "--csv", str(table)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ada/")
        wait_until(lambda: psutil.Process(process.pid).children(), "bob's kernel")
        process.send_signal(signal.SIGINT)
        printed = process.communicate()[0]
    assert process.returncode == 130, printed
    assert "interrupted: the following notebooks have not run" in printed
    assert "1 student, 1 notebook; all exercises passed in 0 of them" in printed
    assert [row["student"] for row in csv.DictReader(table.read_text().splitlines())] == ["ada", "ada"]


def test_a_check_ends_where_ranks_wait_for_each_other() -> None:
    """An answer with which one rank leaves out a collective is "Not yet" after the time limit; errors are raised."""

    def left_out(rank: int, dist: Any, torch: Any) -> str:
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        return "Right: it ended"

    def fails() -> str:
        raise ValueError("no idea")

    with ddp_lab.Cluster(n=2, backend="gloo"):
        assert checks.on_ranks(left_out, timeout=0.5)().startswith("Not yet: the check did not end within 0.5 s.")
        with pytest.raises(ddp_lab.CellError, match="no idea"):
            checks.on_ranks(fails)()
