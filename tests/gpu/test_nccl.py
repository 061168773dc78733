"""On a CUDA device with NCCL: gradients are torch's DDP's, and device spans lie inside the step."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_lab.protocol.events import Kind
from tests.gpu.ranks import NEEDS_NCCL, on_ranks

pytestmark = NEEDS_NCCL


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 512), nn.ReLU(),
        nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4),
    )  # fmt: skip


def _train(model: nn.Module, rank: int, steps: int) -> list[list[torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()  # forward moves the CPU batch to the model's device
        seen.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return seen


def _check_spans(reducer_id: int, buckets: int) -> None:
    from ddp_lab import recording

    torch.cuda.synchronize()
    events, _, _ = recording.drain(0)
    events = events[events["reducer"] == reducer_id]
    spans = events[events["kind"] == Kind.DEVICE_SPAN]
    last = int(events["step"].max())
    assert sorted(spans["bucket"][spans["step"] == last]) == list(range(buckets))
    now = int(events["host_ns"].max())
    for span in spans:
        of_step = events[events["step"] == span["step"]]
        begin = int(of_step["host_ns"][of_step["kind"] == Kind.FORWARD_BEGIN][0])
        following = events[(events["step"] == span["step"] + 2) & (events["kind"] == Kind.FORWARD_BEGIN)]
        end = int(following["host_ns"][0]) if len(following) else now
        assert begin <= span["device_begin_ns"] <= span["device_end_ns"] <= end + 50_000_000
    begins = np.sort(spans["device_begin_ns"][spans["step"] == last])
    assert len(set(begins.tolist())) == buckets


def _on_rank(rank: int) -> None:
    torch.backends.cudnn.deterministic = True
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from ddp_lab import DistributedDataParallel

    for hook in (None, fp16_compress_hook):
        for as_view in (False, True):
            net = _net().cuda()
            arguments: dict[str, Any] = {
                "device_ids": [0], "bucket_cap_mb": 0.5, "gradient_as_bucket_view": as_view
            }  # fmt: skip
            ours = DistributedDataParallel(copy.deepcopy(net), **arguments)
            torchs = nn.parallel.DistributedDataParallel(copy.deepcopy(net), **arguments)
            for model in (ours, torchs) if hook else ():
                model.register_comm_hook(None, hook)
            for step, (mine, theirs) in enumerate(zip(_train(ours, rank, 4), _train(torchs, rank, 4), strict=True)):
                for (name, _), a, b in zip(ours.named_parameters(), mine, theirs, strict=True):
                    assert torch.equal(a, b), f"hook {hook}, view {as_view}, step {step}: {name}"
            assert len(ours.buckets()) > 1
            assert ours.buckets()[0].device == "cuda:0"
            _check_spans(ours.model_id, len(ours.buckets()))


@pytest.mark.parametrize("size", [1, 2])
def test_nccl_gradients_and_device_spans(size: int) -> None:
    """With one rank, and two on one GPU, gradients are torch's bit by bit and device spans lie inside the step."""
    on_ranks(size, _on_rank)
