"""Bucket assignment by hand: the cases that say what a cap, a dtype and a sequence of caps mean."""

from __future__ import annotations

import pytest

from ddp_lab.bucketing import assign_buckets

F32, F64 = "float32", "float64"
ALTERNATING = [(200, F32), (200, F64)] * 3  # 50 float32, 25 float64, ...


@pytest.mark.parametrize(
    ("tensors", "caps", "expected"),
    [
        pytest.param([(400, F32), (800, F32), (400, F32), (200, F32)], [400], [[0], [1], [2], [3]], id="one cap"),
        pytest.param(ALTERNATING, [400], [[0, 2], [1, 3], [4], [5]], id="one cap, two dtypes"),
        pytest.param([(40, F32)] * 4, [40, 80], [[0], [1, 2], [3]], id="a small first cap"),
        pytest.param(ALTERNATING, [200, 400], [[0], [1], [2, 4], [3, 5]], id="a small first cap for each dtype"),
        pytest.param([(40, F32)] * 6, [40, 80, 120], [[0], [1, 2], [3, 4, 5]], id="a cap for each bucket"),
        pytest.param([(40, F32)] * 7, [40, 80], [[0], [1, 2], [3, 4], [5, 6]], id="the last cap repeats"),
        pytest.param([(90, F32), (20, F32), (10, F32)], [100], [[0, 1], [2]], id="a bucket overshoots its cap"),
        pytest.param([(40, F32), (40, F32)], [0], [[0], [1]], id="cap 0: one each"),
        pytest.param([(0, F32), (40, F32), (0, F32)], [40], [[0, 1], [2]], id="empty parameters share"),
        pytest.param([(40, F32), (9000, "sparse 1"), (40, F32)], [80], [[1], [0, 2]], id="a key of its own"),
    ],
)
def test_assignment_in_the_order_of_arrival(
    tensors: list[tuple[int, str]], caps: list[int], expected: list[list[int]]
) -> None:
    """When gradients arrive in the order of registration, the buckets are these, each launched when it is full."""
    sizes, keys = [size for size, _ in tensors], [key for _, key in tensors]
    assert assign_buckets(sizes, keys, caps, list(range(len(tensors)))) == expected


def test_assignment_before_the_order_is_known() -> None:
    """Without an order buckets are filled in the order of registration, and launched last registered first."""
    assert assign_buckets([40] * 5, [F32] * 5, [40, 80]) == [[3, 4], [1, 2], [0]]
    assert assign_buckets([200] * 6, [F32, F64] * 3, [400]) == [[5], [4], [1, 3], [0, 2]]


def test_assignment_when_gradients_arrive_in_reverse() -> None:
    """The order of arrival decides who shares a bucket, and the order within it."""
    assert assign_buckets([40, 80, 40, 40], [F32] * 4, [80], order=[3, 2, 1, 0]) == [[3, 2], [1], [0]]


def test_a_parameter_that_shares_no_bucket() -> None:
    """A sparse gradient has a bucket of its own; those after it fill the open one."""
    alone = [False, True, False, False]
    assert assign_buckets([40] * 4, [F32] * 4, [80], [0, 1, 2, 3], alone=alone) == [[1], [0, 2], [3]]


def test_the_small_bucket_is_the_last() -> None:
    """Limits that count from the last bucket: the small first limit is that of the gradient that is ready last."""
    assert assign_buckets([40] * 5, [F32] * 5, [40, 80], [0, 1, 2, 3, 4], small_last=True) == [[1, 0], [3, 2], [4]]
