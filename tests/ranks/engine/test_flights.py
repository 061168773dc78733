"""What torch's Flight Recorder notes of real ranks, as we read it."""

from __future__ import annotations

import os
import pickle
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed import distributed_c10d

import ddp_lab.comm
from ddp_lab import native
from ddp_lab.diagnosis.collectives_in_flight import Entry, entries_of
from ddp_lab.diagnosis.on_rank import own_collectives
from ddp_lab.diagnosis.on_rank.own_collectives import NcclRecorder
from ddp_lab.engine.groups import registry
from tests.ranks.harness import on_ranks
from tests.waiting import wait_until


def _flights_of(name: str, began: int) -> dict[str, Any]:
    [found] = [one for one in own_collectives.collectives(began) if one["group"] == name]
    return found


@on_ranks(2)
def test_collectives_of_a_group(rank: int, size: int) -> None:
    """Names, sizes, numbers that are equal on all ranks though sends lie between, and what has not ended: of a new
    group after three collectives, with one in flight on rank 0, and after a send and one more."""
    registry.install()
    try:
        group, began = dist.new_group(list(range(size))), time.monotonic_ns()
        seen = [_flights_of(group.group_name, began)]
        for _ in range(2):
            dist.all_reduce(torch.ones(4), group=group)
        dist.broadcast(torch.ones(2, 3, dtype=torch.int64), 0, group=group)
        large = torch.ones(1 << 18)
        work = dist.all_reduce(large, group=group, async_op=True) if rank == 0 else None
        dist.barrier()
        wait_until(lambda: own_collectives.in_flight().count == (rank == 0), "the end of all others")
        seen += [_flights_of(group.group_name, began), own_collectives.in_flight()]
        dist.barrier()
        if work is None:
            dist.all_reduce(large, group=group)
        else:
            work.wait()
        dist.send(torch.ones(1), 1, group=group) if rank == 0 else dist.recv(torch.ones(1), 0, group=group)
        dist.barrier(group)
        wait_until(lambda: not own_collectives.in_flight().count, "the end of all")
        new, seen, flying, last = *seen, _flights_of(group.group_name, began)
    finally:
        registry.uninstall()
    assert (new["entered"], new["entries"], new["open_count"]) == (0, [], 0)
    assert seen["kinds"][:2] == [("all_reduce", "float32 [4]", 16), ("broadcast", "int64 [2, 3]", 48)]
    assert seen["entries"][:3] == [(1, 0), (2, 0), (3, 1)]
    assert (seen["entered"], seen["begun"], seen["open_count"]) == ([4, 3][rank], 1, [1, 0][rank])
    if rank == 0:
        ((number, kind, age, bucket),) = seen["open"]
        assert (number, seen["kinds"][kind], bucket) == (4, ("all_reduce", "float32 [262144]", 1 << 20), "")
        assert age > 0
        assert (flying.oldest.name, flying.oldest.number) == ("all_reduce", 4)
    assert (last["entered"], last["sequence"]) == (5, 6)
    assert last["kinds"][last["entries"][-1][1]] == ("barrier", "", 0)


def _dump() -> Any:
    return pickle.loads(c10d._dump_fr_trace(includeStackTraces=False))  # type: ignore[attr-defined, unused-ignore]


def _of_group(dump: Any, name: str, began: int) -> list[Entry]:
    """What a dump holds of a group made at a time (wall clock, ns): an earlier one may have had the same name."""
    return [one for one in entries_of(dump) if one.group == name and one.created_ns >= began]


@on_ranks(2)
def test_the_server_answers_in_the_same_format(rank: int, size: int, tmp_path: Path) -> None:
    """The way in which NCCL's recorder is asked, tried with the one that CPUs have; the socket's folder is private."""
    began, group = time.time_ns(), dist.new_group()
    of_group = partial(_of_group, name=group.group_name, began=began)
    dist.all_reduce(torch.ones(4), group=group)
    wait_until(lambda: all(one.done for one in of_group(_dump())), "the end of all")
    asked = NcclRecorder(tmp_path, "fr_trace_json", seconds=20.0)
    try:
        told = asked.dump()
    finally:
        asked.close()
    dump = _dump()
    assert told["pg_status"].keys() == {str(made) for made in dump["pg_status"]}
    assert of_group(told) == of_group(dump)
    assert of_group(dump)[-1].name == "all_reduce"
    assert NcclRecorder(tmp_path, "no such handler").dump() == {}
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


def _noted_by(name: str, began: int) -> dict[str, int]:
    """Recorder -> how many collectives of a group it holds (see `_of_group`), of all that may have heard of them."""
    dumps = {"ours": native.load().flights(False)}
    for backend in ("gloo", "shm", "round_robin"):
        options = {"backend": backend} if _RECORDERS_BY_NAME else {}
        dumps[backend] = pickle.loads(c10d._dump_fr_trace(includeStackTraces=False, **options))  # type: ignore[attr-defined, unused-ignore]
    held = {who: len(_of_group(dump, name, began)) for who, dump in dumps.items()}
    return {who: count for who, count in held.items() if count}


_RECORDERS_BY_NAME = hasattr(distributed_c10d, "_maybe_attach_flight_recorder")


@on_ranks(2)
def test_our_backends_are_noted_once(rank: int, size: int) -> None:
    """No recorder of torch's holds what our own log holds, or what the groups of a round-robin group hold."""
    registry.install()
    try:
        made = time.time_ns()
        mine, began = dist.new_group(backend="shm"), time.monotonic_ns()
        for _ in range(3):
            dist.all_reduce(torch.ones(4), group=mine)
        noted = _noted_by(mine.group_name, made)
        assert noted == {"ours": 3}, noted
        assert _flights_of(mine.group_name, began)["entered"] == 3
        turns = ddp_lab.comm.round_robin_process_group([dist.new_group(backend="gloo") for _ in range(2)])
        dist.all_reduce(torch.ones(4), group=turns)
        assert _noted_by(turns.group_name, made) == {}, "the group whose turn it is has it"
    finally:
        registry.uninstall()


@on_ranks(2)
def test_a_group_is_named_by_the_backend_that_it_got(rank: int, size: int) -> None:
    """One that asked for shared memory and got Gloo is Gloo's before its first collective, too."""
    ddp_lab.comm.register()
    registry.install()
    os.environ["DDP_LAB_HOST_ID"] = f"host {rank}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            group, began = dist.new_group(backend="shm"), time.monotonic_ns()
        seen = [_flights_of(group.group_name, began)["backend"]]
        dist.all_reduce(torch.ones(4), group=group)
        assert [*seen, _flights_of(group.group_name, began)["backend"]] == ["gloo", "gloo"]
    finally:
        del os.environ["DDP_LAB_HOST_ID"]
        registry.uninstall()


@pytest.mark.skipif(not _RECORDERS_BY_NAME, reason="before torch 2.15 nobody notes what other backends are given")
@on_ranks(2)
def test_a_third_partys_backend(rank: int, size: int) -> None:
    """Torch's hook notes its collectives, as it does those of nccl2, and we read them: names, numbers and frames."""

    class Third(c10d.Backend):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, gloo: ProcessGroupGloo, rank: int, size: int) -> None:
            super().__init__(rank, size)
            self.gloo = gloo

        def getBackendName(self) -> str:
            return "third"

        def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
            return self.gloo.allreduce(tensors, options)

        def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
            return self.gloo.broadcast(tensors, options)

    def create(store: Any, rank: int, size: int, timeout: Any) -> Third:
        return Third(ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=timeout), rank, size)

    dist.Backend.register_backend("third", create, devices=["cpu"])
    registry.install()
    try:
        group, began = dist.new_group(backend="third"), time.monotonic_ns()
        dist.all_reduce(torch.ones(4), group=group)
        dist.broadcast(torch.ones(2), 0, group=group)
        seen = [
            one
            for one in own_collectives.collectives(began)
            if (one["group"], one["backend"]) == (group.group_name, "third")
        ]
        assert [(one["entered"], one["begun"], one["open_count"]) for one in seen] == [(2, 1, 0)]
        assert seen[0]["kinds"] == [("all_reduce", "float32 [4]", 16), ("broadcast", "float32 [2]", 8)]
        assert Path(__file__).name in [Path(file).name for file, _ in own_collectives.frames_of(group.group_name, 2)]
        looked = time.monotonic()
        wait_until(lambda: not own_collectives.in_flight().count and time.monotonic() > looked + 0.5, "many looks")
        dist.all_reduce(torch.ones(4), group=group)
        [again] = [one for one in own_collectives.collectives(began) if one["backend"] == "third"]
        assert again["entered"] == 3, "though such a backend has no sequence number for it"
    finally:
        registry.uninstall()
