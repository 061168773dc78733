"""assign_buckets: which parameters share a bucket."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = ["float32", "float64", "bfloat16"]

models = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=30)
caps = st.lists(st.integers(0, 400), min_size=1, max_size=3)


@settings(max_examples=150, print_blob=True)
@given(model=models, caps=caps, data=st.data())
def test_buckets_are_torchs(model: list[tuple[int, str]], caps: list[int], data: st.DataObject) -> None:
    """For the same sizes, caps and order, the same parameters share a bucket as in torch's DDP."""
    import torch
    import torch.distributed as dist

    from ddp_lab.bucketing import assign_buckets

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
    from ddp_lab.bucketing import assign_buckets

    order = data.draw(st.permutations(range(len(model))))
    buckets = assign_buckets([size for size, _ in model], [key for _, key in model], caps, order)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(model)))
    assert all(len({model[index][1] for index in bucket}) == 1 for bucket in buckets)
    complete = [max(order.index(index) for index in bucket) for bucket in buckets]
    assert complete == sorted(complete)


def test_one_bucket_for_each_key_without_a_cap() -> None:
    """A cap that is never reached gives one bucket for each dtype and device, last registered first."""
    from ddp_lab.bucketing import assign_buckets

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
    from ddp_lab.bucketing import assign_buckets

    with pytest.raises(ValueError, match=message):
        assign_buckets(*arguments)
