"""Programs in which one rank saves, logs or measures, each after a report in public: `python saving.py PROGRAM`, two
ranks.

Only the facts are theirs: what was seen, why, and so what is the right thing to say (Right).
"""

import datetime
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()


def file_seen_by_one() -> None:
    """Each rank looks whether a checkpoint is there; a network file system shows it to one of them alone.

    Source: KempnerInstitute/KempnerForge#49 (2026-04-22).
    Saw: deadlock: some ranks enter broadcast_object_list, the others skip it.
    Right: rank 0 in broadcast_object_list (line), rank 1 in the backward (line): called on one rank alone; let rank 0
      decide for all.
    """
    if rank == 0:
        Path("train_state.pt").touch()
    model = DistributedDataParallel(nn.Linear(8, 2))
    if rank == 0 and Path("train_state.pt").exists():  # not yet seen on rank 1
        state = [{"step": 10}]
        dist.broadcast_object_list(state, src=0)
    train(model, 10)


def gathers_on_main() -> None:
    """Results are gathered where they are printed, on the main process alone.

    Source: huggingface/accelerate#2733 (2024-05-02).
    Saw: it hangs.
    Right: rank 0 waits in gather_object (line); rank 1 has not entered it and waits in the barrier (line).
    """
    answers = [f"answer of rank {rank}"]
    if rank == 0:
        gathered = [None, None]
        dist.gather_object(answers, gathered, dst=0)
        print(gathered)
    dist.barrier()


class Accuracy:
    """A metric that gathers what all ranks have counted when it is computed."""

    def __init__(self) -> None:
        self.right = torch.zeros(2)

    def compute(self) -> float:
        everywhere = [torch.zeros(2) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, self.right)
        return float(sum(everywhere)[0])


def metric_on_rank0() -> None:
    """The test after the training is run on rank 0 alone; its metric gathers from all ranks.

    Source: Lightning-AI/torchmetrics#938 (2022-04-06).
    Saw: hangs in compute() until the timeout of 'allGather'.
    Right: rank 1 had finished the program; rank 0 waits in all_gather in compute() (line): rank 0 alone calls it.
    """
    train(DistributedDataParallel(nn.Linear(8, 2)), 5)
    if rank == 0:
        print("accuracy", Accuracy().compute())


def tracker_without_network() -> None:
    """The tracker of experiments does not reach its server, on rank 0.

    Source: EleutherAI/bergson#249 (2026-04-29); starVLA/starVLA#369 (2026-06-08) is of the same kind.
    Saw: the ranks' logs say nothing; the others stand in the next collective.
    Right: rank 0 is in recv (line), rank 1 waits for it in the new group, or in the first collective (line).
    """
    if rank == 0:
        tracker, _server = socket.socketpair()
        tracker.recv(1)  # the server does not answer
    dist.new_group()
    train(DistributedDataParallel(nn.Linear(8, 2)), 5)


def tokenize(text: str) -> list[int]:
    return [hash(word) for word in text.split()]


def prepares_past_the_timeout() -> None:
    """The data are prepared on rank 0 first, for longer than the group's timeout.

    Source: JIA-Lab-research/LongLoRA#45 (2023-10-09); axolotl-ai-cloud/axolotl#2684 (2025-05-16).
    Saw: after 30 minutes the barrier raises on the waiting rank.
    Right: rank 0 was in tokenize() (line) while rank 1 waited in the barrier (line) for the timeout's 8 s: longer
      timeout, or prepare before.
    """
    if rank > 0:
        dist.barrier()
    while rank == 0:
        tokenize("to be or not to be")


def nothing_to_report() -> None:
    """A rank without metrics returns early from the function that gathers them.

    Source: bo-ke/llm-internal-medicine#45 (2026-08-16).
    Saw: 13 minutes with all GPUs at 100 % and no output.
    Right: rank 0 in all_gather_object of report() (line); rank 1 did not call it: it waits in the backward (line).
    """

    def report(metrics: dict[str, float]) -> list[dict[str, float]]:
        if not metrics:
            return []
        everywhere: list[dict[str, float]] = [{}, {}]
        dist.all_gather_object(everywhere, metrics)
        return everywhere

    model = DistributedDataParallel(nn.Linear(8, 2))
    for step in range(6):
        train(model, 1)
        report({"entropy": 0.5} if rank == 0 or step < 3 else {})


def other_keys() -> None:
    """Each logged value is averaged; a rank logs one more than the other.

    Source: Lightning-AI/pytorch-lightning#19106 (2023-12).
    Saw: deadlock, or values of another key.
    Right: rank 1 makes a third all_reduce (line) where rank 0 is in the backward (line).
    """

    def log(values: dict[str, float]) -> None:
        for value in values.values():
            mean = torch.tensor(value)
            dist.all_reduce(mean)

    model = DistributedDataParallel(nn.Linear(8, 2))
    for step in range(6):
        train(model, 1)
        log({"loss": 1.0, "accuracy": 0.5, **({"accuracy/small": 0.2} if (rank, step) == (1, 3) else {})})


def same_folder_twice() -> None:
    """All ranks create a folder; on a network file system one of them fails.

    Source: NVIDIA-NeMo/Automodel#3686 (2026-08-26).
    Saw: a run of hours is killed at step 297 of 300; the other ranks hang.
    Right: rank 1 ended early: FileExistsError at its line; rank 0 then waited in the barrier (line).
    """
    train(DistributedDataParallel(nn.Linear(8, 2)), 5)
    if rank == 0:
        os.makedirs("checkpoint", exist_ok=True)
    dist.barrier()
    if rank == 1:
        os.makedirs("checkpoint")
    dist.barrier()


def saves_by_the_clock() -> None:
    """A checkpoint every few minutes, by each rank's own clock; its name is broadcast.

    Source: speechbrain/speechbrain#2401 (2024-02-09).
    Saw: rank 0 in a broadcast of [1] int64, rank 1 in the all-reduce of 25 floats.
    Right: the same two, with their lines, and that rank 0 alone makes the call.
    """
    model = DistributedDataParallel(nn.Linear(8, 2))
    for step in range(8):
        train(model, 1)
        if rank == 0 and step == 4:  # its clock is ahead
            name = torch.tensor([step])
            dist.broadcast(name, src=0)


def full_state_on_rank0() -> None:
    """The whole state of a sharded model is asked for on the rank that saves it.

    Source: pytorch/pytorch#73383 (2022-02-24): all ranks need to make the collectives of a full state.
    Saw: desynchronised ranks.
    Right: rank 0 waits in the all_gather of get_model_state_dict (line), rank 1 in the barrier (line): all ranks must
      call it.
    """
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    train(model, 3)
    if rank == 0:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        torch.save(state, "model.pt")
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    short = datetime.timedelta(seconds=8) if sys.argv[1] == "prepares_past_the_timeout" else None
    dist.init_process_group("gloo", timeout=short)
    rank = dist.get_rank()
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
