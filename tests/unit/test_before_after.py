"""Steps before and after a change: what is different is said to be, what is not is not."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.insight.before_after import before_after


def test_a_change_is_found() -> None:
    """A median that is 20 % lower, in noise of 5 %, is faster, and the bounds hold the truth."""
    rng = np.random.default_rng(1)
    found = before_after(10 * rng.normal(1, 0.05, 100), 8 * rng.normal(1, 0.05, 100))
    assert found.verdict == "faster"
    assert found.low_percent < -20 < found.high_percent < 0
    assert (found.steps_before, found.steps_after) == (100, 100)
    assert "faster" in str(found)
    assert before_after(8 * rng.normal(1, 0.05, 100), 10 * rng.normal(1, 0.05, 100)).verdict == "slower"


def test_no_change_is_not_found() -> None:
    """Of 200 comparisons of equal steps, alike for ten steps at a time as on a busy machine, few name a difference."""
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(200):
        busy = np.repeat(rng.normal(1, 0.05, 40), 10)
        times = 10 * busy * rng.normal(1, 0.05, 400)
        wrong += before_after(times[:200], times[200:]).verdict != "no clear difference"
    assert wrong <= 60  # drawn one by one instead of in blocks: more than 80


def test_unknown_and_missing_steps() -> None:
    """NaN is left out; fewer than ten steps are not compared."""
    with pytest.raises(ValueError, match="9 steps after the change are too few"):
        before_after(np.ones(10), [*np.ones(9), np.nan])
    assert before_after(np.ones(10), np.ones(10)).percent == 0
