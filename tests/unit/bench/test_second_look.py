"""The second look at a choice: paired turns to a cost with bounds."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.bench.measuring.ratios import NOT_NEEDED, second_look, words


def test_a_cost_with_bounds() -> None:
    """Pairs that differ by 5 %, on a machine whose speed changes from pair to pair, give 5 % within narrow bounds."""
    random = np.random.default_rng(0)
    best = random.uniform(50, 200, 20)
    found = second_look(best * 1.05 * random.normal(1, 0.01, 20), best)
    assert found["cost"] == pytest.approx(0.05, abs=0.01)
    assert 0.04 < found["low"] < found["cost"] < found["high"] < 0.06
    assert "+5." in words(found)


def test_bounds_hold_as_often_as_they_say() -> None:
    """Where both are equal, the 95 % bounds leave out 0 in about one of twenty looks."""
    random = np.random.default_rng(1)
    missed = 0
    for _ in range(400):
        found = second_look(random.lognormal(0, 0.1, 14), random.lognormal(0, 0.1, 14))
        missed += not found["low"] <= 0 <= found["high"]
    assert 8 <= missed <= 36


def test_no_second_look() -> None:
    """The best itself needs none, and says so."""
    assert words(NOT_NEEDED) == "it is the best that was measured"
    assert second_look([2.0], [1.0])["low"] == -1
