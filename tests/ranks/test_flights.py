"""What torch's Flight Recorder notes of real ranks, as we read it."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ddp_lab.engine import flights, groups
from ddp_lab.engine.gpu_flights import GpuFlights
from ddp_lab.insight.flight_recorder import entries_of
from tests.leftovers import wait_until
from tests.ranks.conftest import Ranks


def _flights_of(name: str, began: int) -> dict[str, Any]:
    [found] = [one for one in flights.flights(began) if one["group"] == name]
    return found


def _on_rank(rank: int, size: int) -> list[dict[str, Any]]:
    """Seen of a new group: after three collectives, with one in flight on rank 0, and after a send and one more."""
    groups.install()
    try:
        group, began = dist.new_group(list(range(size))), time.monotonic_ns()
        seen = [_flights_of(group.group_name, began)]
        for _ in range(2):
            dist.all_reduce(torch.ones(4), group=group)
        dist.broadcast(torch.ones(2, 3, dtype=torch.int64), 0, group=group)
        large = torch.ones(1 << 18)
        work = dist.all_reduce(large, group=group, async_op=True) if rank == 0 else None
        dist.barrier()
        wait_until(lambda: flights.in_flight()["count"] == (rank == 0), 20, "the end of all others")
        seen += [_flights_of(group.group_name, began), flights.in_flight()]
        dist.barrier()
        if work is None:
            dist.all_reduce(large, group=group)
        else:
            work.wait()
        dist.send(torch.ones(1), 1, group=group) if rank == 0 else dist.recv(torch.ones(1), 0, group=group)
        dist.barrier(group)
        wait_until(lambda: not flights.in_flight()["count"], 20, "the end of all")
        return [*seen, _flights_of(group.group_name, began)]
    finally:
        groups.uninstall()


def test_collectives_of_a_group(ranks: Ranks) -> None:
    """Names, sizes, numbers that are equal on all ranks though sends lie between, and what has not ended."""
    for rank, (new, seen, flying, last) in enumerate(ranks(2, _on_rank)):
        assert (new["entered"], new["entries"], new["open_count"]) == (0, [], 0)
        assert seen["kinds"][:2] == [("all_reduce", "float32 [4]", 16), ("broadcast", "int64 [2, 3]", 48)]
        assert seen["entries"][:3] == [(1, 0), (2, 0), (3, 1)]
        assert (seen["entered"], seen["begun"], seen["open_count"]) == ([4, 3][rank], 1, [1, 0][rank])
        if rank == 0:
            ((number, kind, age, bucket),) = seen["open"]
            assert (number, seen["kinds"][kind], bucket) == (4, ("all_reduce", "float32 [262144]", 1 << 20), "")
            assert age > 0
            assert (flying["oldest"]["name"], flying["oldest"]["number"]) == ("all_reduce", 4)
        assert (last["entered"], last["sequence"]) == (5, 6)
        assert last["kinds"][last["entries"][-1][1]] == ("barrier", "", 0)


def _dump() -> Any:
    return pickle.loads(c10d._dump_fr_trace(includeStackTraces=False))  # type: ignore[attr-defined, unused-ignore]


def _both_formats(rank: int, size: int, folder: str) -> None:
    dist.all_reduce(torch.ones(4))
    wait_until(lambda: all(one.done for one in entries_of(_dump())), 20, "the end of all")
    asked = GpuFlights(Path(folder), "fr_trace_json", seconds=20.0)
    try:
        told = asked.dump()
    finally:
        asked.close()
    dump = _dump()
    assert told["pg_status"].keys() == {str(made) for made in dump["pg_status"]}
    assert entries_of(told) == entries_of(dump)
    assert entries_of(dump)[-1].name == "all_reduce"
    assert GpuFlights(Path(folder), "no such handler").dump() == {}
    dist.barrier()


def test_the_server_answers_in_the_same_format(ranks: Ranks, tmp_path: Path) -> None:
    """The way in which NCCL's recorder is asked, tried with the one that CPUs have; the socket's folder is private."""
    ranks(2, _both_formats, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
