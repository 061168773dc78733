"""Around DDP: RPC. Gradients in distributed autograd contexts, remote parameters, distributed optimizers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import assert_same, samples
from tests.ranks.harness import RankPool

SMALL = 0.0005  # MiB: several buckets
TRAINERS = 2  # ranks 0 and 1; rank 2 holds a part of the model


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks of their own, because a process starts RPC once."""
    pool = RankPool(TRAINERS + 1)
    yield pool
    pool.close()


class Remote(nn.Module):
    """The part of the model that lives on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(10, 8)
        # Both trainers' parts are made at once, by threads of one process: not from the generator that they share.
        own = torch.Generator().manual_seed(11)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3, generator=own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.table(x))


class Local(nn.Module):
    """The part that each trainer holds a replica of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def _parameters_of(remote: Any) -> list[Any]:
    return [dist.rpc.RRef(p) for p in remote.local_value().parameters()]


def _values_of(remote: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in remote.local_value().parameters()]


def _train(wrap: type, rank: int, group: dist.ProcessGroup, find_unused: bool) -> list[Any]:
    """A hybrid step: remote part, wrapped local part, dist_autograd.backward, DistributedOptimizer."""
    from torch.distributed.optim import DistributedOptimizer

    remote = rpc.remote(f"rank{TRAINERS}", Remote)
    model = wrap(Local(), process_group=group, bucket_cap_mb=SMALL, find_unused_parameters=find_unused)
    parameters = rpc.rpc_sync(remote.owner(), _parameters_of, (remote,))
    parameters += [rpc.RRef(p) for p in model.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    seen: list[Any] = []
    for step in range(4):
        with dist_autograd.context() as context:
            output = model(remote.rpc_sync().forward(samples(rank, step)))
            dist_autograd.backward(context, [output.square().mean()])
            gradients = dist_autograd.get_gradients(context)
            seen.append([gradients[p].clone() for p in model.parameters()])
            assert all(p.grad is None for p in model.parameters())
            optimizer.step(context)
        seen.append([p.detach().clone() for p in model.parameters()])
    seen.append(rpc.rpc_sync(remote.owner(), _values_of, (remote,)))
    return seen


def _hybrid_on_rank(rank: int, size: int, folder: str) -> None:
    group = dist.new_group(list(range(TRAINERS)))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    try:
        if rank < TRAINERS:
            for find_unused in (False, True):
                theirs = _train(TorchDDP, rank, group, find_unused)
                ours = _train(DistributedDataParallel, rank, group, find_unused)
                assert_same(ours, theirs)
                for tensor in ours[-2]:
                    reference = tensor.clone()
                    dist.broadcast(reference, 0, group=group)
                    assert torch.equal(reference, tensor)
    finally:
        rpc.shutdown()


def test_hybrid_model_in_the_rpc_framework(pool: RankPool) -> None:
    """DDP between RPC and loss: gradients stay in the distributed autograd context, and are those of torch's class."""
    with tempfile.TemporaryDirectory() as folder:
        pool.run(_hybrid_on_rank, str(Path(folder)))
