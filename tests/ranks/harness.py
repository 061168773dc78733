"""Real ranks for tests: processes with a Gloo group that stay up between cases.

They are forked from a server process that has imported torch, which takes seconds, and has run nothing else.

`RankPool(n).run(function, *args)` calls ``function(rank, world_size, *args)`` in each of n processes and returns the
results by rank. The function is a module-level one of a test module. If a rank raises, dies or does not answer in
time, all ranks are ended (which frees those that waited for it) and the next `run` starts fresh ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import reprlib
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.waiting import DEADLINE_S

__all__ = ["RankError", "RankPool", "end_server", "on_ranks"]

_GRACE_SECONDS = 3.0  # once a rank has failed, for what others have to say
_context = multiprocessing.get_context("forkserver")
# What most ranks import, and optimizers and mixed precision in them.
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "torch.distributed.optim", "torch.distributed.tensor", "torch._dynamo", "pytest"]
)


class RankError(AssertionError):
    """A rank raised, died or did not answer in time; the text holds every rank's traceback, first in time first."""


def end_server() -> None:
    """Ends the process from which ranks are forked, if there is one; the next pool starts another."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _serve(rank: int, size: int, folder: str, environment: dict[str, str], pipe: Connection) -> None:
    """A rank's main loop: functions in, results or tracebacks out, until nothing comes or the pipe closes."""
    os.environ.clear()  # the server's, of when it was started
    os.environ.update(environment)
    os.environ["DDP_LAB_SAMPLE"] = "0"  # tests count events
    gc.freeze()  # what the server has imported stays; every full collection would walk through it
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()  # where a rank was that crashes
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    pipe.send(("ready", None))
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            break
        if not job:
            break
        function, args = pickle.loads(job)
        try:
            answer = ("result", function(rank, size, *args))
        except BaseException:  # noqa: BLE001 - it is raised again in the test's process
            answer = ("error", traceback.format_exc() + _values(sys.exc_info()[2]))
        pipe.send(answer)
    dist.destroy_process_group()


def _values(failed: TracebackType | None) -> str:
    """The plain local variables of the function that raised: no rewritten assertion shows them in a rank."""
    (frame, _), *_ = reversed(list(traceback.walk_tb(failed)))
    plain = {name: v for name, v in frame.f_locals.items() if isinstance(v, (str, int, float, list, tuple, dict))}
    return "".join(f"  {name} = {reprlib.repr(value)}\n" for name, value in plain.items())


class RankPool:
    """`size` processes that form one Gloo group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(rank, world_size, *args)`` returned on each rank.

        Raises:
            RankError: a rank raised, died, or had not answered before the deadline.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        return self._collect(time.monotonic() + DEADLINE_S)

    def hang_up(self) -> None:
        """Tells all processes to end. In words: forked processes of other tests may hold copies of the pipes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended
                pipe.send_bytes(b"")
            pipe.close()

    def close(self) -> None:
        """Ends all processes and waits for them."""
        self.hang_up()
        deadline = time.monotonic() + DEADLINE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            arguments = (rank, self.size, self._folder.name, dict(os.environ), theirs)
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(time.monotonic() + DEADLINE_S)  # each imports torch

    def _collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: list[str] = []
        while len(results) < self.size:
            waiting = [rank for rank in range(self.size) if rank not in results]
            pipes = {self._pipes[rank]: rank for rank in waiting}
            arrived = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not arrived:
                break
            for pipe in arrived:
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    what, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(DEADLINE_S)
                    code = self._processes[rank].exitcode
                    what, value = "error", f"the process of rank {rank} died: exit code {code}"
                results[rank] = value
                if what == "error":
                    errors.append(f"--- rank {rank} ---\n{value}")
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if len(results) == self.size and not errors:
            return [results[rank] for rank in range(self.size)]
        silent = [rank for rank in range(self.size) if rank not in results]
        if silent and not errors:
            errors.append(f"no answer in time from ranks {silent}; their stacks are on stderr")
            for rank in silent:
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
            wait([process.sentinel for process in self._processes], 0.2)  # lets them write
        self._kill()
        raise RankError("\n".join(errors) + (f"\n(ranks {silent} were still waiting)" if silent else ""))

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def on_ranks(size: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of ``test(rank, size, *fixtures)``, which then runs in each process of a session's pool.

    Args:
        size: the number of ranks; None if a fixture of that name gives it.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(ranks: Callable[..., list[Any]], **fixtures: Any) -> None:
            world_size = fixtures.pop("size") if size is None else size
            ranks(world_size, _call, test, fixtures)

        _, world_size, *fixtures = inspect.signature(function).parameters.values()
        wanted = [] if size is not None else [world_size]
        pool = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([pool, *wanted, *fixtures])  # type: ignore[attr-defined]
        return test

    return decorate


def _call(rank: int, size: int, test: Any, fixtures: dict[str, Any]) -> None:
    """What a rank does for a test of `on_ranks`."""
    test.__wrapped__(rank, size, **fixtures)


# What a child needs to import the test modules by name.
ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
