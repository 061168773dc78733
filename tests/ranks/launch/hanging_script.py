"""A script whose ranks wait for each other in the way that its argument names: `python hanging_script.py CASE`."""

import os
import queue
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

EVER = 600.0
rank = -1
ones = torch.ones(2, 4)


def train(steps: int, late_at: int = -1, late: float = EVER, compiled: bool = False) -> None:
    layer = torch.compile(torch.nn.Linear(4, 4), backend="eager") if compiled else torch.nn.Linear(4, 4)
    model = DistributedDataParallel(layer)
    for step in range(steps):
        if rank == 1 and step == late_at:
            time.sleep(late)
        model(ones).sum().backward()


def wait_for(name: str) -> None:
    while not Path(name).exists():
        time.sleep(0.05)


def compiles() -> None:
    """As deep inside a library as a compiler is, until there is a file "compiled"."""
    nested = "def nested(depth, call):\n    return nested(depth - 1, call) if depth else call()\n"
    library: dict[str, Any] = {}
    exec(compile(nested, str(Path(torch.__file__).with_name("_dynamo") / "nested.py"), "exec"), library)
    if rank == 1:
        done = threading.Event()
        threading.Thread(target=lambda: (wait_for("compiled"), done.set()), daemon=True).start()
        library["nested"](60, done.wait)
    dist.all_reduce(ones)


def late() -> None:
    """Without a model; recovers when there is a file "late"."""
    for step in range(6):
        while rank == 1 and step == 3 and not Path("late").exists():
            time.sleep(0.1)
        dist.all_reduce(ones)
    dist.all_gather_into_tensor(torch.empty(4, 4), ones)
    if rank == 0:
        dist.send(ones, 1)
    else:
        dist.recv(ones, 0)
    time.sleep(4.0)  # in which nobody waits


def trains() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    while True:
        if rank == 1:
            time.sleep(0.2)
        model(ones).sum().backward()
        Path("trains").touch()


def killed() -> None:
    """After it was late, and recovered; when there is a file "killed"."""
    late()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    for _ in range(3):
        model(ones).sum().backward()
    while rank == 1 and not Path("killed").exists():
        time.sleep(0.3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def times_out() -> None:
    group = dist.new_group(group_desc="short", timeout=timedelta(seconds=8))
    if rank == 1:
        time.sleep(EVER)
    dist.all_reduce(ones, group=group)


def busy() -> None:
    train(4, late_at=2)


def compiled() -> None:
    train(4, late_at=2, compiled=True)


def alone() -> None:
    if rank == 0:
        dist.all_reduce(ones)
    time.sleep(EVER)


def groups() -> None:
    made = [dist.new_group(group_desc="data"), dist.new_group(group_desc="tensor")]
    for group in made if rank == 0 else made[::-1]:
        dist.all_reduce(ones, group=group)


def messages() -> None:
    dist.recv(ones, 1 - rank)


def calls() -> None:
    if rank == 0:
        dist.all_reduce(ones)
    else:
        dist.broadcast(ones, 0)
    dist.barrier()


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """On rank 1 its fifth sample never arrives."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if rank == 1 and index == 4:
            time.sleep(EVER)
        return torch.ones(4)


def loader() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for batch in torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=1):
        model(batch).sum().backward()


def checkpoint() -> None:
    train(1)
    if rank == 0:
        os.mkfifo("disk")
        with open("disk", "wb") as file:
            torch.save({"weight": ones}, file)
    dist.barrier()


def sharded() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for step in range(4):
        if rank == 1 and step == 2:
            time.sleep(EVER)
        model(ones).sum().backward()


def functional_call() -> None:
    if rank == 1:
        time.sleep(EVER)
    print(functional.all_reduce(ones, "sum", dist.group.WORLD).sum())


def left_early() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(4 if rank == 0 else 2):
        model(ones).sum().backward()
    if rank == 1:
        dist.barrier()


def objects() -> None:
    if rank == 1:
        time.sleep(EVER)
    dist.all_gather_object([None, None], {"loss": 0.5})


def mesh() -> None:
    """Rank 3 of a 2 × 2 mesh never joins its tensor-parallel group; the data-parallel ones wait for it, too."""
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if rank == 3:
        time.sleep(EVER)
    dist.all_reduce(ones, group=made.get_group("tp"))
    dist.all_reduce(ones, group=made.get_group("dp"))


def one_makes_a_group() -> None:
    if rank == 0:
        dist.new_group([0, 1])
    dist.barrier()


def queue_of_its_own() -> None:
    if rank == 1:
        queue.Queue[int]().get()
    dist.all_reduce(ones)


def handle() -> None:
    if rank == 1:
        time.sleep(EVER)
    work = dist.all_reduce(ones, async_op=True)
    work.wait()


def deaf() -> None:
    """Rank 1 ends for nothing but SIGKILL."""
    if rank == 1:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(EVER)
    dist.barrier()


def graceful() -> None:
    """Both wait for the other's message, and save a checkpoint when they are asked to end."""

    def save(*_: object) -> None:
        os.write(1, f"rank {rank} saved\n".encode())  # in one piece: both ranks have this pipe
        sys.exit()

    signal.signal(signal.SIGTERM, save)
    dist.recv(ones, 1 - rank)


def dump(folder: str) -> None:
    """Writes what this rank's recorder holds once a second, as torch's watchdog does at a timeout."""
    while True:
        time.sleep(1.0)
        beside = Path(folder, f"new.{rank}")
        beside.write_bytes(_dump_fr_trace(includeStackTraces=True))
        beside.replace(Path(folder, f"trace_rank_{rank}"))


def see(how: str, where: str) -> None:
    """Lets others see this job as `python hanging_script.py CASE HOW WHERE …` says."""
    if how == "dumps":
        threading.Thread(target=dump, args=(where,), daemon=True).start()
    elif how == "serve_doctor":
        import ddp_lab

        ddp_lab.serve_doctor(int(where))
    else:
        from torch.distributed.debug import start_debug_server

        start_debug_server(int(where))


def meet() -> None:
    """Until all ranks have imported torch: on a busy machine they would seem to hang in `init_process_group`."""
    name = f"imported-{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    Path(f"{name}-{os.environ['RANK']}").touch()
    for other in range(int(os.environ["WORLD_SIZE"])):
        wait_for(f"{name}-{other}")


if __name__ == "__main__":
    meet()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for how, where in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        see(how, where)
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
