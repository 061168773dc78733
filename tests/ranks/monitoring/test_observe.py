"""`observe()`: torch's own class records what ours records, and computes what it computes unobserved."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddp_lab
from ddp_lab.protocol.events import Kind
from tests.ranks.compare import assert_same, mlp
from tests.ranks.harness import on_ranks
from tests.ranks.observing import (
    CAP_MB,
    PROGRAMS,
    TORCH_HIDES_SPARSE_BUCKETS,
    Branches,
    Watch,
    check_backwards,
    recorded,
    train,
)


@pytest.mark.parametrize("name", list(PROGRAMS))
@on_ranks(2)
def test_observing_changes_no_bit_and_sees_every_bucket(rank: int, size: int, name: str) -> None:
    """Parameters, buffers and gradients after some steps are bit-equal, and each bucket's way is recorded."""
    program, arguments, options = PROGRAMS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without = program(lambda model: contextlib.nullcontext(), rank, *arguments, **options)
        observed, events, descriptions = recorded(lambda: program(ddp_lab.observe, rank, *arguments, **options))
    assert_same(observed, without)
    if name == "sparse" and TORCH_HIDES_SPARSE_BUCKETS:
        assert len(events) == 0
    else:
        check_backwards(events, descriptions)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("views", {"gradient_as_bucket_view": True}),
        ("unused", {"find_unused_parameters": True}),
        ("static", {"static_graph": True}),
    ],
)
@on_ranks(2)
def test_events_are_those_of_our_class(rank: int, size: int, name: str, options: dict[str, Any]) -> None:
    """On the same model, an observed step has the same events as one of ours, and the same description."""

    def run(wrap: type, watch: Watch) -> Any:
        model = wrap(Branches() if name == "unused" else mlp(), bucket_cap_mb=CAP_MB, **options)
        with watch(model):
            return train(model, rank, branches=name == "unused")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, theirs, their_buckets = recorded(lambda: run(TorchDDP, ddp_lab.observe))
        _, ours, our_buckets = recorded(
            lambda: run(ddp_lab.DistributedDataParallel, lambda model: contextlib.nullcontext())
        )
    # The first assignment is another, see BucketCaps.initial: what is compared is the rebuilt one.
    theirs, ours = (one[one["step"] > 0] for one in (theirs, ours))
    assert Counter(theirs[["step", "kind"]].tolist()) == Counter(ours[["step", "kind"]].tolist())
    last_theirs, last_ours = (
        [one for one in found if one["type"] == "assignment"][-1] for found in (their_buckets, our_buckets)
    )
    assert last_theirs.keys() == last_ours.keys()
    assert last_theirs["parameters"] == last_ours["parameters"]
    assert last_theirs["rebuilt"] == last_ours["rebuilt"]
    assert last_theirs["options"] == last_ours["options"]
    if "static_graph" not in options:
        assert last_theirs["buckets"] == last_ours["buckets"]


@on_ranks(2)
def test_a_bucket_that_no_gradient_fills_is_ready_when_the_backward_begins(rank: int, size: int) -> None:
    """With unused parameters a bucket is ready with its last used one, or at once."""
    model = TorchDDP(Branches(), bucket_cap_mb=0.0003, find_unused_parameters=True)  # a bucket for each layer
    ddp_lab.observe(model)
    _, events, _ = recorded(lambda: train(model, rank, 2, branches=True))
    step = events[events["step"] == 1]
    begin = step[step["kind"] == Kind.BACKWARD_BEGIN]["host_ns"][0]
    ready = step[(step["kind"] == Kind.BUCKET_READY)]
    gradients = step[step["kind"] == Kind.GRAD_READY]
    seen = set(gradients["bucket"].tolist())
    without = [int(one["host_ns"]) for one in ready if one["bucket"] not in seen]
    assert without == [int(begin)] * len(without)
    assert without
