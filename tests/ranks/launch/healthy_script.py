"""A script whose ranks wait for each other for a moment, as healthy ones do: `python healthy_script.py CASE`."""

import random
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SECONDS = 6.0  # of each case
LATE_S = 0.6  # at most
rank = -1
ones = torch.ones(2, 4)


def now_and_then_late() -> None:
    if random.random() < 0.1:
        time.sleep(random.random() * LATE_S)


def goes_on() -> bool:
    """Whether there is time for another step; the same on all ranks."""
    left = torch.tensor([END - time.monotonic()])
    dist.broadcast(left, 0)
    return left.item() > 0


def ddp() -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)))
    while goes_on():
        now_and_then_late()
        model(ones).sum().backward()


def uneven() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    with Join([model]):
        for _ in range(200 + 400 * rank):
            model(ones).sum().backward()


def sharded() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    while goes_on():
        now_and_then_late()
        model(ones).sum().backward()


def groups() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    made = [mesh.get_group("tp"), dist.new_group(group_desc="data")]
    while goes_on():
        now_and_then_late()
        for group in made:
            dist.all_reduce(ones, group=group)


def messages() -> None:
    while goes_on():
        now_and_then_late()
        for way in (0, 1):
            (dist.send if rank == way else dist.recv)(ones, 1 - rank)


def loader() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    data = [torch.ones(4)] * 64
    while goes_on():
        for batch in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
            now_and_then_late()
            model(batch).sum().backward()


def checkpoints() -> None:
    model = DistributedDataParallel(torch.nn.Linear(512, 512))
    while goes_on():
        model(torch.ones(2, 512)).sum().backward()
        if rank == 0:
            torch.save(model.state_dict(), "state.pt")
            now_and_then_late()
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random.seed(100 + rank)
    END = time.monotonic() + SECONDS
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
