"""Every collective of every group is recorded, whoever starts it, and changes nothing."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ddp_lab
from ddp_lab import recording
from ddp_lab.parallel.monitoring import group_collectives
from tests.ranks.conftest import Ranks
from tests.ranks.observing import timeline_of

_THIS = __file__


def _recorded(action: Callable[[], Any]) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The events and descriptions that `action` caused; those of its groups even if they were described before."""
    group_collectives.record()
    start = recording.statistics().recorded
    action()
    dist.barrier()
    events, dropped, _ = recording.drain(start)
    assert dropped == 0
    return events, [one for one in recording.descriptions(0)[0] if one["type"] in ("group", "call")]


# ---- plain calls ----------------------------------------------------------------------------------------


def _plain(rank: int, size: int, backend: str) -> Any:
    import ddp_lab.comm  # noqa: F401 - registers shm

    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    groups = [dist.new_group([first, first + 1], backend=backend, group_desc=f"pair {first}") for first in (0, 2)]
    group = groups[rank // 2]

    def calls() -> None:
        ones, parts = torch.ones(8), torch.empty(16)
        dist.all_reduce(ones, op=dist.ReduceOp.MAX, group=group)
        dist.all_gather_into_tensor(parts, ones, group=group)
        dist.broadcast(ones, group_src=0, group=group)
        dist.all_reduce(torch.ones(3, dtype=torch.float64), async_op=True).wait()
        if rank == pair[0]:
            dist.send(ones, pair[1], group=group)
        else:
            dist.recv(ones, pair[0], group=group)
        dist.barrier(group)

    return _recorded(calls)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_plain_calls_of_two_groups(recording_ranks: Ranks, backend: str) -> None:
    """Each has its group, operation, bytes, dtype, reduction and line; its number is equal on its ranks; all end."""
    timeline = timeline_of(recording_ranks(4, _plain, backend))
    frame = timeline.collectives()
    titles = {one.group: one.title for one in timeline.groups()}
    pairs = frame[[titles[group].startswith("pair") for group in frame["group"]]]
    for rank in range(4):
        mine = pairs[pairs["rank"] == rank]
        other = "send" if rank % 2 == 0 else "recv"
        assert mine["operation"].tolist() == ["all_reduce", "all_gather", "broadcast", other, "barrier"]
        assert mine["bytes"].tolist()[:4] == [32, 64, 32, 32]
        assert mine["reduction"].tolist()[0] == "max"
        assert mine["peer"].tolist()[3] == rank ^ 1
        assert {titles[group] for group in mine["group"]} == {f"pair {rank // 2 * 2}"}
    assert (frame["state"] == "complete").all(), frame[frame["state"] != "complete"]
    assert all(place.startswith(f"{_THIS}:") for place in frame["place"])
    assert (frame["last_rank"] >= 0).all()
    assert (frame["ended_ns"] >= frame["entered_ns"]).all()
    (world,) = set(frame[frame["dtype"] == "float64"]["group"])
    assert titles[world] == "default group"


# ---- what others start ----------------------------------------------------------------------------------


def _functional(rank: int, size: int) -> Any:
    def calls() -> None:
        summed = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        assert summed.tolist() == [size] * 4

    return _recorded(calls)


def _compiled(rank: int, size: int) -> Any:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def region(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    def calls() -> None:
        assert region(torch.ones(4)).tolist() == [2 * size + 1] * 4

    return _recorded(calls)


@pytest.mark.parametrize("program", [_functional, _compiled])
def test_functional_collectives_and_compiled_regions(recording_ranks: Ranks, program: Any) -> None:
    """Collectives that no Python function of `torch.distributed` starts are recorded, too."""
    frame = timeline_of(recording_ranks(4, program)).collectives()
    found = frame[frame["operation"] == "all_reduce"]
    assert sorted(found["rank"]) == [0, 1, 2, 3]
    assert (found["bytes"] == 16).all()
    assert (found["state"] == "complete").all()
    assert all(_THIS in place for place in found["place"])


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def _fully_shard(rank: int, size: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def train() -> list[bytes]:
        net = _net()
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            torch.manual_seed(10 * step + rank)
            net(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.to_local().detach().numpy().tobytes() for one in net.parameters()]

    return _with_and_without(train)


def _with_and_without(train: Callable[[], list[bytes]]) -> Any:
    """Whether the parameters are equal with and without recording, and what was recorded."""
    with recording.suspended():
        without = train()
    recorded: list[list[bytes]] = []
    found = _recorded(lambda: recorded.append(train()))
    return recorded == [without], found


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_fully_shard(recording_ranks: Ranks, shape: tuple[int, ...]) -> None:
    """Collectives have the name of the module and of the mesh dimension; parameters are bit for bit the same."""
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    answers = recording_ranks(4, _fully_shard, shape, names)
    assert [equal for equal, _ in answers] == [True] * 4
    timeline = timeline_of([found for _, found in answers])
    frame = timeline.collectives()
    titles = {one.group: one.title for one in timeline.groups()}
    gathers = frame[frame["operation"] == "all_gather"]
    assert set(gathers["module"]) == {"0", "2"}
    expected = "default group" if len(shape) == 1 else "mesh shard"  # torch takes the whole group for one dimension
    assert {titles[group] for group in gathers["group"]} == {expected}
    scatters = frame[frame["operation"] == "reduce_scatter"]
    assert set(scatters["module"]) == {"0", "2"}
    if len(shape) == 2:
        reduces = frame[(frame["operation"] == "all_reduce") & (frame["module"] != "")]
        assert {titles[group] for group in reduces["group"]} == {"mesh replicate"}
    assert (frame["state"] == "complete").all(), frame[frame["state"] != "complete"]


def _models(rank: int, size: int) -> Any:
    def train() -> list[bytes]:
        kinds = (ddp_lab.DistributedDataParallel, nn.parallel.DistributedDataParallel)
        model, torchs = (kind(copy.deepcopy(_net()), bucket_cap_mb=0.0005) for kind in kinds)
        ddp_lab.observe(torchs)
        for _ in range(3):
            torch.manual_seed(rank)
            batch = torch.randn(4, 8)
            model(batch).sum().backward()
            torchs(batch).sum().backward()
        return [one.grad.numpy().tobytes() for one in (*model.parameters(), *torchs.parameters())]

    return _with_and_without(train)


def test_buckets_of_models(recording_ranks: Ranks) -> None:
    """The all-reduces of our reducer and of torch's say for which bucket of which model they are."""
    answers = recording_ranks(4, _models)
    assert [equal for equal, _ in answers] == [True] * 4
    frame = timeline_of([found for _, found in answers]).collectives()
    of_models = frame[frame["reducer"] >= 0]
    assert len(set(of_models["reducer"])) == 2
    for _, mine in of_models.groupby("reducer"):
        assert set(mine["bucket"]) >= {0, 1}
    assert set(of_models["operation"]) == {"all_reduce"}
    assert set(of_models["function"]) == {"train"}


def _many_places(rank: int, size: int) -> Any:
    alone = [dist.new_group([other]) for other in range(size)][rank]

    def calls() -> None:
        names = {"dist": dist, "ones": torch.ones(1), "alone": alone}
        for number in range(0 if rank else 4_200):  # as cells that are run again and again: new code each time
            text = "dist.barrier(alone)" if number % 2 else "dist.all_reduce(ones, group=alone)"
            exec(compile(text, f"made_{number}.py", "exec"), names)

    return _recorded(calls)


def test_more_places_than_are_kept(recording_ranks: Ranks) -> None:
    """What is called from yet another place has no place, but its operation still."""
    frame = timeline_of(recording_ranks(4, _many_places)).collectives()
    newest = frame[frame["rank"] == 0].iloc[-41:-1]  # the last one is of `_recorded`
    assert set(newest["operation"]) == {"all_reduce", "barrier"}
    assert set(newest["place"]) == {""}
    assert "made_0.py:1" in set(frame["place"])


_TWO_NEW_GROUPS = """
import threading
import torch.distributed as dist
from ddp_lab import native

class Group(dist.ProcessGroup):
    other = None

    def getBackendName(self):
        if self.other is not None:  # another thread asks for another group meanwhile
            asking = threading.Thread(target=number, args=(self.other,), daemon=True)
            asking.start()
            asking.join()
        return "python"

number = native.load().index_of_group
first, second = Group(0, 1), Group(0, 1)
first.other = second
assert number(first) != number(second)
print("both have numbers")
"""


def test_groups_in_python_do_not_wait_for_each_other() -> None:
    """What a group says of itself is its own code, during which other threads get their groups' numbers."""
    done = subprocess.run([sys.executable, "-c", _TWO_NEW_GROUPS], capture_output=True, text=True, check=False)
    assert "both have numbers" in done.stdout, done.stderr[-2000:]
