"""A script that starts its ranks itself, which then wait for each other or end in the way that its argument names:
`python hanging_children.py HOW CASE BACKEND`, with HOW "mp.spawn" or a start method of multiprocessing."""

import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ddp_lab.comm

EVER = 600.0
ones = torch.ones(2, 4)
Start = Callable[..., list[Any]]


def calls(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(ones)
    else:
        dist.broadcast(ones, 0)
    dist.barrier()


def asleep(rank: int) -> None:
    if rank == 1:
        time.sleep(EVER)
    dist.barrier()


def returns(rank: int) -> None:
    if rank == 0:
        dist.barrier()


def killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def killed_late(rank: int) -> None:
    while rank == 1 and not os.path.exists("told"):
        time.sleep(0.1)
    killed(rank)


def deaf(rank: int) -> None:
    """Rank 1 ends for nothing but SIGKILL."""
    for number in (signal.SIGINT, signal.SIGTERM) if rank == 1 else ():
        signal.signal(number, signal.SIG_IGN)
    asleep(rank)


def trains(rank: int) -> None:
    dist.barrier()


def import_slowly() -> None:
    sys.path.insert(0, "")
    importlib.import_module("slow")


def imports(rank: int) -> None:
    dist.barrier()


if __name__ == "__mp_main__" and sys.argv[2] == "imports" and mp.current_process().name.endswith("-2"):
    import_slowly()


def worker(rank: int, store: str, case: str, backend: str) -> None:
    if case == "imports" and rank == 1:
        import_slowly()
    if case == "never_joins" and rank == 1:
        time.sleep(EVER)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    for _ in range(3):
        dist.all_reduce(ones)
    globals()[case](rank)
    dist.destroy_process_group()


def store() -> str:
    return os.path.join(tempfile.mkdtemp(dir="."), "store")


def start(how: str, case: str, backend: str) -> list[Any]:
    """Starts two ranks, each in a process."""
    context, shared = mp.get_context(how), os.path.abspath(store())
    started = [context.Process(target=worker, args=(rank, shared, case, backend)) for rank in range(2)]
    for one in started:
        one.start()
    return started


def join(started: list[Any]) -> int:
    for one in started:
        one.join()
    return max(abs(one.exitcode) for one in started)


if __name__ == "__main__":
    how, case, backend = sys.argv[1:]
    assert ddp_lab.comm
    if how == "mp.spawn":
        mp.spawn(worker, args=(os.path.abspath(store()), case, backend), nprocs=2)
    elif case == "again":
        assert join(start(how, "trains", backend)) == 0
        sys.exit(join(start(how, "asleep", backend)))
    elif case == "two jobs":
        sys.exit(join(start(how, "asleep", backend) + start(how, "calls", backend)))
    else:
        sys.exit(join(start(how, case, backend)))
