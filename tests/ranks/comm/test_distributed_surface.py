"""torch.distributed as its reference describes it, with Gloo and with ours, beyond examples and test_shared_memory.

Launching is in test_run, test_install and test_drop_in (torchrun, `ddp-lab run`), spawning in test_examples_programs.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddp_lab.comm
from tests.ranks.comm.test_examples_distributed import outside
from tests.ranks.conftest import Ranks
from tests.ranks.harness import on_ranks

SHORT = timedelta(seconds=0.2)
CPU = torch.device("cpu")


def test_queries_without_a_group() -> None:
    """What is built in can be asked at any time; rank, size and backend only once there is a group."""
    assert dist.is_available()
    assert not dist.is_initialized()
    assert isinstance(dist.is_mpi_available(), bool)
    assert isinstance(dist.is_nccl_available(), bool)
    assert dist.is_gloo_available()
    assert not dist.is_torchelastic_launched()
    for ask in (dist.get_rank, dist.get_world_size, dist.get_backend, dist.barrier):
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            ask()


def test_the_backend_class() -> None:
    """It parses names in either case, has ours as attributes, and refuses what is no string."""
    ddp_lab.comm.register()
    assert dist.Backend("GLOO") == dist.Backend.GLOO == "gloo"
    assert dist.Backend("nccl") == dist.Backend.NCCL == "nccl"
    assert dist.Backend.MPI == "mpi"
    assert dist.Backend("SHM") == dist.Backend.SHM == "shm"
    assert dist.Backend.ROUND_ROBIN == "round_robin"
    assert dist.Backend.UNDEFINED == "undefined"
    with pytest.raises(ValueError, match="string-ish"):
        dist.Backend(3)


def test_reductions() -> None:
    """Those of 1.7 are there; their old name is deprecated."""
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        assert getattr(dist.ReduceOp, name).name == name
    with pytest.warns(FutureWarning, match="reduce_op"):
        assert dist.reduce_op.SUM == dist.ReduceOp.SUM


def test_what_init_process_group_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways at once, missing ranks and variables, unknown backends, those that are not built in."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    for error, words, arguments in (
        (AssertionError, "both init_method and store", {"init_method": "tcp://127.0.0.1:1", "store": dist.HashStore()}),
        (ValueError, "environment variable RANK expected", {"init_method": "env://"}),
        (ValueError, "rank parameter missing", {"init_method": "tcp://127.0.0.1:1", "world_size": 1}),
        (ValueError, "world size parameter missing", {"init_method": "tcp://127.0.0.1:1", "rank": 0}),
        (
            RuntimeError,
            "No rendezvous handler for nowhere://",
            {"init_method": "nowhere://", "rank": 0, "world_size": 1},
        ),
        (TypeError, "timedelta", {**alone, "timeout": 3}),
    ):
        with pytest.raises(error, match=words):
            dist.init_process_group("gloo", **arguments)
        assert not dist.is_initialized()
    if not dist.is_mpi_available():
        with pytest.warns(UserWarning, match="MPI"), pytest.raises(RuntimeError, match="built in"):
            dist.init_process_group("mpi", **alone)
    with pytest.warns(UserWarning, match="nosuch"), pytest.raises((ValueError, AssertionError), match=r"(?i)nosuch"):
        dist.init_process_group("nosuch", **alone)
    assert not dist.is_initialized()


@pytest.fixture(params=["tcp", "file", "hash", "prefix of tcp", "prefix of file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made: Any = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True),
        "file": lambda: dist.FileStore(f"{tmp_path}/store", 1),
        "hash": dist.HashStore,
    }[request.param.split()[-1]]()
    made.set_timeout(SHORT)
    return dist.PrefixStore("ours", made) if request.param.startswith("prefix") else made


def test_each_method_of_each_store(store: Any) -> None:
    """Those of 1.7 and the newer ones, with the error that each documents."""
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert (store.add("counter", 1), store.add("counter", 6), store.get("counter")) == (1, 7, b"7")
    store.wait(["key", "counter"])
    for call in (
        lambda: store.get("missing"),
        lambda: store.wait(["key", "missing"], timedelta(seconds=0.1)),
    ):
        with pytest.raises(RuntimeError, match=r"(?i)wait"):
            call()
    assert store.num_keys() >= 2
    assert store.delete_key("key") is True
    assert store.check(["counter"])
    assert not store.check(["key"])
    store.append("text", "a")
    store.append("text", "b")
    assert store.get("text") == b"ab"
    assert store.compare_set("new", "", "first") == b"first"
    assert store.compare_set("new", "other", "second") == b"first"
    assert store.compare_set("new", "first", "second") == b"second"
    store.multi_set(["one", "two"], ["1", "2"])
    assert store.multi_get(["one", "two"]) == [b"1", b"2"]
    if "FileStore" not in type(getattr(store, "underlying_store", store)).__name__:
        store.queue_push("queue", "a")
        store.queue_push("queue", "b")
        assert (store.queue_len("queue"), store.queue_pop("queue"), store.queue_pop("queue")) == (2, b"a", b"b")
    else:
        with pytest.raises(NotImplementedError, match="queue"):
            store.queue_push("queue", "a")
    other = store.clone()
    other.set("from a clone", "yes")
    assert store.get("from a clone") == b"yes"
    store.set("text", "abc")
    with pytest.raises((ValueError, RuntimeError)):  # a TCPStore's connection ends with that: last
        store.add("text", 1)


@on_ranks(3)
def test_new_group(rank: int, size: int) -> None:
    """Members, outsiders (rank and size -1, None), subgroups, and what is refused."""
    group = dist.new_group([2, 0], backend="shm")
    if rank == 1:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.get_backend(group)
        ones = torch.ones(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the call of an outsider
            assert dist.all_reduce(ones, group=group, async_op=True) is None
        assert ones.item() == 1
    else:
        assert (dist.get_rank(group), dist.get_world_size(group)) == (rank // 2, 2)
        assert dist.get_process_group_ranks(group) == [0, 2]
        assert (dist.get_group_rank(group, 2), dist.get_global_rank(group, 1)) == (1, 2)
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, 2, group=group)  # the root's global rank
        assert tensor.tolist() == [2.0, 2.0]
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(group)
    one, subgroups = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    assert dist.get_world_size(one) == (1 if rank == 2 else 2)
    assert len(subgroups) == 2
    with pytest.raises(ValueError, match="duplicate"):
        dist.new_group([0, 0])
    with pytest.raises(ValueError, match="Rank 7 is out of range"):
        dist.new_group([0, 7])
    with pytest.raises(ValueError, match="world size should be less"):
        dist.new_group([0, 1, 2, 3])
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    dist.destroy_process_group(one)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_ranks(3)
def test_point_to_point(rank: int, size: int, backend: str) -> None:
    """To and from a rank, from any, with tags in another order, in batches."""
    group = dist.new_group(backend=backend)
    if rank == 0:
        sources = []
        for _ in range(size - 1):
            got = torch.empty(2)
            sources.append(dist.recv(got, group=group))  # from any
            assert got.tolist() == [sources[-1]] * 2
        assert sorted(sources) == list(range(1, size))
        tagged = {tag: torch.empty(1) for tag in (5, 4)}
        works = [dist.irecv(got, 1, group=group, tag=tag) for tag, got in tagged.items()]
        for work in works:
            assert work is not None
            work.wait()
            assert work.is_completed()
        assert {tag: got.item() for tag, got in tagged.items()} == {5: 50.0, 4: 40.0}
        operations = [dist.P2POp(dist.isend, torch.ones(1), 1, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    else:
        dist.send(torch.full((2,), float(rank)), 0, group=group)
        if rank == 1:
            works = [dist.isend(torch.tensor([10.0 * tag]), 0, group=group, tag=tag) for tag in (4, 5)]
            for work in works:
                assert work is not None
                work.wait()
            got = torch.empty(1)
            assert dist.recv(got, 0, group=group) == 0
    with pytest.raises(ValueError, match=r"itself|same"):
        dist.send(torch.ones(1), rank, group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_ranks(2)
def test_collectives_return_nothing_or_a_work(rank: int, size: int, backend: str) -> None:
    """Without async_op None, with it a work: future, wait, is_completed (results: test_shared_memory, examples)."""
    group = dist.new_group(backend=backend)
    root = size - 1
    ones, parts = torch.ones(3), [torch.full((3,), float(i)) for i in range(size)]
    lists = [torch.empty(3) for _ in range(size)]
    calls: dict[str, Callable[[bool], Any]] = {
        "broadcast": lambda later: dist.broadcast(ones, root, group=group, async_op=later),
        "all_reduce": lambda later: dist.all_reduce(ones, group=group, async_op=later),
        "reduce": lambda later: dist.reduce(ones, root, group=group, async_op=later),
        "all_gather": lambda later: dist.all_gather(lists, ones, group=group, async_op=later),
        "gather": lambda later: dist.gather(ones, lists if rank == root else None, root, group=group, async_op=later),
        "scatter": lambda later: dist.scatter(ones, parts if rank == root else None, root, group=group, async_op=later),
        "reduce_scatter": lambda later: dist.reduce_scatter(ones, parts, group=group, async_op=later),
        "all_to_all": lambda later: dist.all_to_all(lists, parts, group=group, async_op=later),
        "barrier": lambda later: dist.barrier(group, async_op=later),
    }
    for name, call in calls.items():
        assert call(False) is None, name
        work = call(True)
        assert work.wait(), name
        if (backend, name) != ("gloo", "reduce_scatter"):  # whose work has no future, and never says that it is done
            assert work.is_completed(), name
            assert work.get_future().then(lambda future: future.done()).wait() is True, name
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        dist.all_reduce([ones], group=group)  # no tensor
    dist.barrier(group)
    dist.destroy_process_group(group)


def _late(rank: int, size: int, backend: str) -> list[str]:
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=0.4))
    told = []
    if rank == 0:
        for call in (
            lambda: dist.all_reduce(torch.ones(1), group=group),
            lambda: dist.all_reduce(torch.ones(1), group=group, async_op=True).wait(),
        ):
            with pytest.raises(RuntimeError) as error:
                call()
            told.append(str(error.value))
    dist.barrier()
    dist.destroy_process_group(group)
    return told


@pytest.mark.parametrize(("backend", "words"), [("gloo", "Timed out|closed|time"), ("shm", "rank 0 waited for rank 1")])
def test_who_waits_alone_is_told_after_the_timeout(ranks: Ranks, backend: str, words: str) -> None:
    """A rank that is alone in a collective raises, in the call or when it waits."""
    told, others = ranks(2, _late, backend)
    assert others == []
    assert len(told) == 2
    assert re.search(words, told[0]), told


def _monitored(rank: int, size: int) -> str:
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    shm = dist.new_group(backend="shm")
    with nullcontext() if torch.__version__ >= "2.14" else pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier(shm, timeout=timedelta(seconds=60))
    shm.monitored_barrier(timedelta(seconds=60))  # its Gloo group has it
    dist.destroy_process_group(shm)
    group = dist.new_group(backend="gloo")
    told = ""
    if rank == 0:
        with pytest.raises(RuntimeError) as error:
            dist.monitored_barrier(group, timeout=SHORT)
        told = str(error.value)
    dist.barrier()
    dist.destroy_process_group(group)
    return told


def test_monitored_barrier(ranks: Ranks) -> None:
    """It names the rank that does not come."""
    assert "Rank 1 failed to pass monitoredBarrier" in ranks(2, _monitored)[0]


@on_ranks(2)
def test_debug_levels(rank: int, size: int) -> None:
    """TORCH_DISTRIBUTED_DEBUG takes three levels; with DETAIL torch itself compares the calls of a group of ours."""
    levels = []
    for name in ("OFF", "INFO", "DETAIL"):
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = name
        dist.set_debug_level_from_env()
        levels.append(dist.get_debug_level().name)
    assert levels == ["OFF", "INFO", "DETAIL"]
    try:
        group = dist.new_group(backend="shm")
    finally:
        del os.environ["TORCH_DISTRIBUTED_DEBUG"]
        dist.set_debug_level(dist.DebugLevel.OFF)
    dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(1 + rank), group=group)
    dist.destroy_process_group(group)
    told = str(error.value)
    assert "CollectiveFingerPrint" in told


def _interfaces(rank: int, size: int, folder: str) -> None:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        with outside(rank, size, folder):
            for number, name in enumerate(("lo", "lo,lo")):  # several are used in turn
                os.environ["GLOO_SOCKET_IFNAME"] = name
                store = dist.FileStore(f"{folder}/{number}", size)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
                ones = torch.ones(1)
                for _ in range(3):
                    dist.all_reduce(ones)
                assert ones.item() == size**3
                dist.destroy_process_group()
            os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
            store = dist.FileStore(f"{folder}/nowhere", size)
            with pytest.raises(RuntimeError, match="nowhere0"):
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            os.environ.pop("GLOO_SOCKET_IFNAME")
    finally:
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has another name")
def test_interfaces(ranks: Ranks, tmp_path: Path) -> None:
    """GLOO_SOCKET_IFNAME: one, several in turn, and one that is not there, which is named."""
    ranks(2, _interfaces, str(tmp_path))


class _Counting(dist.ProcessGroup):
    """A third party's backend: it counts, and lets Gloo do the rest."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.gloo, self.count = gloo, 0

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        self.count += 1
        return self.gloo.allreduce(tensors, options)

    def getBackendName(self) -> str:
        return "counting"


def _third_party(rank: int, size: int, folder: str) -> int:
    from torch._C._distributed_c10d import ProcessGroupGloo

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return _Counting(ProcessGroupGloo(store, rank, size, timeout), rank, size)

    dist.Backend.register_backend("counting", create, devices=["cpu"])
    assert dist.Backend("COUNTING") == "counting"
    with outside(rank, size, folder):
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("counting", store=store, rank=rank, world_size=size)
        assert dist.get_backend() == "counting"
        ones = torch.ones(1)
        group: Any = dist.group.WORLD
        group.allreduce([ones], dist.AllreduceOptions()).wait()
        assert ones.item() == size
        return int(group.count)


def test_a_third_partys_backend(ranks: Ranks, tmp_path: Path) -> None:
    """Registered by its name, a subclass of ProcessGroup answers; "shm" and "round_robin" are made known like that."""
    assert ranks(2, _third_party, str(tmp_path)) == [1, 1]
