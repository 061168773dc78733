"""Which figures of a benchmark are shown (ddp_lab/bench/measuring/noise.py)."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from ddp_lab.bench import start
from ddp_lab.bench.measuring import noise
from ddp_lab.bench.measuring.command import aligned
from tests.benchmarks import cell


def test_sets_that_agree_are_shown() -> None:
    """Sets that agree on a machine of their own give a number; so do fewer than three, and what scatters around 0 by
    little of its scale."""
    found = noise.figure([10.0, 10.5, 9.8, 10.1, 11.0], [0.01] * 5)
    assert (found["median"], found["low"], found["high"]) == (10.1, 9.8, 11.0)
    assert not found["noisy"]
    assert noise.shown(found, "10.1", keep=False) == "10.1"
    assert not noise.figure([1.0, 5.0])["noisy"]
    assert noise.figure([1.0, 5.0], [0.2, 0.2])["noisy"]
    about_0 = [-0.2, 0.1, 0.0, 0.3, -0.1]
    assert noise.figure(about_0)["noisy"]
    assert not noise.figure(about_0, scale=10.0)["noisy"]


def test_sets_that_disagree_are_not() -> None:
    """A median between sets that are far apart is no figure; the reason and the samples stay."""
    found = noise.figure([10.0, 20.0, 12.0, 30.0, 11.0], [0.01] * 5)
    assert found["noisy"]
    assert noise.shown(found, "12.0", keep=False) == "too noisy (±83 %)"
    assert noise.shown(found, "12.0", keep=True) == "12.0?"
    assert found["samples"] == [10.0, 20.0, 12.0, 30.0, 11.0]
    assert not noise.figure(found["samples"], tolerance=0.9)["noisy"]


@pytest.mark.parametrize(
    ("others", "noisy"),
    [([0.5, 0.4, 0.01, 0.01, 0.01], False), ([0.5, 0.4, 0.3, 0.01, 0.01], True), ([None] * 5, False)],
)
def test_a_majority_of_sets_must_have_the_machine(others: list[float | None], noisy: bool) -> None:
    """Equal sets are no evidence while others took the machine from most of them: they may all be slow."""
    found = noise.figure([10.0] * 5, others)
    assert found["noisy"] is noisy
    assert found["why"] == ("others: 40 %" if noisy else "")


@pytest.mark.parametrize(("sets", "dropped"), [(1, 0), (5, 0), (7, 0), (8, 1), (20, 5)])
def test_the_interval_drops_the_ends_of_many_sets(sets: int, dropped: int) -> None:
    """Up to seven sets it is their range; of more, what still covers the median in nine of ten cases."""
    samples = [float(value) for value in range(sets)]
    random.Random(0).shuffle(samples)
    assert noise.interval(samples) == (dropped, sets - 1 - dropped)


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    """Of times with a long tail, five at once, the true median lies inside in at least nine of ten cases."""
    draw = random.Random(1)
    inside = 0
    for _ in range(1000):
        low, high = noise.interval([draw.lognormvariate(0, 0.5) for _ in range(5)])
        inside += low <= 1 <= high
    assert inside >= 900


def stat(user: int, idle: int, irq: int = 0, steal: int = 0) -> str:
    return f"cpu  {user} 0 0 {idle} 0 {irq} 0 {steal} 0 0\ncpu0 0\n"


@pytest.mark.parametrize(
    ("after", "others"),
    [(stat(100, 9900), 0.01), (stat(0, 9000, steal=1000), 0.1), (stat(0, 9000, irq=1000), 0.0), ("none", None)],
)
def test_what_others_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, others: float | None) -> None:
    """Work of others and stolen time count as a part of all processors' time, interrupts do not."""
    monkeypatch.setattr(noise, "_STAT", tmp_path / "stat")
    (tmp_path / "stat").write_text(stat(0, 0))
    with noise.Watch() as watch:
        (tmp_path / "stat").write_text(after)
    assert watch.others is None if others is None else watch.others == pytest.approx(others, abs=0.01)


def test_own_work_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor time of this process is taken off."""
    monkeypatch.setattr(noise, "_STAT", tmp_path / "stat")
    (tmp_path / "stat").write_text(stat(0, 0))
    with noise.Watch() as watch:
        statistics.fmean(value**0.5 for value in range(600_000))  # some ten milliseconds at least
        (tmp_path / "stat").write_text(stat(2, 98))
    assert watch.others < 0.02


def test_what_is_said_below_a_table() -> None:
    """How many figures were too apart, why, and what to do; nothing where all were sound. The exit code is 0 as soon as
    one figure can be told, or all were asked for."""
    sound, apart = noise.figure([1.0] * 3), noise.figure([1.0, 2.0, 3.0])
    beside = noise.figure([1.0] * 3, [0.5] * 3)
    assert noise.epilogue({"rows": [{"a": sound}]}, keep=False) == []
    words = "\n".join(noise.epilogue({"rows": [{"a": sound, "b": apart}, [beside]]}, keep=False))
    assert "2 of 3 values" in words
    assert "others:" in words
    assert "±:" in words
    assert "--keep-noise" in words
    assert noise.exit_code([sound, apart], keep=False) == 0
    assert noise.exit_code([apart, apart], keep=False) == noise.EXIT_CODE
    assert noise.exit_code([apart], keep=True) == 0
    assert noise.exit_code([], keep=False) == 0


def test_turns_of_cells_are_judged_in_parts() -> None:
    """A round trip that grows during the run is too noisy; its ratio, taken in the same parts, need not be. Each kernel
    counts as a set; ours is compared with each other side, round by round. In a table names are to the left, numbers to
    the right."""
    growing = [0.01 * (1 + turn / 10) for turn in range(10)]
    found = cell._summaries({"%%distributed": growing, "%%px": [2 * turn for turn in growing]}, noise.TOLERANCE)
    assert found["%%px"]["parts"]["noisy"]
    assert not found["ratio of parts"]["noisy"]
    table = cell.table({"ranks": 2, "turns": 10, "cells": {"x = 1": found}}, keep=False)
    assert "too noisy" in table
    assert "0.50" in table
    seconds = {"ddp_lab": [1.0, 2.0, 3.0], "ipyparallel": [2.0, 4.0, 6.0]}
    figures = start._judged(seconds, noise.TOLERANCE)
    assert figures["ddp_lab"]["seconds"]["noisy"]
    assert figures["ipyparallel"]["ours / it"]["median"] == 0.5
    lines = start._table({"ranks": 2, "rounds": 3, "figures": figures}, keep=False).splitlines()
    assert lines[-1].endswith("0.50")
    assert aligned([["name", "ms"], ["a", "1000.0"]], left=1) == ["name      ms", "a     1000.0"]
