"""Several groups as one: which group each call goes to, results, training, and mistakes."""

from __future__ import annotations

import copy
import gc
import random
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddp_lab
from ddp_lab.comm import round_robin_process_group
from tests.ranks.comm.against_gloo import COLLECTIVES, call
from tests.ranks.harness import on_ranks

CPU = torch.device("cpu")


def _groups(count: int, backend: str = "gloo", **options: Any) -> list[Any]:
    return [dist.new_group(backend=backend, **options) for _ in range(count)]


def _entered(groups: list[Any]) -> list[int]:
    """How many collectives each of them was given."""
    return [group._get_backend(CPU)._get_sequence_number_for_group() for group in groups]


def _destroy(*groups: Any) -> None:
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (3, "shm")])
@on_ranks()
def test_collectives_go_to_the_groups_in_turn(rank: int, size: int, backend: str) -> None:
    """The first collective goes to the first group, and so on; works are the groups'; sending takes no turn."""
    groups = _groups(3, backend)
    group = round_robin_process_group(groups)
    assert dist.get_backend(group) == "round_robin"
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, size)
    before = _entered(groups)
    sums = []
    for turn in range(7):
        work = dist.all_reduce(torch.full((3,), float(turn)), group=group, async_op=True)
        sums.append(work.get_future().wait()[0][0].item())
        work.wait()
        assert work.is_completed()
    assert sums == [float(size * turn) for turn in range(7)]
    assert [now - then for now, then in zip(_entered(groups), before, strict=True)] == [3, 2, 2]
    assert group._get_backend(CPU)._get_sequence_number_for_group() == 7
    if rank < 2:  # no turns are taken, or ranks 0 and 1 would part from the others
        other, got = 1 - rank, torch.empty(1)
        works = [dist.isend(torch.tensor([float(rank + 10 * tag)]), other, group=group, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            dist.recv(got, other, group=group, tag=tag)
            assert got.item() == other + 10 * tag
        for work in works:
            work.wait()
        work = dist.isend(torch.ones(1), other, group=group)
        assert dist.recv(got, None, group=group) == other
        work.wait()
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == size
    _destroy(group)
    for one in groups:  # still of use
        dist.all_reduce(total, group=one)
    _destroy(*groups)


@pytest.mark.parametrize(("size", "backend"), [(2, "shm"), (3, "gloo")])
@on_ranks()
def test_every_collective_gives_what_one_group_gives(rank: int, size: int, backend: str) -> None:
    """Waited for or not, lists and single tensors, coalesced, objects."""
    groups, gloo = _groups(2, backend), dist.new_group(backend="gloo")
    group = round_robin_process_group(groups)
    total = float(sum(range(size)))
    for turn in range(2):  # once in each group
        for later in (False, True):
            for name in COLLECTIVES:
                call(name, random.Random(f"{name} {turn}"), group, gloo, later=later, what=name)
            tensors = [torch.full((2,), float(rank)), torch.ones(2)]
            work = dist.all_reduce_coalesced(tensors, group=group, async_op=later)
            if work is not None:
                work.wait()
            assert torch.cat(tensors).tolist() == [total, total, size, size]
            lists = [torch.empty(1) for _ in range(size)]
            work = dist.all_to_all(lists, [torch.tensor([10.0 * rank + to]) for to in range(size)], group, later)
            if work is not None:
                work.wait()
            assert torch.cat(lists).tolist() == [10.0 * other + rank for other in range(size)]
            gathered, part = torch.empty(size), torch.empty(1)
            group._allgather_base(gathered, torch.tensor([float(rank)])).wait()
            group._reduce_scatter_base(part, torch.arange(size) + 1.0).wait()
            assert (gathered.tolist(), part.item()) == ([float(other) for other in range(size)], size * (rank + 1.0))
        dist.barrier(group)  # counts as one collective: with it the next round begins with the other group
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank, group=group)
    assert objects == list(range(size))
    _destroy(group, gloo, *groups)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_ranks(2)
def test_a_barrier_ends_what_was_given_to_any_group_before(rank: int, size: int, backend: str) -> None:
    """It is one on all groups; its future, too."""
    groups = _groups(3, backend)
    group = round_robin_process_group(groups)
    tensors = [torch.ones(2_000_000) for _ in range(6)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    work = dist.barrier(group, async_op=True)
    work.get_future().wait()
    work.wait()
    assert work.is_completed()
    done = [one.is_completed() for one in works]
    for one in works:
        one.wait()
    _destroy(group, *groups)
    assert done == [True] * 6


def _train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_ranks(2)
def test_models_train_as_with_one_group(rank: int, size: int, backend: str) -> None:
    """torch's DDP and ours, with one and three groups: the same bits, buckets spread evenly over the groups."""
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))
    expected = _train(TorchDDP(copy.deepcopy(net)), rank)
    for count in (1, 3):
        for kind in (TorchDDP, ddp_lab.DistributedDataParallel):
            groups = _groups(count, backend)
            group = round_robin_process_group(groups)
            # Caps in MiB: five to six buckets.
            model = kind(copy.deepcopy(net), process_group=group, bucket_cap_mb=0.001)
            before = _entered(groups)
            found = _train(model, rank)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
            given = [now - then for now, then in zip(_entered(groups), before, strict=True)]
            assert min(given) >= 4 * 5 // count
            assert max(given) - min(given) <= 1
            del model
            gc.collect()
            _destroy(group, *groups)


@on_ranks(3)
def test_groups_of_some_ranks(rank: int, size: int) -> None:
    """Only the members call it; others are told so."""
    groups = [dist.new_group([0, 2], backend="gloo") for _ in range(2)]
    ones = torch.ones(1)
    if rank == 1:
        with pytest.raises(ValueError, match=r"groups\[0\]: this process \(rank 1\) is not a member"):
            round_robin_process_group(groups)
    else:
        group, other = round_robin_process_group(groups), round_robin_process_group(groups[::-1])
        assert group.group_name != other.group_name
        for _ in range(3):
            dist.all_reduce(ones, group=group)
        assert ones.item() == 8
        _destroy(group, other, *groups)
    # Names of later groups still agree on all ranks.
    later, total = dist.new_group(backend="gloo"), torch.ones(1)
    dist.all_reduce(total, group=later)
    _destroy(later)
    assert total.item() == size


@on_ranks(2)
def test_mistakes_name_the_group(rank: int, size: int) -> None:
    """No groups, one twice, other ranks, destroyed, no group at all, made by its name."""
    first, second = _groups(2)
    alone = [dist.new_group([one]) for one in range(size)][rank]
    gone = dist.new_group()
    dist.destroy_process_group(gone)
    for wrong, words in (
        ([], "at least one group"),
        ([first, second, first], r"groups\[2\] is the same as groups\[0\]"),
        ([first, alone], rf"groups\[1\] has ranks \[{rank}\], groups\[0\] has ranks \[0, 1\]"),
        ([first, gone], r"groups\[1\] has been destroyed"),
    ):
        with pytest.raises(ValueError, match=words):
            round_robin_process_group(wrong)
    with pytest.raises(TypeError, match=r"groups\[1\] is not a process group but None"):
        round_robin_process_group([first, None])
    with pytest.raises(ValueError, match="round_robin_process_group"):
        dist.new_group(backend="round_robin", use_local_synchronization=True)
    _destroy(first, second, alone)


@pytest.mark.parametrize(("how", "words"), [("timeout", "Timed out waiting 300ms"), ("abort", "aborted the group")])
@on_ranks(2)
def test_timeouts_and_aborts_reach_all_groups(rank: int, size: int, how: str, words: str) -> None:
    """What is set on the one holds for each of its groups."""
    groups = _groups(2, "shm", timeout=timedelta(seconds=60))
    group = round_robin_process_group(groups)
    backend = group._get_backend(CPU)
    if how == "timeout":
        backend.set_timeout(timedelta(seconds=0.3))
    elif rank == 0:
        threading.Timer(0.2, backend.abort).start()
    dist.all_reduce(torch.ones(1), group=group)  # the next one is for the second group
    if rank == 1:
        dist.barrier()  # rank 0 is there once it has given up
    with pytest.raises(dist.DistBackendError) as error:
        dist.all_reduce(torch.ones(1), group=group)
    if rank == 0:
        dist.barrier()
    _destroy(group, *groups)
    text = str(error.value)
    assert words in text


@on_ranks(2)
def test_torchs_debug_mode_checks_the_groups(rank: int, size: int) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL a mismatch in any group is told on both ranks."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        groups = _groups(2)
        group = round_robin_process_group(groups)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(1 + rank), group=group)
    _destroy(group, *groups)
    text = str(error.value)
    assert "CollectiveFingerPrint" in text
