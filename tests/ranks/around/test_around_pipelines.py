"""Around DDP: libraries that prepare a backward themselves after forwards under no_sync, as pipelines do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import assert_same, same_as_torch, samples, state_of
from tests.ranks.harness import on_ranks

SMALL = 0.0005  # MiB: several buckets


@on_ranks(4)
def test_pipeline_stages(rank: int, size: int) -> None:
    """Two pipeline stages with two replicas each: microbatches accumulate, the last backward averages."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("stage", "data"))
    replica, place = mesh["data"].get_local_rank(), mesh["stage"].get_local_rank()

    def program(wrap: Any, schedule: str = "Schedule1F1B") -> Any:
        torch.manual_seed(place)
        part = [nn.Sequential(nn.Linear(10, 8), nn.Tanh()), nn.Linear(8, 4)][place]
        model = wrap(part, process_group=mesh["data"].get_group(), bucket_cap_mb=SMALL)
        stage = pipelining.PipelineStage(model, place, 2, torch.device("cpu"), group=mesh["stage"].get_group())
        run = getattr(pipelining, schedule)(
            stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean()
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            if place == 0:
                run.step(samples(replica, step, rows=8))
            else:
                run.step(target=samples(replica, 100 + step, rows=8, columns=4))
            seen.append(state_of(model))
            optimizer.step()
        return seen

    seen = same_as_torch(program)
    assert_same(program(DistributedDataParallel, "ScheduleGPipe"), seen, exact=False)  # torch's class fails in it
    for tensor in seen[-1].values():
        reference = tensor.clone()
        dist.broadcast(reference, group_src=0, group=mesh["data"].get_group())
        assert torch.equal(reference, tensor)
