"""Programs whose messages, groups or models do not fit, each after a report in public: `python messages.py PROGRAM`,
two ranks.

Only the facts are theirs: what was seen, why, and so what is the right thing to say (Right).
"""

import datetime
import os
import socket
import sys

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


def both_send() -> None:
    """Two ranks send to each other before they receive.

    Source: NVIDIA/nccl#479 (2021-03-15).
    Saw: stuck.
    Right: both wait to send to each other, at this line: swap on one rank, or batch_isend_irecv.
    """
    other, received = 1 - rank, torch.zeros(4)
    dist.send(torch.ones(4), other)
    dist.recv(received, other)


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def leaves_before_it_is_sent() -> None:
    """A rank sends without waiting for it, and ends.

    Source: pytorch/pytorch#78514 (2022-05-31), #75512 (2022-04-08).
    Saw: the receiver's "Connection closed by peer".
    Right: rank 0 had finished the program without waiting for its isend; rank 1 waited in recv (line).
    """
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    if rank == 0:
        dist.isend(torch.ones(4, 4), 1)
        sys.exit()
    while _lives(processes[0]):
        pass  # it computes
    dist.recv(torch.zeros(4, 4), 0)


def uneven_parts() -> None:
    """Ranks gather parts of a sequence that is not divided evenly.

    Source: aurekaresearch/OpenDDE#23 (2026-08-20).
    Saw: with TORCH_DISTRIBUTED_DEBUG=DETAIL, _ALLGATHER_BASE of [359, 1, 1435, 16] and of [359, 1, 1436, 16].
    Right: all_gather_into_tensor of the two sizes, on which rank, at this line: pad.
    """
    own = torch.ones(36 if rank == 0 else 35, 16)
    dist.all_gather_into_tensor(torch.empty(2 * len(own), 16), own)
    dist.barrier()


def other_type() -> None:
    """A rank receives a broadcast into a tensor of another type and length.

    Source: pytorch/pytorch#91535 (2022-12-30).
    Saw: no error, and wrong numbers.
    Right: broadcast of 24 B float32 on rank 0 and of 112 B int64 on rank 1, at their lines.
    """
    values = torch.arange(6.0) if rank == 0 else torch.zeros(14, dtype=torch.int64)
    dist.broadcast(values, src=0)
    dist.barrier()


def other_parameter() -> None:
    """Weights are sent parameter by parameter, to a model of another configuration.

    Source: EchoseChen/SPA-VL-RLHF#2 (2024).
    Saw: broadcasts of [38838272] and of [33554432], without a name.
    Right: broadcast number, its size on each rank, the line.
    """
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2 + 3 * rank))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


def monitored() -> None:
    """A monitored barrier in which a rank does not arrive: it downloads.

    Source: NVIDIA/nccl#849 (2023).
    Saw: Ranks 4, 5, 6, 7 failed to pass monitoredBarrier in 2000000 ms.
    Right: rank 1 is in recv (line) while rank 0 waits in monitored_barrier (line).
    """

    if rank == 1:
        mirror, _server = socket.socketpair()
        mirror.recv(1)  # the download stands still
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=12))


def source_of_another_group() -> None:
    """Each group's model is saved with rank 0 as the source, which is in one of them alone. Four ranks.

    Source: pytorch/pytorch#152310 (2025-04-28).
    Saw: the job hangs and fails.
    Right: ranks 1 and 3 ended early: Global rank 0 is not part of their group, at this line.
    """
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dist.broadcast_object_list([rank], src=0, group=groups[rank % 2])
    dist.barrier()


def world_of_four() -> None:
    """The configuration says four ranks, and two are started.

    Source: pytorch/pytorch#52848 (2021-02-25); ultralytics/yolov5#4574 (2021-08).
    Saw: init_process_group hangs on all machines.
    Right: both ranks wait in init_process_group (line) for 4 ranks, of which the launcher has started 2.
    """
    dist.init_process_group("gloo", rank=rank, world_size=4)


def everyone_is_rank_0() -> None:
    """The rank is a constant of the command line, so that all ranks are 0.

    Source: pytorch/pytorch#85604 (2022-09-25).
    Saw: Address already in use.
    Right: ranks 0 and 1 both call init_process_group with rank=0 (line): take it from the environment.
    """
    dist.init_process_group("gloo", rank=0, world_size=2)


def port_of_another_job() -> None:
    """The port is written in the script, and another job of this host listens there.

    Source: huggingface/accelerate#74 (2021-05-10); meta-pytorch/torchtune#392 (2024-02-20).
    Saw: Address already in use.
    Right: rank 0 ended early: EADDRINUSE at its line; rank 1 waits for a store at this port.
    """
    with socket.socket() as job:
        if rank == 0:
            job.bind(("localhost", 0))
            job.listen()
            with open("port.part", "w") as file:
                file.write(str(job.getsockname()[1]))
            os.replace("port.part", "port")
        while not os.path.exists("port"):
            pass
        with open("port") as file:
            address = f"tcp://localhost:{file.read()}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)


def adapter_on_one_rank() -> None:
    """An adapter is added where its file is found, on one rank.

    Source: pytorch/pytorch#102438 (2023-05-27); yifan123/flow_grpo#245 (2026-06-17).
    Saw: DDP expects same model across all ranks, but Rank 0 has 382 params, while rank 1 has inconsistent 0 params.
    Right: the model on rank 0 has 4 parameters, on rank 1 2, at the line that wraps it; which ones differ.
    """
    layers = [nn.Linear(8, 8), *([nn.Linear(8, 8)] if rank == 0 else [])]
    DistributedDataParallel(nn.Sequential(*layers))


class Experts(nn.Module):
    """Calls only the experts to which a token is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, inputs: torch.Tensor, chosen: set[int]) -> torch.Tensor:
        features = self.gate(inputs)
        return sum((self.experts[number](features) for number in sorted(chosen)), features)


def experts_as_units() -> None:
    """Experts are sharded one by one, and a rank whose tokens go elsewhere does not call one.

    Source: pytorch/pytorch#126616 (2024-05-18).
    Saw: hangs after several steps without any error.
    Right: rank 0 gathers experts.1 (line) where rank 1 does something else (line): all ranks must call all experts.
    """
    model = Experts()
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)
    for step in range(6):
        model(torch.randn(4, 8), {0} if (rank, step) == (1, 3) else {0, 1}).square().mean().backward()


def checkpointed_twice() -> None:
    """A layer is recomputed in the backward, twice in one step.

    Source: microsoft/FocalNet#4 (2022-05-13); OFA-Sys/Chinese-CLIP#13 (2022-11-16).
    Saw: Expected to mark a variable ready only once, parameter at index 440.
    Right: the parameter by its name, and use_reentrant=False or static_graph=True.
    """

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            once = checkpoint(self.layer, inputs, use_reentrant=True)
            return checkpoint(self.layer, once, use_reentrant=True)

    model = DistributedDataParallel(Twice())
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()


def two_forwards() -> None:
    """A discriminator with BatchNorm judges two batches before one backward.

    Source: pytorch/pytorch#175024 (2026-02-14); Project-MONAI/GenerativeModels#352 (2023-03-31).
    Saw: modified by an inplace operation, [768] is at version 3, expected version 2.
    Right: the second forward's broadcast of buffers has changed them: broadcast_buffers=False, or one forward.
    """
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    for _ in range(3):
        real, fake = model(torch.randn(4, 8)), model(torch.randn(4, 8))
        (real.mean() - fake.mean()).backward()


def graph_that_changes() -> None:
    """A model that is declared static uses a part of it from the third step on.

    Source: deepinsight/insightface#2288 (2023-04-19); msed-Ebrahimi/ARoFace#5 (2024-08-12).
    Saw: Your training graph has changed in this iteration.
    Right: the parameter that was not used in the first step, and static_graph=False.
    """

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, inputs: torch.Tensor, step: int) -> torch.Tensor:
            return self.second(self.first(inputs)) if step >= 2 else self.first(inputs)

    model = DistributedDataParallel(Grows(), static_graph=True)
    for step in range(4):
        model(torch.randn(4, 8), step).sum().backward()


def part_of_the_outputs() -> None:
    """A model returns two outputs; the loss is made of one.

    Source: pytorch/pytorch#43259 (2020-08-19); WongKinYiu/yolov9#559 (2024).
    Saw: Expected to have finished reduction in the prior iteration; a list of indices.
    Right: the parameters by name that the loss does not use, and find_unused_parameters=True.
    """

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.boxes, self.masks = nn.Linear(8, 4), nn.Linear(8, 2)

        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.boxes(inputs), self.masks(inputs)

    model = DistributedDataParallel(Both())
    for _ in range(3):
        boxes, _ = model(torch.randn(4, 8))
        boxes.sum().backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if sys.argv[1] not in ("world_of_four", "everyone_is_rank_0", "port_of_another_job"):
        dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
