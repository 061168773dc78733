"""On CUDA devices: round robin over NCCL groups, multi-GPU collectives, and the table of what works."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.gpu.ranks import NEEDS_NCCL, on_ranks

pytestmark = NEEDS_NCCL


def _train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model(inputs.cuda()).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _round_robin(rank: int, device: torch.device) -> None:
    import ddp_lab
    from ddp_lab.comm import round_robin_process_group

    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(device)
    torch_ddp = nn.parallel.DistributedDataParallel
    expected = _train(torch_ddp(copy.deepcopy(net), device_ids=[device.index]), rank)
    group = round_robin_process_group([dist.new_group(backend="nccl") for _ in range(3)])
    assert [one.type for one in group._device_types] == ["cuda"]
    for kind in (torch_ddp, ddp_lab.DistributedDataParallel):
        model = kind(copy.deepcopy(net), device_ids=[device.index], process_group=group, bucket_cap_mb=0.02)
        for ours, theirs in zip(_train(model, rank), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    dist.barrier(group)
    objects: list[Any] = [None] * 2
    dist.all_gather_object(objects, rank, group=group)
    assert objects == [0, 1]
    other, got = 1 - rank, torch.zeros(1, device=device)
    sent = torch.full((1,), float(rank), device=device)
    operations = [dist.P2POp(dist.isend, sent, other, group), dist.P2POp(dist.irecv, got, other, group)]
    for work in dist.batch_isend_irecv(operations):  # coalesced
        work.wait()
    assert got.item() == other


def _multigpu(rank: int, device: torch.device) -> None:
    from ddp_lab.comm import all_gather_multigpu, all_reduce_multigpu, reduce_scatter_multigpu

    # With one GPU both tensors are on it.
    devices = [device, torch.device("cuda", (device.index + 2) % torch.cuda.device_count())]
    numbers = [2.0 * rank, 2.0 * rank + 1]
    tensors = [torch.full((3,), number, device=one) for number, one in zip(numbers, devices, strict=True)]
    lists = [[torch.empty(3, device=one) for _ in range(4)] for one in devices]
    all_gather_multigpu(lists, tensors)
    assert [[one[0].item() for one in tensors] for tensors in lists] == [[0.0, 1.0, 2.0, 3.0]] * 2
    reduce_scatter_multigpu(
        tensors, [[torch.full((3,), slot + 1.0, device=one) for slot in range(4)] for one in devices]
    )
    assert [one[0].item() for one in tensors] == [4.0 * (number + 1) for number in numbers]
    work = all_reduce_multigpu(tensors, async_op=True)
    assert work is not None
    work.wait()
    assert [one.tolist() for one in tensors] == [[40.0] * 3] * 2


def _on_rank(rank: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    _round_robin(rank, device)
    _multigpu(rank, device)
    dist.barrier()


def test_two_ranks() -> None:
    """torch's DDP and ours train over three NCCL groups as over one; several tensors of a process; coalesced sends."""
    on_ranks(2, _on_rank, devices=torch.cuda.device_count())


def test_the_table_has_nccl() -> None:
    """With a GPU NCCL is tried, and reduces."""
    from ddp_lab.comm import capabilities

    table = capabilities()
    assert ("nccl", "cuda") in table.columns
    for operation in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "send, recv"):
        assert table.works(operation, "nccl", "cuda"), str(table)
    assert not table.works("all_reduce (BAND)", "nccl", "cuda")
