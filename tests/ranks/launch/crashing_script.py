"""A script whose ranks end in the way that its argument names: `python crashing_script.py CASE`."""

import logging
import os
import signal
import sys
import traceback

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddp_lab.comm

rank = -1
ones = torch.ones(2, 4)


class Masked(torch.nn.Linear):
    """Keeps a mask of the batch's length in a buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mask", torch.ones(1, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.register_buffer("mask", torch.ones(len(inputs), 4))
        return super().forward(inputs) * self.mask


def skips_a_batch() -> None:
    model, total = DistributedDataParallel(torch.nn.Linear(4, 4)), torch.ones(1)
    for step in range(8):
        loss = model(ones).sum()
        if rank == 1 and step == 3:
            continue
        loss.backward()
    dist.all_reduce(total)


def sharded_with_fewer_batches() -> None:
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    for _ in range(8 - rank):
        model(ones).sum().backward()


class Encoder(torch.nn.Linear):
    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


def encodes_without_forward() -> None:
    model = fully_shard(Encoder(4, 4))
    model(ones).sum().backward()
    model.encode(ones)


def mixes_in_forward() -> None:
    """The same error of torch, of another cause: the parameters are gathered, another tensor is sharded."""
    model, other = fully_shard(Encoder(4, 4)), fully_shard(torch.nn.Linear(4, 4))
    model(ones) @ other.weight


def buffers() -> None:
    model = DistributedDataParallel(Masked(4, 4))
    for _ in range(3):
        model(torch.ones(5 - 3 * rank, 4)).sum().backward()


def swallowed() -> None:
    dist.all_reduce(ones)  # all have joined
    try:
        if rank == 1:
            raise KeyError("no goal")
        dist.barrier()
    except KeyError as error:
        logging.warning("skipped the rest: %s", error)


def prints_its_error() -> None:
    dist.all_reduce(ones)
    try:
        if rank == 1:
            raise KeyError("no goal")
        dist.barrier()
    except KeyError:
        traceback.print_exc()


def exits_at_once() -> None:
    dist.all_reduce(ones)
    if rank == 1:
        os._exit(0)
    dist.barrier()


def validates_on_one_rank() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = DistributedDataParallel(network)
    for _ in range(3):
        model(torch.randn(4, 4)).square().sum().backward()
    if rank == 0:
        model(ones)
    dist.broadcast(torch.ones(64), 0)


def killed_once() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(4):
        model(ones).sum().backward()
        if rank == 1 and step == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    ddp_lab.comm.register()
    dist.init_process_group(*sys.argv[2:] or ["gloo"])
    rank = dist.get_rank()
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
