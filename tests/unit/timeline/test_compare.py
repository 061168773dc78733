"""Comparing two runs: differences with their certainty, in words, as a table, and as an exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ddp_lab
from ddp_lab.analysis.comparison import compare_series
from ddp_lab.cli import main
from ddp_lab.timeline.comparison import Comparison
from ddp_lab.timeline.timeline import Timeline
from tests.unit.step_model import StepModel

MB = 1_000_000
STEPS = 40


def noisy(seed: int = 0, **changes: object) -> StepModel:
    """8 gradients of about 1 ms in 4 buckets, with a little noise that depends on the seed."""
    noise = np.random.default_rng(seed).normal(0, 0.05, (2, STEPS, 8))
    base = StepModel(
        gradients=[1.0] * 8,
        sizes=[MB] * 8,
        buckets=[[0, 1], [2, 3], [4, 5], [6, 7]],
        late=lambda rank, step: dict(enumerate(noise[rank, step].tolist())),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def slow_layer(seed: int) -> StepModel:
    """The same with 2 ms more at parameter 4 of rank 1."""
    plain = noisy(seed).late
    return noisy(
        seed,
        late=lambda rank, step: {
            i: extra + (2.0 if (rank, i) == (1, 4) else 0.0) for i, extra in plain(rank, step).items()
        },
    )


def test_equal_runs_do_not_differ() -> None:
    """Two runs of the same model, with other noise: no clear difference of the step, in words too. A recording beside
    itself is said to be the same one."""
    compared = ddp_lab.compare(noisy(1).record(STEPS), noisy(2).record(STEPS))
    assert not compared.step.is_clear
    assert not compared.is_slower()
    assert abs(compared.step.change_percent) < 2
    assert str(compared).startswith("No clear difference between the first run and the second run")
    run = noisy(1).record(STEPS)
    compared = ddp_lab.compare(run, run)
    assert compared.is_same
    assert str(compared).startswith("the first run and the second run are the same recording (")
    assert not compared.is_slower()
    assert not ddp_lab.compare(run, noisy(2).record(STEPS)).is_same


def test_a_slower_layer_is_found_in_its_rank_and_bucket() -> None:
    """2 ms at one layer of rank 1: the step, rank 1's computation, and bucket 2 onwards are slower; bucket 1 is not."""
    compared = ddp_lab.compare(noisy(1).record(STEPS), slow_layer(2).record(STEPS))
    step = compared.step
    assert step.low_ms < step.change_ms < step.high_ms
    assert step.is_clear
    assert step.change_ms == pytest.approx(2.0, abs=0.3)
    by_key = {(one.scope, one.name, one.rank, one.bucket): one for one in compared.differences}
    assert by_key["rank", "computation", 1, None].change_ms == pytest.approx(2.0, abs=0.2)
    assert abs(by_key["rank", "computation", 0, None].change_ms) < 0.2
    assert by_key["bucket", "ready", None, 2].change_ms == pytest.approx(2.0, abs=0.3)
    assert abs(by_key["bucket", "ready", None, 1].change_ms) < 0.2
    text = str(compared)
    assert "the second run is slower than the first run" in text
    assert "Rank 1, computation" in text
    assert "Bucket 2, ready" in text or "Bucket 2, waiting" in text


def test_thresholds() -> None:
    """A clear change counts from the threshold on, and faster is never slower. One row of the frame for each
    difference, with the interval and the change in both units."""
    fast, slow = noisy(1).record(STEPS), slow_layer(2).record(STEPS)
    compared = ddp_lab.compare(fast, slow)
    assert compared.is_slower(5)
    assert not compared.is_slower(60)
    assert not ddp_lab.compare(slow, fast).is_slower()
    assert "faster" in str(ddp_lab.compare(slow, fast))
    frame = compared.frame()
    assert set(frame.scope) == {"phase", "rank", "bucket"}
    row = frame[(frame.scope == "phase") & (frame.name == "step")].iloc[0]
    assert row.change_ms == pytest.approx(row.b_ms - row.a_ms)
    assert row.change_percent == pytest.approx(100 * row.change_ms / row.a_ms)
    assert (frame.low_ms <= frame.high_ms).all()


def test_other_buckets_and_ranks_are_said() -> None:
    """Buckets with other parameters are not compared one by one, ranks that only one run has are left out; of runs on 3
    and 2 ranks the first sentence says so, before which of them is faster."""
    other = noisy(2, buckets=[[0, 1, 2, 3], [4, 5, 6, 7]])
    compared = ddp_lab.compare(noisy(1).record(STEPS), other.record(STEPS))
    assert not [one for one in compared.differences if one.scope == "bucket"]
    assert "4 in the first run, 2 in the second run" in str(compared)
    alone = ddp_lab.compare(noisy(1).record(STEPS), noisy(2, ranks=1).record(STEPS))
    assert {one.rank for one in alone.differences if one.scope == "rank"} == {0}
    assert "the first run ran on 2 ranks, the second run on 1 rank" in str(alone)
    three, two = noisy(1, ranks=3, late=lambda rank, step: {}), noisy(2, per_mb=0.5)
    first, second, *_ = str(ddp_lab.compare(three.record(STEPS), two.record(STEPS))).splitlines()
    assert first.startswith("the first run ran on 3 ranks, the second run on 2 ranks: their steps do different work")
    assert "faster" in second


def test_intervals_hold_what_they_promise() -> None:
    """Of 200 pairs of samples from one distribution, about 1 % look clear, and a real change is in its interval."""
    draws = np.random.default_rng(11)
    key = ("phase", "step", None, None)
    clear = covered = 0
    for _ in range(200):
        a, b = draws.normal(10, 1, 60), draws.normal(10, 1, 60)
        (same,) = compare_series({key: a}, {key: b})
        (moved,) = compare_series({key: a}, {key: b + 1.5})
        clear += same.is_clear
        covered += moved.low_ms <= 1.5 <= moved.high_ms
    assert clear <= 4
    assert covered >= 196


def test_percentages_are_those_of_a_ratio() -> None:
    """Of 200 skewed times that shrink by 80 %, 98 % of the intervals hold that, none begins below -100 %; without noise
    percentages are exact, and a time of 0 has none."""
    draws = np.random.default_rng(5)
    key = ("phase", "exposed", None, None)
    covered = clear = 0
    for _ in range(200):
        a, b = draws.lognormal(0, 1.5, 30), 0.2 * draws.lognormal(0, 1.5, 30)
        (found,) = compare_series({key: a}, {key: b})
        assert -100 <= found.low_percent <= found.change_percent <= found.high_percent
        assert found.is_clear == (found.low_percent > 0 or found.high_percent < 0)
        covered += found.low_percent <= -80 <= found.high_percent
        clear += found.is_clear
    assert covered >= 196
    assert 0 < clear < 200
    key = ("phase", "step", None, None)
    nothing, one, two = np.zeros(20), np.ones(20), np.full(20, 2.0)
    for before, after, percent in ((one, two, 100), (two, nothing, -100), (nothing, two, np.inf)):
        (found,) = compare_series({key: before}, {key: after})
        assert (found.low_percent, found.change_percent, found.high_percent) == (percent, percent, percent)
    (unsure,) = compare_series({key: np.tile([0.0] * 4 + [9.0] * 4, 5)}, {key: two})
    assert unsure.low_percent < unsure.change_percent < unsure.high_percent == np.inf
    assert "4.50 → 2.00 ms (99 %: -" in str(Comparison("a", "b", [unsure], [], (40, 20)))


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with 3 if the second run is clearly slower by the threshold, else with 0."""
    monkeypatch.chdir(tmp_path)
    for name, model in {"fast": noisy(1), "again": noisy(3), "slow": slow_layer(2)}.items():
        model.record(STEPS).save(f"{name}.npz")
    cases = [("fast slow", "5%", 3), ("fast slow", "60%", 0), ("slow fast", "5%", 0), ("fast again", "5%", 0)]
    for names, threshold, code in cases:
        files = [f"{name}.npz" for name in names.split()]
        assert main.main(["compare", *files, "--threshold", threshold, "--json", "out.json"]) == code
        written = json.loads(Path("out.json").read_text())
        assert written["step"]["a_ms"] > 0
        assert written["is_slower"] == (code == 3)
    assert main.main(["compare", "fast.npz", "slow.npz"]) == 3


def test_what_can_not_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, a run without steps, and too few steps are errors with exit code 1, and say which."""
    assert main.main(["compare", str(tmp_path / "a.npz"), str(tmp_path / "b.npz")]) == 1
    assert "a.npz (expected a folder from `ddp-lab run` or a file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="contains no steps"):
        ddp_lab.compare(Timeline(), noisy().record(STEPS))
    with pytest.raises(ValueError, match="at least 5 steps"):
        ddp_lab.compare(noisy().record(3), noisy().record(STEPS))
