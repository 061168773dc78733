"""Programs whose ranks make different steps, each after a report in public: `python loops.py PROGRAM`, two ranks.

Only the facts are theirs: what was seen, why, and so what is the right thing to say (Right).
"""

import os
import queue
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Net(nn.Module):
    """Two heads, of which a batch without targets uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scores, self.boxes = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor, targets: int) -> torch.Tensor:
        features = self.body(inputs).relu()
        loss = self.scores(features).square().mean()
        return loss + self.boxes(features).square().mean() if targets else loss


def train(model: nn.Module, steps: int, inputs: int = 8) -> None:
    for _ in range(steps):
        model(torch.randn(4, inputs)).square().mean().backward()


def own_patience() -> None:
    """Early stopping on each rank's own metric.

    Source: Lightning-AI/pytorch-lightning#379 (2019-10-17).
    Saw: where the condition is met on one rank alone, that one stops and the others hang.
    Right: rank 1 had finished the program (it broke out of the loop) after 9 backwards, rank 0 waits in the backward of
      its 10th: stop on all ranks together.
    """
    model, best, waited = DistributedDataParallel(nn.Linear(8, 2)), float("inf"), 0
    for epoch in range(8):
        train(model, 3)
        metric = 1.0 if rank == 1 else 1.0 / (epoch + 1)
        best, waited = min(best, metric), 0 if metric < best else waited + 1
        if waited == 2:
            break


def stop_command() -> None:
    """A command to stop reaches rank 0 alone, and a barrier does not share it.

    Source: talmolab/sleap-nn#471 (2026-03-02).
    Saw: deadlock of 30 s: rank 0 has left the loop and waits in a broadcast, the others train on.
    Right: rank 0 in the broadcast (line), rank 1 in the backward of one more step (line): agree on the flag.
    """
    model, stops = DistributedDataParallel(nn.Linear(8, 2)), False
    for step in range(20):
        train(model, 1)
        if rank == 0 and step == 5:
            stops = True
        dist.barrier()
        if stops:
            break
    best = [f"epoch-{step}.pt"]
    dist.broadcast_object_list(best, src=0)


def longer_stream() -> None:
    """A stream of data is longer on one rank; validation follows.

    Source: pytorch/pytorch#141069 (2024-11-19).
    Saw: the validation freezes at its second batch; the watchdog ends the all-reduce after half an hour.
    Right: rank 1 made one backward fewer; rank 0 is in the backward (line), rank 1 in the all_reduce of the validation
      (line): same number of batches on all ranks, or join().
    """
    model = DistributedDataParallel(nn.Linear(8, 2))
    train(model, 11 if rank == 0 else 10)
    for _ in range(4):
        with torch.no_grad():
            loss = model(torch.randn(4, 8)).square().mean()
        dist.all_reduce(loss)


def least_seconds() -> None:
    """A benchmark's loop ends by each rank's own clock.

    Source: pytorch/pytorch#22834 (2019-07-17).
    Saw: the script freezes without any output.
    Right: rank 0 had finished (the loop ended by its clock) while rank 1 waits in the backward: decide on one rank.
    """
    model, clock = DistributedDataParallel(nn.Linear(8, 2)), 0.0
    for trial in range(100):
        train(model, 1)
        clock += 0.11 if rank == 0 else 0.1
        if clock >= 2 and trial >= 5:
            break


def skips_after_memory_error() -> None:
    """One rank runs out of memory in a step, says so and goes on with the next batch; the model has BatchNorm.

    Source: pytorch/pytorch#44353 (2020-09-09).
    Saw: the others are blocked.
    Right: rank 1 left out the backward of step 4 (it is in the broadcast of the buffers in the next forward), rank 0 in
      the backward: skip on all ranks.
    """
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    for step in range(10):
        try:
            loss = model(torch.randn(4, 8)).square().mean()
            if (rank, step) == (1, 4):
                raise RuntimeError("out of memory")
            loss.backward()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            print("ran out of memory, skipping this batch", flush=True)


def invalid_loss() -> None:
    """A rank checks its loss and raises; the others are in the backward.

    Source: ai2cm/ace#850 (2026-02-18).
    Saw: the others hang until the timeout, whose message hides the reason.
    Right: rank 1 ended early: ValueError at its line; rank 0 then waited in the backward.
    """
    model = DistributedDataParallel(nn.Linear(8, 2))
    for step in range(10):
        loss = model(torch.randn(4, 8)).square().mean()
        if (rank, step) == (1, 4):
            raise ValueError("loss is NaN")
        loss.backward()


class Samples(Dataset):
    """Eight samples, of which the last kills who reads it, if wanted."""

    def __init__(self, deadly: bool = False) -> None:
        self.deadly = deadly

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.deadly and index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((8,), float(index))


def empty_tail() -> None:
    """A sampler gives the last rank an empty batch.

    Source: NVIDIA-NeMo/Megatron-Bridge#5527 (2026-08-12).
    Saw: IndexError in the collation on one rank, after the other has gone into the step.
    Right: rank 1 ended early: IndexError at the line of the loop; rank 0 then waited in the backward.
    """
    batches = [[0, 1], [4]] if rank == 0 else [[2, 3], []]
    model = DistributedDataParallel(nn.Linear(8, 2))
    for inputs in DataLoader(Samples(), batch_sampler=batches):
        model(inputs).sum().backward()


def worker_killed() -> None:
    """A worker of the DataLoader is killed on one rank (out of shared memory, for example).

    Source: alibaba/Pai-Megatron-Patch#583 (2025-05-06).
    Saw: DataLoader worker (pid 9382) is killed by signal: Killed.
    Right: rank 1 ended early with this error, at the line of the loop; rank 0 then waited in the backward.
    """
    model = DistributedDataParallel(nn.Linear(8, 2))
    for inputs in DataLoader(Samples(deadly=rank == 1), batch_size=2, num_workers=1):
        model(inputs).sum().backward()


def reader_ended() -> None:
    """The thread that reads ahead ends with an exception on one rank; who takes from its queue waits forever.

    Source: microsoft/infinibatch#17 (2020-08-18).
    Saw: the training is stuck.
    Right: rank 1 waits for its own queue (line), rank 0 for it in the backward (line).
    """
    batches: queue.Queue[torch.Tensor] = queue.Queue(2)

    def read() -> None:
        for index in range(8):
            if (rank, index) == (1, 5):
                raise OSError("truncated file")
            batches.put(torch.full((4, 8), float(index)))

    threading.Thread(target=read, daemon=True).start()
    model = DistributedDataParallel(nn.Linear(8, 2))
    for _ in range(8):
        model(batches.get()).sum().backward()


class Synchronised(nn.Module):
    """Statistics over all ranks, as SyncBatchNorm makes them."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.detach().mean(0)
        dist.all_reduce(mean)
        return inputs - mean / dist.get_world_size()


def part_on_one_rank() -> None:
    """A part with synchronised statistics is called from the second frame of a video on.

    Source: pytorch/pytorch#44957 (2020-09-18).
    Saw: the model hangs in a batch norm when one rank begins a video and another is in the middle of one.
    Right: rank 0 in the all_reduce of Synchronised.forward (line), rank 1 in the backward (line): call it on all ranks.
    """
    first, second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Synchronised())

    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, inputs: torch.Tensor, frame: int) -> torch.Tensor:
            features = self.first(inputs)
            return self.second(features) if frame else features

    model = DistributedDataParallel(Video(), find_unused_parameters=True)
    for step in range(8):
        model(torch.randn(4, 8), step % (4 if rank else 3)).square().mean().backward()


def rank_without_targets() -> None:
    """A batch without targets leaves a head unused, on one rank.

    Source: lyuwenyu/RT-DETR#672 (2026-06-10).
    Saw: the GPUs are busy, nothing moves; the hang is in a backward.
    Right: rank 1 never produced gradients for boxes.weight and boxes.bias; find_unused_parameters=True.
    """
    model = DistributedDataParallel(Net())
    for step in range(8):
        model(torch.randn(4, 8), targets=0 if (rank, step) == (1, 3) else 2).backward()


def loss_of_its_own() -> None:
    """Where a rank has nothing to learn from, its loss is a new zero, which the model did not make.

    Source: pytorch/pytorch#23425 (2019-07-26).
    Saw: the code hangs.
    Right: rank 1 made a forward at step 3 without a backward of the model; rank 0 is in its backward: return the
      model's own loss times zero.
    """
    model = DistributedDataParallel(Net())
    for step in range(8):
        loss = model(torch.randn(4, 8), targets=2)
        if (rank, step) == (1, 3):
            loss = torch.zeros((), requires_grad=True)
        loss.backward()
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
