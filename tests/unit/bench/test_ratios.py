"""How benchmarks turn times into ratios and bounds (ddp_lab/bench/measuring/ratios.py)."""

from __future__ import annotations

import random

import pytest

from ddp_lab.bench.measuring import ratios


def build(torch: list[float], ours: list[float], again: list[float]) -> ratios.Build:
    return {"torch": torch, "ours": ours, "torch again": again}


def test_ratio_is_taken_turn_by_turn() -> None:
    """A machine that slows down during a measurement changes no ratio: each turn is compared with itself."""
    slow = [1.0, 2.0, 4.0, 8.0]
    found = ratios.ratios([[build(slow, [0.5 * t for t in slow], slow)]])
    assert found["ours / torch"] == pytest.approx(0.5)
    assert found["torch again / torch"] == pytest.approx(1.0)


def test_ours_is_compared_with_the_mean_of_both_of_torchs() -> None:
    """What one of torch's two instances happens to lose, and the other to win, cancels out."""
    found = ratios.ratios([[build([0.8] * 3, [1.0] * 3, [1.2] * 3)]])
    assert found["ours / torch"] == pytest.approx(1.0)
    assert found["torch again / torch"] == pytest.approx(1.5)


def test_figure_is_the_median_of_medians() -> None:
    """A set's figure is the median of its builds', the result the median of the sets': outliers do not count."""
    sets = [[build([1.0], [ours], [1.0]) for ours in builds] for builds in ([1, 2, 9], [3, 3, 3], [0.1, 4, 5])]
    assert ratios.ratios(sets)["ours / torch"] == pytest.approx(3.0)


def test_bound_of_equal_values_is_the_value() -> None:
    """Without any scatter the bound is the figure itself."""
    assert ratios.upper_bound([[1.25, 1.25]] * 5) == pytest.approx(1.25)


def test_bound_grows_with_the_scatter_between_sets() -> None:
    """The more the sets differ, the farther the bound lies above the median, and never above the largest value."""
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


def test_medians_are_over_all_turns() -> None:
    """The times that a table shows are medians over all sets, builds and turns."""
    sets = [[build([1.0, 2.0], [5.0, 5.0], [1.0, 1.0])], [build([3.0, 4.0], [6.0, 6.0], [1.0, 1.0])]]
    assert ratios.medians(sets) == {"torch": 2.5, "ours": 5.5, "torch again": 1.0}
