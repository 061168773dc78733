"""Breaks groups of ranks that share memory: `broken_groups.py FOLDER SECONDS`.

Each line of standard input asks for one: ``{"fault", "size", "victim", "seed"}``. Its ranks are forked from this
process, because importing torch takes seconds, and run the same random operations until one of them breaks the group.
The answer is a line, too: what each rank was told, null for one that was killed.

Faults: ``kill``; ``stop``: for a while, then ``kill``; ``mismatch``: the victim calls something else; ``timeout``: it
stops calling; ``abort``: from another thread.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import threading
import time
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

import ddp_lab.comm
from ddp_lab.comm.shared_memory import is_broken

TIMEOUT = timedelta(seconds=0.3)
TOLD_SECONDS = float(sys.argv[2])  # the longest that a rank may not know


def main() -> None:
    ddp_lab.comm.register()
    torch.set_num_threads(1)
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(_break(os.path.join(sys.argv[1], str(number)), **json.loads(line))), flush=True)


def _break(store: str, fault: str, size: int, victim: int, seed: int) -> list[str | None]:
    pipes = [os.pipe() for _ in range(size)]
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _be_a_rank(pipes[rank][1], store, fault, rank, size, victim, seed)
        pids.append(pid)
    for _, write in pipes:
        os.close(write)
    readers = [os.fdopen(read) for read, _ in pipes]
    try:
        for reader in readers:
            assert _line(reader) == "ready\n"
        if fault in ("kill", "stop"):
            _end(pids, victim, fault, random.Random(f"{seed} {fault}"))
        return [
            None if fault in ("kill", "stop") and rank == victim else _line(reader)
            for rank, reader in enumerate(readers)
        ]
    finally:
        for pid, reader in zip(pids, readers, strict=True):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            reader.close()


def _end(pids: list[int], victim: int, fault: str, draw: random.Random) -> None:
    time.sleep(draw.random() * 0.1)
    if fault == "stop":
        os.kill(pids[victim], signal.SIGSTOP)
        time.sleep(draw.choice((0.05, 0.2, 2.0)))
        os.kill(pids[victim], signal.SIGCONT)
        time.sleep(0.05)
        ended = [pid for pid in pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        assert not ended, "who is slow is waited for"
    os.kill(pids[victim], signal.SIGKILL)


def _line(reader: Any) -> str:
    if not select.select([reader], [], [], TOLD_SECONDS)[0]:
        return "nothing"
    return str(reader.readline())


def _be_a_rank(out: int, store: str, fault: str, rank: int, size: int, victim: int, seed: int) -> None:
    dist.init_process_group("shm", store=dist.FileStore(store, size), rank=rank, world_size=size)
    group = dist.new_group(backend="shm", timeout=TIMEOUT if fault == "timeout" else None)
    backend = group._get_backend(torch.device("cpu"))
    os.write(out, b"ready\n")
    draw = random.Random(seed)
    moment = draw.randrange(200)
    if fault == "abort" and rank == victim:
        threading.Timer(random.Random(f"{seed} {fault}").random() * 0.1, backend.abort).start()
    works: list[Any] = []
    try:
        for step in count():
            if rank == victim and step == moment:
                if fault == "mismatch":
                    dist.all_reduce(torch.ones(3, dtype=torch.int16), group=group)
                while fault == "timeout" and not is_broken(backend):
                    time.sleep(0.01)
            works.append(_operate(draw, group, rank, size))
            if len(works) > 3:
                works.pop(0).wait()
    except dist.DistBackendError as error:
        os.write(out, f"{error}\n".encode())
    os._exit(0)  # the Gloo group beside it would wait for a rank that has died


def _operate(draw: random.Random, group: Any, rank: int, size: int) -> Any:
    values = torch.full((draw.choice((1, 1_000, 70_001)),), float(rank))
    kind = draw.choice(("sum", "sum now", "broadcast", "gather", "barrier"))
    if kind == "sum now":
        dist.all_reduce(values, group=group)
        assert values[-1].item() == sum(range(size))
        return dist.barrier(group, async_op=True)
    if kind == "broadcast":
        return dist.broadcast(values, draw.randrange(size), group=group, async_op=True)
    if kind == "gather":
        return dist.all_gather([torch.empty_like(values) for _ in range(size)], values, group=group, async_op=True)
    if kind == "barrier":
        return dist.barrier(group, async_op=True)
    return dist.all_reduce(values, group=group, async_op=True)


if __name__ == "__main__":
    main()
