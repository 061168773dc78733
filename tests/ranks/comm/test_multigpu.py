"""The multi-GPU collectives of torch 1.7, over several CPU tensors of each process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_lab.comm import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
    reduce_scatter_multigpu,
)
from tests.ranks.harness import on_ranks


def _finish(work: Any, later: bool, future: bool = True) -> None:
    """Waits for a work: for its future, if it has one, and in the other ways, too."""
    if not later:
        assert work is None
        return
    if future:
        work.get_future().wait()
        assert work.is_completed()
    assert work.wait()


@pytest.mark.parametrize(("size", "backend", "devices"), [(2, "gloo", 3), (3, "shm", 2), (2, "shm", 1)])
@on_ranks()
def test_each_collective(rank: int, size: int, backend: str, devices: int) -> None:
    """Waited for or not: what arrives on which device of which rank."""
    group = dist.new_group(backend=backend)
    numbers = [float(devices * rank + device) for device in range(devices)]  # of this process's devices
    everyone = [float(number) for number in range(devices * size)]

    def tensors() -> list[torch.Tensor]:
        return [torch.full((2, 3), number) for number in numbers]

    def values(found: list[torch.Tensor]) -> list[float]:
        assert all(bool((one == one.flatten()[0]).all()) for one in found)
        return [one.flatten()[0].item() for one in found]

    for later in (False, True):
        found = tensors()
        _finish(broadcast_multigpu(found, size - 1, group, later, src_tensor=devices - 1), later)
        assert values(found) == [everyone[-1]] * devices

        found = tensors()
        found[0] = torch.full((3, 2), numbers[0]).t()  # not contiguous
        _finish(all_reduce_multigpu(found, group=group, async_op=later), later)
        assert values(found) == [sum(everyone)] * devices

        found = tensors()
        _finish(reduce_multigpu(found, 1, dist.ReduceOp.MAX, group, later, dst_tensor=devices - 1), later)
        expected = numbers if rank != 1 else [*numbers[:-1], everyone[-1]]
        assert values(found) == expected

        lists = [[torch.empty(2, 3) for _ in everyone] for _ in range(devices)]
        _finish(all_gather_multigpu(lists, tensors(), group, later), later)
        assert [values(one) for one in lists] == [everyone] * devices

        found = tensors()
        given = [[torch.full((2, 3), 100 * slot + number) for slot in range(devices * size)] for number in numbers]
        _finish(reduce_scatter_multigpu(found, given, group=group, async_op=later), later, backend != "gloo")
        assert values(found) == [100 * devices * size * number + sum(everyone) for number in numbers]
    dist.destroy_process_group(group)


@on_ranks(2)
def test_each_reduction(rank: int, size: int) -> None:
    """Over 0 and 2 on rank 0, and 3 and 3 on rank 1."""
    expected = {"SUM": 8, "PRODUCT": 0, "MIN": 0, "MAX": 3, "BAND": 0, "BOR": 3, "BXOR": 2}
    for name, value in expected.items():
        tensors = [torch.tensor([3 * rank]), torch.tensor([2 + rank])]
        all_reduce_multigpu(tensors, getattr(dist.ReduceOp, name))
        assert [int(one) for one in tensors] == [value] * 2, name


@on_ranks(2)
def test_mistakes_and_outsiders(rank: int, size: int) -> None:
    """They are told before anything is sent; other processes get None; what fails between processes is raised."""
    ones = [torch.ones(2), torch.ones(2)]
    for call, words in (
        (lambda: all_reduce_multigpu([]), "tensor_list must be a list of at least one tensor"),
        (lambda: all_reduce_multigpu(torch.ones(2)), "tensor_list must be a list"),
        (lambda: all_reduce_multigpu([torch.ones(2), torch.ones(3)]), r"tensor_list\[1\] has shape \(3,\)"),
        (lambda: all_reduce_multigpu([torch.ones(2), torch.ones(2).double()]), r"tensor_list\[1\] .*float64"),
        (lambda: all_reduce_multigpu(ones, dist.ReduceOp.AVG), "AVG is not supported: choose one of SUM"),
        (lambda: broadcast_multigpu(ones, 0, src_tensor=2), "src_tensor is 2, but tensor_list has 2"),
        (lambda: reduce_multigpu(ones, 0, dst_tensor=-1), "dst_tensor is -1"),
        (lambda: all_gather_multigpu([ones], ones), "output_tensor_lists has 1 lists"),
        (
            lambda: all_gather_multigpu([ones, ones], ones),
            r"output_tensor_lists\[0\] has 2 tensors, but needs 2 for each of 2",
        ),
        (lambda: reduce_scatter_multigpu(ones, [ones, ones]), r"input_tensor_lists\[0\] has 2 tensors"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    some = dist.new_group([0])
    work = all_reduce_multigpu(ones, group=some, async_op=True)
    assert (work is None) == (rank == 1)
    if work is not None:
        work.wait()
    assert ones[0].tolist() == ([2.0, 2.0] if rank == 0 else [1.0, 1.0])
    group = dist.new_group(backend="shm")
    work = all_reduce_multigpu([torch.ones(2 + rank)], group=group, async_op=True)
    assert work is not None
    with pytest.raises(dist.DistBackendError, match="8 B"):
        work.wait()
    assert work.is_completed()
    dist.destroy_process_group(group)
