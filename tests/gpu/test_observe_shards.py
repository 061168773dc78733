"""On a CUDA device with NCCL: `fully_shard` and `replicate`, observed; waits are those of the stream that computes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_lab
from ddp_lab import recording
from ddp_lab.dashboard.views.parameter_groups import parameter_groups_scene
from ddp_lab.timeline.timeline import Timeline
from tests.gpu.ranks import NEEDS_NCCL, on_ranks
from tests.ranks.monitoring.test_parameter_groups import Recorded, recorded, rows_of

pytestmark = NEEDS_NCCL

STEPS, WIDTH, BLOCKS = 20, 256, 3
GATHERS = ("forward_unshard", "backward_unshard")


class Block(nn.Module):
    """A layer whose forward or backward may take the device, or the host, some ms longer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.delay: tuple[str, str, float] = ("", "", 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase, where, ms = self.delay
        if phase == "forward":
            pause(where, ms)
        return torch.tanh(self.linear(_PauseInBackward.apply(x, where, ms) if phase == "backward" else x))


class _PauseInBackward(torch.autograd.Function):
    """Behind the module's own backward, in the backward of its parameter group."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, where: str, ms: float) -> torch.Tensor:
        context.pause = where, ms
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        pause(*context.pause)
        return gradient, None, None


def pause(where: str, ms: float) -> None:
    if where == "host":
        time.sleep(ms / 1e3)
    else:
        torch.cuda._sleep(int(ms / 1e3 * cycles_per_second()))


def cycles_per_second() -> float:
    return 1e3 * torch.cuda.clock_rate() * 1e3 if torch.cuda.clock_rate() else 1.7e9


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.last = nn.Linear(width, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sharded(kind: str, width: int = WIDTH) -> Net:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, size = Net(width).cuda(), dist.get_world_size()
    if kind == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        mesh, apply = init_device_mesh("cuda", (size,), mesh_dim_names=("replicate",)), replicate
    elif kind == "hybrid":
        mesh, apply = init_device_mesh("cuda", (2, size // 2), mesh_dim_names=("replicate", "shard")), fully_shard
    else:
        mesh, apply = init_device_mesh("cuda", (size,), mesh_dim_names=("shard",)), fully_shard
    for block in net.blocks:
        apply(block, mesh=mesh)
    apply(net, mesh=mesh)
    if kind == "prefetch":
        for block, following in zip(net.blocks[:-1], net.blocks[1:], strict=True):
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    return net


def train(net: nn.Module, kind: str = "", steps: int = STEPS, rows: int = 64) -> list[bytes]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        for part in range(3 if kind == "accumulation" else 1):
            if kind == "accumulation":
                net.set_requires_gradient_sync(part == 2)  # type: ignore[operator]
            torch.manual_seed(1000 * part + 10 * step + dist.get_rank())
            net(torch.randn(rows, 8, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "in step":
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return [
        getattr(one, "to_local", lambda one=one: one)().detach().cpu().numpy().tobytes() for one in net.parameters()
    ]


def _both(rank: int, kind: str) -> tuple[bool, Recorded]:
    with recording.suspended():
        without = train(sharded(kind), kind)

    @recorded
    def observed() -> list[bytes]:
        net = sharded(kind)
        with ddp_lab.observe(net):
            return train(net, kind)

    parameters, found = observed()
    return parameters == without, found


@pytest.mark.parametrize("kind", ["shard", "hybrid", "replicate", "prefetch", "accumulation"])
def test_groups(kind: str) -> None:
    """Parameters are bit for bit those without observing; of all steps it is known how long their stream waited."""
    answers = on_ranks(4 if kind == "hybrid" else 2, _both, kind, backend="nccl")
    assert [equal for equal, _ in answers] == [True] * len(answers)
    timeline, rows = rows_of([found for _, found in answers])
    model = int(rows["reducer"].iloc[0])
    assert rows["complete"].all()
    assert len(rows) == len(answers) * STEPS * (1 + BLOCKS)
    times = [name for name in rows if name.endswith("_ms")]
    assert rows[times].notna().all().all(), rows[times].isna().sum()
    gathers = kind != "replicate"
    block = rows[rows["module"] == "blocks.1"]
    assert set(block["forward_unshards"]) == {(3 if kind == "accumulation" else 1) * gathers}
    assert (block["forward_prefetched"] == (kind == "prefetch")).all()
    for name, happens in (("forward_unshard", gathers), ("reduce_scatter", gathers), ("all_reduce", not gathers)):
        assert ((block[f"{name}_ms"] > 0) == (happens or (name == "all_reduce" and kind == "hybrid"))).all(), name
    if gathers:
        assert (block["forward_unshard_exposed_ms"] > 0).all()
        assert (block["forward_unshard_exposed_ms"] <= block["forward_unshard_ms"] * 1.05 + 0.2).mean() > 0.9
    steps = timeline.steps(model)
    assert set(steps["clock"]) == {"device"}
    total = rows.groupby(["rank", "step"])[[name for name in times if "exposed" in name]].sum().sum(axis=1)
    np.testing.assert_allclose(
        steps.set_index(["rank", "step"])["exposed_ms"].sort_index(), total, rtol=0.02, atol=0.02
    )
    parts = timeline.parts()
    for rank, found in parts.by_rank.items():
        whole = np.diff(steps[steps["rank"] == rank]["backward_end_ns"])[-parts.steps :].mean() / 1e9  # the host's
        assert sum(found.values()) == pytest.approx(whole, rel=0.02), found
    assert "Exposed communication is" in parameter_groups_scene(timeline, model).summary
    assert parameter_groups_scene(timeline, model).panels[0].marks


def _delayed(rank: int, late: int, block: int, phase: str, where: str) -> Recorded:
    @recorded
    def observed() -> None:
        net = sharded("shard")
        if rank == late:
            net.blocks[block].delay = (phase, where, 20.0)
        with ddp_lab.observe(net):  # a host that is ahead of its device may take its time
            train(net, "in step" if where == "host" else "")

    return observed()[1]


def _late(timeline: Timeline) -> list[Any]:
    model = max(one.reducer for one in timeline.reducers())
    return [one for one in timeline.findings(model) if one.kind == "late-parameter-group"]


@pytest.mark.parametrize(
    ("late", "block", "phase", "where"),
    [(0, 0, "forward", "device"), (1, 1, "backward", "device"), (1, 2, "forward", "host"), (0, 1, "backward", "host")],
)
def test_late_rank(late: int, block: int, phase: str, where: str) -> None:
    """A delay of 20 ms in one group of one rank, of its device or its host, is named with rank, group and phase."""
    timeline, _ = rows_of(on_ranks(2, _delayed, late, block, phase, where, backend="nccl"))
    found = _late(timeline)
    assert found, timeline.summary()
    assert found[0].title == f"Rank {late} is late in the {phase} of blocks.{block}.", found


def _profiled(rank: int) -> tuple[Recorded, float]:
    """What was recorded; ms of the same steps in which NCCL's kernels ran and no others."""
    from torch.profiler import ProfilerActivity, profile

    @recorded
    def observed() -> Any:
        net = sharded("shard", 2048)
        ddp_lab.observe(net)
        train(net, steps=2, rows=4096)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            train(net, steps=6, rows=4096)
        return profiler

    profiler, found = observed()
    kernels = [one for one in profiler.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    edges = [
        (at, "nccl" in one.name.lower(), change)
        for one in kernels
        for at, change in ((one.time_range.start, 1), (one.time_range.end, -1))
    ]
    open_now, alone, before = [0, 0], 0.0, 0.0
    for at, nccl, change in sorted(edges, key=lambda one: one[0]):
        if open_now[1] and not open_now[0]:
            alone += at - before
        open_now[nccl] += change
        before = at
    return found, alone / 1e3


def test_profiler_agrees() -> None:
    """Exposed communication is what torch's profiler sees of NCCL's kernels alone, on the same steps."""
    answers = on_ranks(2, _profiled, backend="nccl")
    timeline, rows = rows_of([found for found, _ in answers])
    steps = timeline.steps(int(rows["reducer"].iloc[0]))
    for rank, (_, alone) in enumerate(answers):
        mine = steps[(steps["rank"] == rank) & (steps["step"] >= 2)]
        assert mine["exposed_ms"].sum() == pytest.approx(alone, rel=0.05)
