"""Programs of which one rank crashes, or lets the others crash: `planted_crashes.py PROGRAM [BACKEND]`, or as a cell.

Each function is one, named by what trains and by what goes wrong; it knows nothing of ddp_lab. What has to be named are
the lines marked with a letter; see `tests.benchmarks.crashes`.
"""

import logging
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

rank = -1
ones = torch.ones(2, 4)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ddp_other_size() -> None:
    """Each rank counts the classes of its own part of the data."""
    classes = 3 + rank
    model = DistributedDataParallel(torch.nn.Linear(4, classes))  # A
    for _ in range(4):
        model(ones).sum().backward()


def ddp_other_call() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(6):
        model(ones).sum().backward()  # A
        if step == 3 and rank == 0:
            torch.save(model.state_dict(), os.devnull)
            dist.barrier()  # B


def ddp_fewer() -> None:
    model, total = DistributedDataParallel(torch.nn.Linear(4, 4)), torch.zeros(1)
    for step in range(8):
        loss = model(ones * (float("nan") if rank == 1 and step == 3 else 1.0)).sum()
        if torch.isnan(loss):
            continue
        loss.backward()  # A
        total += loss.detach()
    dist.all_reduce(total)  # B


def ddp_finished() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(8 - rank):
        model(ones).sum().backward()  # A


def ddp_killed() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(8):
        loss = model(ones).sum()
        if rank == 1 and step == 5:
            kill()
        loss.backward()  # A


def ddp_out_of_memory() -> None:
    class Net(torch.nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if rank == 1 and self.calls == 6:
                torch.empty(1 << 60)  # A
            return super().forward(inputs)

    model = DistributedDataParallel(Net(4, 4))
    for _ in range(8):
        model(ones).sum().backward()


def ddp_swallowed() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(8):
        try:
            if rank == 1 and step == 3:
                raise ValueError("no label")
            model(ones).sum().backward()  # A
        except ValueError as error:
            print(f"skipping a batch: {error}")


def fsdp_other_size() -> None:
    """Each rank counts the classes of its own part of the data."""
    model = fully_shard(torch.nn.Linear(4, 4 + 4 * rank))
    for _ in range(4):
        model(ones).sum().backward()  # A


def fsdp_other_call() -> None:
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 6)))
    for step in range(6):
        model(ones).sum().backward()  # A
        if step == 3 and rank == 0:
            print(float(model[0].weight.full_tensor().norm()))  # B


def fsdp_fewer() -> None:
    model = fully_shard(torch.nn.Linear(4, 4))
    for step in range(8):
        loss = model(ones * (float("nan") if rank == 1 and step == 3 else 1.0)).sum()  # A
        if torch.isnan(loss):
            continue
        loss.backward()  # B


def fsdp_finished() -> None:
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    for _ in range(8 - rank):
        model(ones).sum().backward()  # A


def fsdp_killed() -> None:
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    for step in range(8):
        out = model(ones)
        if rank == 1 and step == 5:
            out.register_hook(lambda _: kill())
        out.sum().backward()  # A


def fsdp_out_of_memory() -> None:
    model = fully_shard(torch.nn.Linear(4, 4))
    for step in range(8):
        out = model(ones)
        if rank == 1 and step == 5:
            out.register_hook(lambda _: torch.empty(1 << 60))  # A
        out.sum().backward()


def fsdp_swallowed() -> None:
    model = fully_shard(torch.nn.Linear(4, 4))
    for step in range(8):
        try:
            if rank == 1 and step == 3:
                raise ValueError("no label")
            model(ones).sum().backward()  # A
        except ValueError:
            logging.exception("skipping a batch")


def groups_other_size() -> None:
    """The last batch of the last rank is shorter."""
    predictions = torch.ones(10 if rank < 2 else 7)
    dist.all_reduce(ones)
    dist.all_reduce(predictions)  # A


def groups_other_call() -> None:
    pair = dist.new_group([1, 2], group_desc="pair")
    dist.all_reduce(ones)
    if rank == 1:
        dist.all_reduce(ones, group=pair)  # A
    elif rank == 2:
        dist.broadcast(ones, 1, group=pair)  # B
    dist.all_reduce(ones)


def groups_fewer() -> None:
    model = torch.nn.Linear(4, 4)
    for step in range(6):
        if rank == 1 and step == 3:
            continue
        model.zero_grad()
        model(ones).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # A
    dist.barrier()  # B


def groups_finished() -> None:
    dist.all_reduce(ones)
    if rank == 1:
        return
    dist.all_reduce(ones)  # A


def groups_killed() -> None:
    for step in range(6):
        dist.all_reduce(ones)  # A
        if rank == 1 and step == 3:
            kill()


def groups_out_of_memory() -> None:
    for step in range(6):
        dist.all_reduce(ones)
        if rank == 1 and step == 3:
            [0] * (1 << 60)  # A


def groups_swallowed() -> None:
    try:
        dist.all_reduce(ones)
        if rank == 1:
            raise KeyError("label")
        dist.all_reduce(ones)  # A
    except KeyError as error:
        print(f"the rest is skipped: {error}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    backend = sys.argv[2] if len(sys.argv) > 2 else "gloo"
    if backend == "shm":
        import ddp_lab.comm

        ddp_lab.comm.register()
    dist.init_process_group(backend)
    rank = dist.get_rank()
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
