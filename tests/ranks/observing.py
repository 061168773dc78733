"""Programs that train torch's class, to be run observed and not, and checks of what was recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import ddp_lab
from ddp_lab.protocol.events import Batch, Kind
from ddp_lab.timeline.timeline import Timeline
from tests.ranks.compare import mlp, samples, state_of

__all__ = [
    "CAP_MB",
    "PROGRAMS",
    "TORCH_HIDES_SPARSE_BUCKETS",
    "Branches",
    "Watch",
    "check_backwards",
    "recorded",
    "timeline_of",
    "train",
]

CAP_MB = 0.0005
TORCH_HIDES_SPARSE_BUCKETS = torch.__version__ >= "2.15"


class Branches(nn.Module):
    """Which of two layers is used depends on the rank and the step; a third one never is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.idle = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.first(x) if which else self.second(x)


class Checkpointed(nn.Module):
    """Its middle runs twice in a backward, in a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.middle, self.last = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for _ in range(2):
            hidden = checkpoint(lambda h: torch.tanh(self.middle(h)), hidden, use_reentrant=True)
        return self.last(hidden)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.last = nn.EmbeddingBag(30, 10, sparse=True), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.abs() * 10).long().clamp(max=29)
        return self.last(self.table(rows))


Watch = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


def train(model: nn.Module, rank: int, steps: int = 4, *, branches: bool = False) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        x = samples(rank, step)
        (model(x, (rank + step) % 2) if branches else model(x)).square().mean().backward()
        optimizer.step()
    return state_of(model)


def _plain(watch: Watch, rank: int, **options: Any) -> Any:
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB, **options)
    with watch(model):
        return train(model, rank)


def _branches(watch: Watch, rank: int) -> Any:
    model = TorchDDP(Branches(), bucket_cap_mb=CAP_MB, find_unused_parameters=True)
    with watch(model):
        return train(model, rank, branches=True)


def _static_checkpointed(watch: Watch, rank: int) -> Any:
    model = TorchDDP(Checkpointed(), bucket_cap_mb=CAP_MB, static_graph=True)
    with watch(model):
        return train(model, rank)


def _sparse(watch: Watch, rank: int) -> Any:
    model = TorchDDP(Sparse(), bucket_cap_mb=CAP_MB)
    if TORCH_HIDES_SPARSE_BUCKETS and watch is ddp_lab.observe:
        with pytest.raises(ValueError, match="does not expose its buckets"):
            watch(model)
        watch = contextlib.nullcontext
    with watch(model):
        for step in range(3):
            model.zero_grad()
            model(samples(rank, step)).square().mean().backward()
        return {name: p.grad.to_dense() for name, p in model.named_parameters()}


def _no_sync(watch: Watch, rank: int) -> Any:
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    with watch(model):
        for step in range(6):
            with contextlib.nullcontext() if step % 3 == 2 else model.no_sync():
                model(samples(rank, step)).square().mean().backward()
        return state_of(model)


def _hook(watch: Watch, rank: int, name: str, before: bool) -> Any:
    # PowerSGD communicates from callbacks: with several buckets on Gloo, in an order of its own on each rank.
    model = TorchDDP(mlp(), bucket_cap_mb=25 if name == "power" else CAP_MB)

    def register() -> None:
        if name == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "power":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)

    torch.manual_seed(7)
    if before:
        register()
    with watch(model):
        if not before:
            register()
        return train(model, rank)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "plain": (_plain, (), {}),
    "bucket views": (_plain, (), {"gradient_as_bucket_view": True}),
    "needless search": (_plain, (), {"find_unused_parameters": True}),
    "static graph": (_plain, (), {"static_graph": True}),
    "unused": (_branches, (), {}),
    "checkpoints": (_static_checkpointed, (), {}),
    "sparse": (_sparse, (), {}),
    "no_sync": (_no_sync, (), {}),
    "fp16 before": (_hook, ("fp16", True), {}),
    "fp16 after": (_hook, ("fp16", False), {}),
    "power before": (_hook, ("power", True), {}),
    "power after": (_hook, ("power", False), {}),
    "builtin before": (_hook, ("builtin", True), {}),
    "builtin after": (_hook, ("builtin", False), {}),
}


def recorded(action: Callable[[], Any]) -> tuple[Any, np.ndarray, list[dict[str, Any]]]:
    """What an action returned, the events that it caused, and the descriptions."""
    start, known = ddp_lab.recording.statistics().recorded, ddp_lab.recording.descriptions(0)[1]
    result = action()
    events, dropped, _ = ddp_lab.recording.drain(start)
    events = events[events["reducer"] >= 0]  # others are of the program around the model
    assert dropped == 0
    return result, events, ddp_lab.recording.descriptions(known)[0]


def timeline_of(answers: list[tuple[np.ndarray, list[dict[str, Any]]]]) -> Timeline:
    """The timeline of what each rank has recorded: its events and descriptions."""
    timeline = Timeline()
    for rank, (events, described) in enumerate(answers):
        for one in described:
            timeline.describe(rank, {**one, "session": 1})
        first = int(events["sequence"][0]) if len(events) else 0
        timeline.extend(Batch(rank, 1, first, 0, events))
    return timeline


def check_backwards(events: np.ndarray, descriptions: list[dict[str, Any]]) -> None:
    """Each bucket of each finished backward was ready, launched and reduced, in this order and within the backward."""
    ends = events[events["kind"] == Kind.BACKWARD_END]
    assert ends["step"].tolist() == list(range(len(ends)))
    assert len(ends)
    buckets = {one["generation"]: one["buckets"] for one in descriptions if one["type"] == "assignment"}
    for end in ends:
        step = events[(events["step"] == end["step"]) & (events["host_ns"] <= end["host_ns"])]

        def when(kind: Kind, bucket: int, step: np.ndarray = step) -> int:
            found = step[(step["kind"] == kind) & (step["bucket"] == bucket)]
            assert len(found) == 1, (kind, bucket, len(found))
            assert found["bytes"][0] > 0
            return int(found["host_ns"][0])

        begin = int(step[step["kind"] == Kind.BACKWARD_BEGIN]["host_ns"][0])
        launches = []
        for one in buckets[int(end["generation"])]:
            moments = [
                when(kind, one["bucket"]) for kind in (Kind.BUCKET_READY, Kind.BUCKET_LAUNCHED, Kind.BUCKET_REDUCED)
            ]
            launches.append(moments[1])
            arrived = step[(step["kind"] == Kind.GRAD_READY) & np.isin(step["parameter"], one["parameters"])]
            assert [begin, *moments, int(end["host_ns"])] == sorted([begin, *moments, int(end["host_ns"])])
            assert (arrived["host_ns"] <= moments[0]).all()
        assert launches == sorted(launches)
        assert (step["kind"] == Kind.FINALIZE_BEGIN).sum() == 1
