"""Works of Gloo that can be ended: like Gloo's own until then, and then whoever waits gets an error.

See [Note: a work that Gloo forgets] in `csrc/comm/abortable_work.h`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_lab.engine.groups import registry, sockets
from tests.ranks.conftest import Ranks
from tests.waiting import wait_until

_TIMEOUT = timedelta(seconds=2)
_LARGE = 1 << 25  # elements: more than the sockets' buffers take
_ACKNOWLEDGED_SECONDS = 0.3  # more than a peer delays that it received something
_OF_THE_TENSOR = 1 << 14  # bytes: more than what Gloo says before it


def _like_gloos(rank: int, size: int) -> dict[str, Any]:
    registry.install()
    try:
        group = dist.new_group(list(range(size)))
        ones, parts, seen = torch.ones(4), [torch.empty(4) for _ in range(size)], dict[str, Any]()
        work = dist.all_reduce(ones, group=group, async_op=True)
        seen["wait"] = work.wait()
        seen["value"] = [one.tolist() for one in work.get_future().value()]
        seen["over"] = (work.is_completed(), work.is_success())
        dist.all_gather(parts, ones * rank, group=group)
        seen["parts"] = [float(one[0]) for one in parts]
        summed = dist.all_reduce(ones, group=group, async_op=True).get_future().then(lambda done: done.value()[0].sum())
        seen["then"] = float(summed.wait())
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        seen["objects"] = objects
        if rank == 0:
            seen["source"] = dist.recv(parts[0], group=group)
        else:
            dist.send(ones, 0, group=group)
        work = dist.barrier(group, async_op=True)
        work.wait()
        with pytest.raises(RuntimeError, match="size"):  # of the work itself: Gloo's own words
            dist.all_gather([torch.empty(3)] * size, ones, group=group)
        registry.shut_down_groups()
        registry.abort_orphaned_works()
        seen["kept"] = len(registry._left_behind)
        return seen
    finally:
        registry.uninstall()


def test_they_are_like_gloos(ranks: Ranks) -> None:
    """Values, futures and what is chained to them, sources, objects, errors."""
    for rank, seen in enumerate(ranks(2, _like_gloos)):
        assert (seen["wait"], seen["value"], seen["over"]) == (True, [[2.0] * 4], (True, True))
        assert (seen["parts"], seen["then"]) == ([0.0, 2.0], 16.0)
        assert seen["objects"] == [{"rank": 0}, {"rank": 1}]
        assert seen.get("source") == (1 if rank == 0 else None)
        assert seen["kept"] == 0


def _waits(wait: Callable[[], Any]) -> tuple[threading.Thread, list[str]]:
    """A thread that waits, and how that ended."""
    ends: list[str] = []

    def run() -> None:
        try:
            ends.append(f"returned {wait()!r}")
        except RuntimeError as error:
            ends.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ends


def _begun(group: Any, least: int, call: Callable[[], Any]) -> Any:
    """What `call` returns, once it moved at least so many bytes over this group's connections."""
    (connections,) = (record.sockets for record in registry.alive() if record.group is group)
    before = -1
    while before != (before := sockets.bytes_moved(connections)):
        time.sleep(_ACKNOWLEDGED_SECONDS)
    work = call()
    assert work is not None
    wait_until(lambda: sockets.bytes_moved(connections) >= before + least, "the call to begin")
    return work


def _forgotten(rank: int, size: int, call: str) -> str:
    """Rank 1 is stopped while a large tensor is on its way to it, and goes on when rank 0's sockets are closed."""
    registry.install()
    try:
        pids: list[int] = [0] * size
        dist.all_gather_object(pids, os.getpid())
        group, large = dist.new_group(list(range(size)), timeout=_TIMEOUT), torch.ones(_LARGE)
        dist.barrier(group)

        def start() -> Any:
            if call == "send":
                return (dist.isend if rank == 0 else dist.irecv)(large, 1 - rank, group=group)
            return dist.broadcast(large, 0, group=group, async_op=True)

        if rank == 1:
            work = _begun(group, 1, start)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            dist.barrier()
            wait_until(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED, "rank 1 to be stopped")
            work = _begun(group, _OF_THE_TENSOR, start)
        wait = work.get_future().wait if (rank, call) == (0, "broadcast") else work.wait
        thread, ends = _waits(wait)
        registry.shut_down_groups()
        if rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        while thread.is_alive():
            registry.abort_orphaned_works()
            thread.join(0.1)
        del work, wait, thread
        wait_until(lambda: large._use_count() == 1, "Gloo's own threads to give up, and to say so to nobody")
        dist.barrier()
        return ends[0]
    finally:
        registry.uninstall()


@pytest.mark.parametrize("call", ["send", "broadcast"])
def test_whom_gloo_forgets(ranks: Ranks, call: str) -> None:
    """A send that is partly written and a receive that has partly come; waited for by the work and by its future."""
    sent, received = ranks(2, _forgotten, call)
    assert sent == "the collective was unblocked because its process group was shut down"
    assert "returned" not in received
