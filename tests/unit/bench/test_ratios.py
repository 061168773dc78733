"""How benchmarks turn times into ratios, costs and bounds (ddp_lab/bench/measuring/ratios.py)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ddp_lab.bench.measuring import ratios
from tests.benchmarks.second_look import NOT_NEEDED, second_look, words


def build(torch: list[float], ours: list[float], again: list[float]) -> ratios.Build:
    return {"torch": torch, "ours": ours, "torch again": again}


def test_ratio_is_taken_turn_by_turn() -> None:
    """A machine that slows down during a measurement changes no ratio: each turn is compared with itself. Ours is
    compared with the mean of both of torch's; outliers do not count in the median of medians."""
    slow = [1.0, 2.0, 4.0, 8.0]
    found = ratios.ratios([[build(slow, [0.5 * t for t in slow], slow)]])
    assert found["ours / torch"] == pytest.approx(0.5)
    assert found["torch again / torch"] == pytest.approx(1.0)
    found = ratios.ratios([[build([0.8] * 3, [1.0] * 3, [1.2] * 3)]])
    assert found["ours / torch"] == pytest.approx(1.0)
    assert found["torch again / torch"] == pytest.approx(1.5)
    sets = [[build([1.0], [ours], [1.0]) for ours in builds] for builds in ([1, 2, 9], [3, 3, 3], [0.1, 4, 5])]
    assert ratios.ratios(sets)["ours / torch"] == pytest.approx(3.0)
    sets = [[build([1.0, 2.0], [5.0, 5.0], [1.0, 1.0])], [build([3.0, 4.0], [6.0, 6.0], [1.0, 1.0])]]
    assert ratios.medians(sets) == {"torch": 2.5, "ours": 5.5, "torch again": 1.0}


def test_the_bound() -> None:
    """Without any scatter the bound is the figure itself. The more the sets differ, the farther the bound lies above
    the median, and never above the largest value."""
    assert ratios.upper_bound([[1.25, 1.25]] * 5) == pytest.approx(1.25)
    narrow = ratios.upper_bound([[1 + 0.01 * i] for i in range(-2, 3)])
    wide = ratios.upper_bound([[1 + 0.05 * i] for i in range(-2, 3)])
    assert 1.0 < narrow < wide <= 1.1


def test_bound_holds_as_often_as_it_says() -> None:
    """Over many simulated measurements the true median lies below the bound about 95 times of 100."""
    draw = random.Random(1)
    held = 0
    for _ in range(60):
        sets = []
        for _ in range(5):
            of_set = draw.gauss(1.0, 0.02)
            sets.append([of_set + draw.gauss(0.0, 0.01) for _ in range(3)])
        held += ratios.upper_bound(sets) >= 1.0
    assert held >= 51


def test_a_cost_with_bounds() -> None:
    """Pairs that differ by 5 %, on a machine whose speed changes from pair to pair, give 5 % within narrow bounds. The
    best itself needs none, and says so."""
    random = np.random.default_rng(0)
    best = random.uniform(50, 200, 20)
    found = second_look(best * 1.05 * random.normal(1, 0.01, 20), best)
    assert found["cost"] == pytest.approx(0.05, abs=0.01)
    assert 0.04 < found["low"] < found["cost"] < found["high"] < 0.06
    assert "+5." in words(found)
    assert words(NOT_NEEDED) == "it is the best that was measured"
    assert second_look([2.0], [1.0])["low"] == -1


def test_bounds_hold_as_often_as_they_say() -> None:
    """Where both are equal, the 95 % bounds leave out 0 in about one of twenty looks."""
    random = np.random.default_rng(1)
    missed = 0
    for _ in range(400):
        found = second_look(random.lognormal(0, 0.1, 14), random.lognormal(0, 0.1, 14))
        missed += not found["low"] <= 0 <= found["high"]
    assert 8 <= missed <= 36
