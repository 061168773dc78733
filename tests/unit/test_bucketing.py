"""assign_buckets: which parameters share a bucket, by torch's rules and by hand."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.bucketing import assign_buckets

DTYPES = ["float32", "float64", "bfloat16"]

models = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=30)
caps = st.lists(st.integers(0, 400), min_size=1, max_size=3)


@settings(max_examples=150, print_blob=True)
@given(model=models, caps=caps, data=st.data())
def test_buckets_are_torchs(model: list[tuple[int, str]], caps: list[int], data: st.DataObject) -> None:
    """For the same sizes, caps and order, the same parameters share a bucket as in torch's DDP."""
    import torch
    import torch.distributed as dist

    tensors = [torch.empty(numel, dtype=getattr(torch, dtype)) for numel, dtype in model]
    sizes = [tensor.nbytes for tensor in tensors]
    keys = [dtype for _, dtype in model]
    unordered, _ = dist._compute_bucket_assignment_by_size(tensors, caps, [False] * len(tensors))
    assert assign_buckets(sizes, keys, caps) == list(reversed(unordered))

    order = data.draw(st.permutations(range(len(model))))
    ordered, _ = dist._compute_bucket_assignment_by_size(
        [tensors[i] for i in order], caps, [False] * len(tensors), list(order)
    )
    ours = assign_buckets(sizes, keys, caps, order)
    assert sorted(ours) == sorted(ordered)
    if len(set(keys)) == 1:
        assert ours == ordered  # with several keys torch's order of the last buckets is that of a hash map


@settings(max_examples=150, print_blob=True)
@given(model=models, caps=caps, data=st.data())
def test_launch_order_follows_readiness(model: list[tuple[int, str]], caps: list[int], data: st.DataObject) -> None:
    """Each parameter is in one bucket, buckets hold one key, and are ordered by when they are complete."""
    order = data.draw(st.permutations(range(len(model))))
    buckets = assign_buckets([size for size, _ in model], [key for _, key in model], caps, order)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(model)))
    assert all(len({model[index][1] for index in bucket}) == 1 for bucket in buckets)
    complete = [max(order.index(index) for index in bucket) for bucket in buckets]
    assert complete == sorted(complete)


def test_one_bucket_for_each_key_without_a_cap() -> None:
    """A cap that is never reached gives one bucket for each dtype and device, last registered first."""
    assert assign_buckets([4, 8, 4], ["a", "b", "a"], [sys.maxsize]) == [[1], [0, 2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([4], [], [8], None), "1 sizes, but 0 keys"),
        (([4], ["a"], [], None), "caps must be"),
        (([4, 4], ["a", "a"], [8], [0, 0]), "order must contain each"),
    ],
)
def test_mistakes_are_named(arguments: tuple, message: str) -> None:
    """A call that makes no sense raises ValueError saying why."""
    with pytest.raises(ValueError, match=message):
        assign_buckets(*arguments)


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


def test_assignment_in_other_orders() -> None:
    """Without an order buckets are filled in the order of registration, and launched last registered first. The order
    of arrival decides who shares a bucket, and the order within it."""
    assert assign_buckets([40] * 5, [F32] * 5, [40, 80]) == [[3, 4], [1, 2], [0]]
    assert assign_buckets([200] * 6, [F32, F64] * 3, [400]) == [[5], [4], [1, 3], [0, 2]]
    assert assign_buckets([40, 80, 40, 40], [F32] * 4, [80], order=[3, 2, 1, 0]) == [[3, 2], [1], [0]]


def test_a_parameter_that_shares_no_bucket() -> None:
    """A sparse gradient has a bucket of its own; those after it fill the open one. Limits that count from the last
    bucket: the small first limit is that of the gradient that is ready last."""
    alone = [False, True, False, False]
    assert assign_buckets([40] * 4, [F32] * 4, [80], [0, 1, 2, 3], alone=alone) == [[1], [0, 2], [3]]
    assert assign_buckets([40] * 5, [F32] * 5, [40, 80], [0, 1, 2, 3, 4], small_last=True) == [[1, 0], [3, 2], [4]]
