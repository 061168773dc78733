"""The backend "shm" against Gloo, operation by operation, and what it does when ranks disagree, die or give up."""

from __future__ import annotations

import os
import random
import resource
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddp_lab.comm
from ddp_lab import documentation
from ddp_lab.errors import FallbackWarning
from tests.ranks.comm.against_gloo import COLLECTIVES, call
from tests.ranks.compare import everywhere
from tests.ranks.conftest import Ranks
from tests.ranks.harness import on_ranks

NOT_GLOOS = (torch.int16, torch.bool, torch.complex64, torch.complex128, torch.float8_e5m2, torch.uint16)
SEEDS = range(3)
CALLS = 40


def _group(**options: Any) -> Any:
    ddp_lab.comm.register()
    group = dist.new_group(backend="shm", **options)
    assert dist.get_backend(group) == "shm"
    return group


@on_ranks(2)
def test_the_gloo_within_runs_one_collective_at_a_time(rank: int, size: int) -> None:
    """See [Note: threads of Gloo]: torch's own group has two threads, and with those a sparse sum can crash."""

    def started(backend: str) -> int:
        before = len(os.listdir("/proc/self/task"))
        group = dist.new_group(backend=backend)
        dist.barrier(group)
        made = len(os.listdir("/proc/self/task")) - before
        dist.destroy_process_group(group)
        return made

    ddp_lab.comm.register()
    assert started("gloo") == started("shm") + 1


@on_ranks(2)
def test_tensors_that_share_memory_are_reduced_once(rank: int, size: int) -> None:
    """A tensor that is in a coalesced list twice, as that of tied parameters is, and views that overlap: as on Gloo."""
    for group in (_group(), dist.new_group(backend="gloo")):
        tied, overlapping = torch.ones(3), torch.ones(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_reduce_coalesced([tied, torch.ones(1), tied], group=group)
            dist.all_reduce_coalesced([overlapping[:3], overlapping[1:]], group=group)
        assert (tied.tolist(), overlapping.tolist()) == ([2.0] * 3, [2.0] * 4), dist.get_backend(group)


@on_ranks(2)
def test_a_backend_is_freed_with_an_operation_in_flight(rank: int, size: int) -> None:
    """By the thread that has the GIL, which the operation's thread needs to let go of its tensors: neither waits."""
    group = _group()
    backend = group._get_backend(torch.device("cpu"))  # as libraries do, for its options
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=group, async_op=True)  # rank 1 never comes
    dist.destroy_process_group(group)
    del group, backend


def _random_calls(rank: int, size: int, seed: int, calls: int) -> int:
    """The same random calls on both backends; returns how many."""
    shm, gloo = _group(), dist.new_group(backend="gloo")
    draw = random.Random(seed)
    for number in range(calls):
        name = draw.choice(list(COLLECTIVES))
        later = draw.random() < 0.5
        state = draw.getstate()
        call(name, draw, shm, gloo, later=later, what=f"seed {seed}, call {number}: {name}")
        draw.setstate(state)
        draw.random()
        if draw.random() < 0.1:
            time.sleep(draw.random() * 0.01 * (rank + 1))
    dist.destroy_process_group(shm)
    dist.destroy_process_group(gloo)
    return calls


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_give_what_gloo_gives(ranks: Ranks, size: int, seed: int) -> None:
    """Operations, dtypes, sizes, roots, waiting or not, ranks that come late."""
    assert ranks(size, _random_calls, seed, CALLS) == [CALLS] * size


@on_ranks(3)
def test_other_forms(rank: int, size: int) -> None:
    """One tensor for all ranks, averages, bool and bits, transposed tensors, lists, objects, send, several at once."""
    group = _group()
    whole = torch.arange(size * 1_000, dtype=torch.float32).reshape(size, 1_000) + rank
    part = torch.empty(1_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames both
        dist.reduce_scatter_tensor(part, whole, group=group)
        assert torch.equal(part, size * torch.arange(rank * 1_000, (rank + 1) * 1_000) + sum(range(size)))
        joined = torch.empty(size * 1_000)
        dist.all_gather_into_tensor(joined, part, group=group)
    assert torch.equal(joined, size * torch.arange(size * 1_000.0) + sum(range(size)))
    mean = torch.full((5,), float(rank))
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    assert torch.equal(mean, torch.full((5,), (size - 1) / 2))
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, group=group)
    assert flags.tolist() == [True, True, False]
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BXOR, group=group)
    assert bits.item() == (1 << size) - 1
    for dtype in NOT_GLOOS:
        mine = torch.full((70_001,), rank == size - 1, dtype=torch.float32).to(dtype)
        dist.broadcast(mine, size - 1, group=group)
        assert bool((mine.to(torch.complex64) == 1).all()), dtype
    for dtype in (torch.int16, torch.complex64, torch.complex128):
        mine = torch.full((70_001,), rank + 1).to(dtype)
        dist.all_reduce(mine, group=group)
        assert bool((mine == size * (size + 1) // 2).all()), dtype
    turned = torch.full((3, 4), float(rank)).t()  # dense, in another order
    dist.all_reduce(turned, group=group)
    assert turned.sum().item() == 12 * sum(range(size))
    sent = [torch.full((rank + 1, 2), float(10 * rank + other)) for other in range(size)]
    got = [torch.empty(other + 1, 2) for other in range(size)]
    dist.all_to_all(got, sent, group=group)
    assert [one.unique().tolist() for one in got] == [[10.0 * other + rank] for other in range(size)]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=group)
    assert [one["rank"] for one in objects] == list(range(size))
    if rank == 0:
        dist.send(torch.tensor([7.0]), 1, group=group, tag=3)
    elif rank == 1:
        got_one = torch.empty(1)
        dist.recv(got_one, 0, group=group, tag=3)
        assert got_one.item() == 7.0
    works = [dist.all_reduce(torch.full((100_000,), float(i)), group=group, async_op=True) for i in range(8)]
    futures = [work.get_future() for work in works]
    assert [future.wait()[0][0].item() for future in futures] == [float(size * i) for i in range(8)]
    for work in works:
        work.wait()
    assert [work.is_completed() for work in works] == [True] * 8
    dist.destroy_process_group(group)


@on_ranks(2)
def test_a_callback_may_wait_for_what_is_queued(rank: int, size: int) -> None:
    """The thread that runs it executes that first."""
    group = _group()
    if rank != 0:
        dist.barrier()  # rank 0 has chained its callback before the first work can end
    first, second = (dist.all_reduce(torch.full((3,), number), group=group, async_op=True) for number in (1.0, 2.0))

    def chained(future: Any) -> torch.Tensor:
        second.wait()
        return future.value()[0] + second.result()[0]

    found = first.get_future().then(chained)
    if rank == 0:
        dist.barrier()
    value = found.wait()[0].item()
    dist.destroy_process_group(group)
    assert value == 6.0


@on_ranks(4)
def test_results_are_the_same_bits_on_all_ranks_and_each_time(rank: int, size: int) -> None:
    """Floating sums are made in one order."""
    group = _group()
    found = []
    for count in (10, 5_000, 300_001):
        values = torch.randn(count, generator=torch.Generator().manual_seed(rank))
        for _ in range(3):
            mine = values.clone()
            dist.all_reduce(mine, group=group)
            found.append(mine.numpy().tobytes())
    dist.destroy_process_group(group)
    assert len(set(found)) == 3
    assert everywhere(found) == [found] * size


def _raised(call: Callable[[], Any]) -> str:
    with pytest.raises(dist.DistBackendError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("operation", ("all_reduce #2 of 40 B of Float (SUM)", "broadcast #2 of 40 B of Float from rank 0")),
        ("size", ("of 40 B", "of 44 B")),
        ("dtype", ("of 40 B of Float", "of 80 B of Double")),
        ("root", ("from rank 0", "from rank 1")),
        ("splits", ("sends 8 B to rank 0", "expects 4 B")),
    ],
)
@on_ranks(3)
def test_a_disagreement_is_told_on_all_ranks(rank: int, size: int, kind: str, words: tuple[str, str]) -> None:
    """With both sides; the group is unusable afterwards and says so."""
    group = _group()
    ones = torch.ones(10)
    dist.all_reduce(ones, group=group)
    calls: dict[str, Callable[[], Any]] = {
        "operation": lambda: dist.broadcast(ones, 0, group=group) if rank else dist.all_reduce(ones, group=group),
        "size": lambda: dist.all_reduce(torch.ones(10 + (rank == 1)), group=group),
        "dtype": lambda: dist.all_reduce(ones.double() if rank == 1 else ones, group=group),
        "root": lambda: dist.broadcast(ones, int(rank == 1), group=group),
        "splits": lambda: dist.all_to_all_single(
            torch.empty(size), torch.ones(size + rank), [1] * size, [1 + rank, *[1] * (size - 1)], group=group
        ),
    }
    text = _raised(calls[kind])
    later = _raised(lambda: dist.barrier(group))
    dist.destroy_process_group(group)
    assert all(word in text for word in words), text
    assert all(word in later for word in words), later


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "timeout",
            "Timed out waiting 300ms: rank 1 waited for rank 2 in broadcast #1 of 4 B of Float from rank 1",
        ),
        ("abort", "rank 1 aborted the group"),
    ],
)
@on_ranks(3)
def test_who_gives_up_frees_the_others(rank: int, size: int, how: str, words: str) -> None:
    """A timeout or an abort ends the wait, and what the others call later, with the reason. It names ranks as the
    program does, not by their places in the group."""
    ddp_lab.comm.register()
    seconds = 0.3 if how == "timeout" else 60
    group: Any = dist.new_group([1, 2], backend="shm", timeout=timedelta(seconds=seconds))
    if rank != 1:
        dist.barrier()  # rank 1 is there once it has given up
    elif how == "abort":
        threading.Timer(0.2, group._get_backend(torch.device("cpu")).abort).start()
    text = _raised(lambda: dist.broadcast(torch.ones(1), 1, group=group)) if rank else words
    if rank == 1:
        dist.barrier()
    if rank:
        dist.destroy_process_group(group)
    assert words in text


@on_ranks(2)
def test_ranks_of_several_hosts_go_through_gloo(rank: int, size: int) -> None:
    """And rank 0 says why."""
    os.environ["DDP_LAB_HOST_ID"] = f"host {rank}"
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            group = _group()
    finally:
        del os.environ["DDP_LAB_HOST_ID"]
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    name = group._get_backend(torch.device("cpu")).name()
    dist.destroy_process_group(group)
    assert (name, ones[0].item()) == ("gloo", 2.0)
    why = "shm: ranks 0 and 1 are on different hosts; this group's collectives use Gloo"
    assert [str(one.message) for one in told if "shm" in str(one.message)] == (
        [] if rank else [f"{why}\n{documentation.more('shm-falls-back')}"]
    )


@on_ranks(2)
def test_mistakes_are_told_before_anything_is_sent(rank: int, size: int) -> None:
    """They raise RuntimeError on the rank that makes them, as Gloo does, and the group goes on."""
    group = _group()
    with pytest.raises(RuntimeError, match="Tensors must be contiguous"):
        dist.all_reduce(torch.ones(4, 4)[:, ::2], group=group)
    with pytest.raises(RuntimeError, match="BAND"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group=group)
    with pytest.raises(RuntimeError, match="AVG"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG, group=group)
    backend = group._get_backend(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"5 elements can't be divided among 2 ranks"):
        backend._reduce_scatter_base(torch.ones(2), torch.ones(5), dist.ReduceScatterOptions())
    with pytest.raises(RuntimeError, match="Tensors must be contiguous"):
        dist.all_gather_into_tensor(torch.ones(4, 2).t(), torch.ones(4), group=group)
    with pytest.raises(RuntimeError, match="requires non-empty tensor list"):
        backend.allreduce_coalesced([])
    ones = torch.ones(2)
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [size, size]
    dist.destroy_process_group(group)


@pytest.mark.parametrize("limited", [0, None])
@on_ranks(3)
def test_a_rank_that_can_make_no_memory(rank: int, size: int, limited: int | None) -> None:
    """If rank 0 can make none, with a name or without, the group's collectives use Gloo, and it says why; the next
    group has its memory."""
    ddp_lab.comm.register()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", FallbackWarning)
            group = dist.new_group(backend="shm")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    backend = group._get_backend(ones.device).name()  # type: ignore[attr-defined]
    assert (backend, ones.tolist()) == ("shm" if limited is None else "gloo", [3.0] * 3)
    if rank != limited:
        assert told == []
        return
    [said] = [str(one.message) for one in told]
    assert said.startswith("shm: rank 0 can't open named shared memory: ")
    assert "File too large" in said
    assert said.endswith(f"; this group's collectives use Gloo\n{documentation.more('shm-falls-back')}")
