"""A script that starts its ranks itself."""

import os
import socket
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def worker(rank: int, size: int, store: str) -> None:
    url = f"file://{store}" if store else None
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    assert "TORCHELASTIC_RUN_ID" not in os.environ
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(6):
        model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()


def listen(queue: Any) -> None:
    """In a process that is no rank."""
    assert queue.get() == "done"


if __name__ == "__main__":
    store, [how] = os.path.abspath("store"), sys.argv[1:]
    if how == "spawn":
        mp.spawn(worker, args=(2, store), nprocs=2)
    elif how == "a command":
        worker(int(os.environ["RANK"]), 2, "")
    elif how == "commands":
        own = {**os.environ, "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
        command = [sys.executable, __file__, "a command"]
        commands = [subprocess.Popen(command, env={**own, "RANK": str(rank)}) for rank in range(2)]
        sys.exit(max(one.wait() for one in commands))
    else:
        times = 2 if how.startswith("twice ") else 1
        how = how.removeprefix("twice ")
        context = mp.get_context(how.removesuffix(" by variables"))
        for _ in range(times):
            if how.endswith(" by variables"):
                os.environ.update(MASTER_ADDR=os.environ["MASTER_ADDR"], MASTER_PORT=str(free_port()))
                store = ""
            queue = context.Queue()
            started = [context.Process(target=worker, args=(rank, 2, store)) for rank in range(2)]
            started.append(context.Process(target=listen, args=(queue,)))
            for process in started:
                process.start()
            queue.put("done")
            for process in started:
                process.join()
            if any(process.exitcode for process in started):
                sys.exit(1)
