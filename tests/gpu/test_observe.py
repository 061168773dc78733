"""On a CUDA device with NCCL: observing torch's class changes no gradient and sees device spans."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddp_lab
from ddp_lab.protocol.events import Kind
from tests.gpu.ranks import NEEDS_NCCL, on_ranks
from tests.ranks.compare import assert_same, mlp, samples, state_of

pytestmark = NEEDS_NCCL

SMALL = 0.0005  # MiB: several buckets
STEPS = 6


def _train(rank: int, *, observed: bool, mixed_precision: Any) -> dict[str, torch.Tensor]:
    model = TorchDDP(mlp().cuda(), device_ids=[0], bucket_cap_mb=SMALL, mixed_precision=mixed_precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddp_lab.observe(model) if observed else contextlib.nullcontext():
        for step in range(STEPS):
            optimizer.zero_grad()
            model(samples(rank, step).cuda()).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
    return state_of(model)


def _check(rank: int, mixed: bool) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    config = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16) if mixed else None
    without = _train(rank, observed=False, mixed_precision=config)
    start = ddp_lab.recording.statistics().recorded
    assert_same(_train(rank, observed=True, mixed_precision=config), without)
    events, _, _ = ddp_lab.recording.drain(start)
    count = {kind: int((events["kind"] == kind).sum()) for kind in Kind}
    assert count[Kind.BACKWARD_END] == STEPS
    assert count[Kind.BUCKET_READY] == count[Kind.BUCKET_LAUNCHED] == count[Kind.BUCKET_REDUCED] >= STEPS
    assert count[Kind.GRAD_READY] == STEPS * len(list(mlp().parameters()))
    spans = events[events["kind"] == Kind.DEVICE_SPAN]
    assert len(spans)
    assert (spans["device_begin_ns"] <= spans["device_end_ns"]).all()


def test_observing_on_a_gpu() -> None:
    """Bit-equal parameters and gradients, plain and in mixed precision; each bucket's way and its device spans."""
    for mixed in (False, True):
        on_ranks(2, _check, mixed, backend="nccl")
