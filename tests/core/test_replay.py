"""The replay of recorded backwards: what its Python face refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddp_lab import BucketStateError, _schedule


def test_refusals() -> None:
    """Arrays that don't fit, times that are none and buckets without parameters are refused."""
    replay = _schedule.Replay(np.array([[2.0, 1.0]]), np.zeros(1), np.array([2.0]))
    zeros = {name: np.zeros((1, 2)) for name in ("launch", "latency", "transfer", "write_back")}
    contention = np.array([[0.0, 0.0, 1.0, 1.0]])
    found = replay.run([[1, 0]], **zeros, contention=contention)
    assert found[1].tolist() == [[1.0, 2.0]]
    with pytest.raises(ValueError, match="configurations, parameters"):
        replay.run([[1, 0, 2]], **zeros, contention=contention)
    with pytest.raises(ValueError, match="configurations, buckets"):
        replay.run([[1, 0]], **{**zeros, "latency": np.zeros((1, 3))}, contention=contention)
    with pytest.raises(ValueError, match=r"configurations, 4"):
        replay.run([[1, 0]], **zeros, contention=np.zeros((1, 3)))
    with pytest.raises(ValueError, match="without costs"):
        replay.run([[2, 0]], **zeros, contention=contention)
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="finite and at least 0"):
            replay.run([[1, 0]], **{**zeros, "transfer": np.full((1, 2), wrong)}, contention=contention)
    with pytest.raises(BucketStateError, match="bucket 0"):
        replay.run([[1, 1]], **zeros, contention=contention)
