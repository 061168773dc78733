"""Hidden and exposed communication."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.analysis import step_metrics

TIMES = st.integers(0, 10**12)


def test_split_by_hand() -> None:
    """A collective is hidden up to the end of the computation and exposed after it. Bytes per nanosecond are GB/s; no
    time, no figure."""
    launched = np.array([10, 40, 90, 120])
    reduced = np.array([30, 110, 100, 150])
    hidden, exposed = step_metrics.split(launched, reduced, np.array(100))
    assert hidden.tolist() == [20, 60, 10, 0]
    assert exposed.tolist() == [0, 10, 0, 30]
    speed = step_metrics.algorithm_bandwidth(np.array([2_000_000, 1]), np.array([1_000_000, 0]))
    assert speed[0] == 2.0
    assert np.isnan(speed[1])


@given(st.lists(st.tuples(TIMES, st.integers(0, 10**9)), min_size=1), TIMES)
def test_parts_add_up(collectives: list[tuple[int, int]], compute_end: int) -> None:
    """Hidden and exposed parts are not negative and add up to the collective, whatever the times."""
    launched = np.array([begin for begin, _ in collectives])
    reduced = launched + np.array([length for _, length in collectives])
    hidden, exposed = step_metrics.split(launched, reduced, np.array(compute_end))
    assert (hidden >= 0).all()
    assert (exposed >= 0).all()
    assert (hidden + exposed == reduced - launched).all()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20), st.booleans()), min_size=1, max_size=8))
def test_covered_counts_instants(intervals: list[tuple[int, int, bool]]) -> None:
    """The covered time is the number of instants that lie in at least one interval."""
    begin = np.array([[a for a, _, _ in intervals]])
    end = begin + np.array([[length for _, length, _ in intervals]])
    valid = np.array([[keep for _, _, keep in intervals]])
    instants = {t for a, length, keep in intervals if keep for t in range(a, a + length)}
    assert step_metrics.covered(begin, end, valid).tolist() == [len(instants)]
