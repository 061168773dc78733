"""Steps before and after a change: what is different is said to be, what is not is not."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.analysis.comparison import before_after


def test_a_change_is_found() -> None:
    """A median that is 20 % lower, in noise of 5 %, is faster, and the bounds hold the truth. NaN is left out; fewer
    than ten steps are not compared."""
    rng = np.random.default_rng(1)
    found = before_after(10 * rng.normal(1, 0.05, 100), 8 * rng.normal(1, 0.05, 100))
    assert found.verdict == "faster"
    assert found.low_percent < -20 < found.high_percent < 0
    assert (found.steps_before, found.steps_after) == (100, 100)
    assert "faster" in str(found)
    assert before_after(8 * rng.normal(1, 0.05, 100), 10 * rng.normal(1, 0.05, 100)).verdict == "slower"
    with pytest.raises(ValueError, match="9 steps after the change are too few"):
        before_after(np.ones(10), [*np.ones(9), np.nan])
    assert before_after(np.ones(10), np.ones(10)).percent == 0


def _correlated(rng: np.random.Generator, runs: int, steps: int, rho: float, spread: float = 0.05) -> np.ndarray:
    """Times of steps around 10 ms whose noise decays like rho ** lag: shape ``[runs, steps]``."""
    noise = rng.normal(0, 1, (runs, steps))
    for step in range(1, steps):
        noise[:, step] = rho * noise[:, step - 1] + np.sqrt(1 - rho**2) * noise[:, step]
    return np.asarray(10 * (1 + spread * noise))


@pytest.mark.parametrize("rho", [0.5, 0.7, 0.9])
def test_no_change_is_not_found(rho: float) -> None:
    """Of 200 comparisons of equal steps, each like its neighbours, at most one in 50 is called a change."""
    times = _correlated(np.random.default_rng(round(100 * rho)), 200, 400, rho)
    called = sum(before_after(one[:200], one[200:]).verdict != "no clear difference" for one in times)
    assert called <= 4


@pytest.mark.parametrize(("rho", "least"), [(0.5, 100), (0.7, 98), (0.9, 60)])
def test_a_change_of_ten_percent_is_found(rho: float, least: int) -> None:
    """10 % are found in correlated noise of 5 %: nearly always, and mostly where 20 steps tell as much as one."""
    times = _correlated(np.random.default_rng(7), 100, 400, rho)
    found = sum(before_after(one[:200], 1.1 * one[200:]).verdict == "slower" for one in times)
    assert found >= least


def test_machine_that_is_busy_for_a_while() -> None:
    """Of 200 comparisons of equal steps, alike for ten steps at a time as on a busy machine, few name a difference."""
    rng = np.random.default_rng(2)
    times = 10 * np.repeat(rng.normal(1, 0.05, (200, 40)), 10, axis=1) * rng.normal(1, 0.05, (200, 400))
    assert sum(before_after(one[:200], one[200:]).verdict != "no clear difference" for one in times) <= 4
