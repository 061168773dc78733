"""Lesson 10, run as a reader would: six recorded faults, which its checks and `findings()` name; and their making."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import ddp_lab

from . import running
from .judging import LESSONS
from .lesson_tests import test_checks as test_checks

_1 = 'run_1, run_2, late_rank, late_bucket = "{}", "{}", {}, {}'
_2 = 'run_3, run_4, late_rank = "{}", "{}", {}'
_3 = 'run_5, run_6, parameter = "{}", "{}", "{}"'

WRONG = {
    "1": {
        _1.format("a slow layer", "one bucket", 2, 3): "the name of a suspect each",
        _1.format("late start", "one bucket", 2, 3): "start their backward together",
        _1.format("slow rank", "one bucket", 2, 3): "loses time once",
        _1.format("one bucket", "slow layer", 2, 3): "which rank did the others wait for",
        _1.format("slow layer", "slow link", 2, 3): "run 2 isn't",
        _1.format("slow layer", "one bucket", 0, 3): "because it waits",
        _1.format("slow layer", "one bucket", 2, 4): "not where it starts",
    },
    "2": {
        _2.format("late start", "", 1): "the name of a suspect each",
        _2.format("slow layer", "slow link", 1): "already late when its backward starts",
        _2.format("slow link", "late start", 1): "wait in them for the fourth",
        _2.format("late start", "tiny buckets", 1): "run 4 isn't",
        _2.format("late start", "slow link", 0): "not rank 0",
    },
    "3": {
        _3.format("", "", ""): "the name of a suspect each",
        _3.format("slow link", "tiny buckets", "old_head.weight"): "wait behind it",
        _3.format("one bucket", "tiny buckets", "old_head.weight"): "How large is bucket 0",
        _3.format("unused parameters", "slow link", "old_head.weight"): "are the bytes the cause",
        _3.format("unused parameters", "one bucket", "old_head.weight"): "run 6 isn't",
        _3.format("unused parameters", "tiny buckets", "layer3.weight"): "gets a gradient in every step",
        _3.format("unused parameters", "tiny buckets", "old_head.bias"): "does not exist",
    },
}


@pytest.fixture(scope="module")
def recorder() -> Any:
    """The script that made the recordings, as a module."""
    spec = importlib.util.spec_from_file_location("record", LESSONS / "recordings" / "record.py")
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules["record"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    del sys.modules["record"]


def _named(findings: list[Any]) -> tuple[str, int | None]:
    return (findings[0].kind, findings[0].rank) if findings else ("", None)


def test_the_answers(lesson: running.Notebook) -> None:
    """The lesson's table holds what findings() says of each run; the doctor names the rank that sleeps."""
    table = "".join(output.data.get("text/html", "") for output in running.cell(lesson, "findings").outputs)
    for words in (
        "nothing that would save much",
        "Rank 2 falls behind at the gradient of layer3.",
        "The buckets are too big",
        "Rank 1 starts its backward late",
        "The backward is too short to overlap all communication",
        "1 parameter never got a gradient",
        "The buckets are too small",
    ):
        assert words in table
    doctor = running.text(running.cell(lesson, "doctor"))
    assert "rank 0 waits in the backward, for bucket" in doctor
    assert "rank 1 is computing a backward that still lacks 3." in doctor
    assert "line 11" in doctor, "that is where it sleeps"
    assert "time.sleep(600)" in running.cell(lesson, "doctor-cell").source.splitlines()[10]


def test_recordings_are_as_told(recorder: Any) -> None:
    """In each stored file the finding that gains most is the run's fault, and none is large."""
    for name, run in recorder.RUNS.items():
        path = LESSONS / "recordings" / f"{name}.npz"
        assert _named(ddp_lab.Timeline.load(path).findings()) == (run.kind, run.rank), path
        assert path.stat().st_size < 100_000


@pytest.mark.soak
def test_the_script_makes_them(recorder: Any, tmp_path: Path, nothing_left: None) -> None:
    """The script records runs with these faults, in which findings() names them, on this machine as well."""
    with ddp_lab.Cluster(recorder.RANKS, backend="shm") as lab:
        lab.run(recorder.TRAIN)
        for name, run in recorder.RUNS.items():
            if not run.kind:
                continue
            made = recorder.record(lab, run, tmp_path / f"{name}.npz", steps=14)
            stored = ddp_lab.Timeline.load(LESSONS / "recordings" / f"{name}.npz")
            for one in (made, stored):
                assert _named(one.findings()) == (run.kind, run.rank)
            assert made.reducers()[-1].buckets == stored.reducers()[-1].buckets
            assert [one.rank for one in made.ranks()] == [one.rank for one in stored.ranks()]
