"""`observe()`: torch's own class records what ours records, and computes what it computes unobserved."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import ddp_lab
from ddp_lab.events import Kind
from tests.ranks.compare import assert_same, mlp, samples, state_of
from tests.ranks.conftest import Ranks

CAP_MB = 0.0005


class _Branches(nn.Module):
    """Which of two layers is used depends on the rank and the step; a third one never is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.idle = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.first(x) if which else self.second(x)


class _Checkpointed(nn.Module):
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


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.last = nn.EmbeddingBag(30, 10, sparse=True), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.abs() * 10).long().clamp(max=29)
        return self.last(self.table(rows))


Watch = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


def _train(model: nn.Module, rank: int, steps: int = 4, *, branches: bool = False) -> dict[str, torch.Tensor]:
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
        return _train(model, rank)


def _branches(watch: Watch, rank: int) -> Any:
    model = TorchDDP(_Branches(), bucket_cap_mb=CAP_MB, find_unused_parameters=True)
    with watch(model):
        return _train(model, rank, branches=True)


def _static_checkpointed(watch: Watch, rank: int) -> Any:
    model = TorchDDP(_Checkpointed(), bucket_cap_mb=CAP_MB, static_graph=True)
    with watch(model):
        return _train(model, rank)


def _sparse(watch: Watch, rank: int) -> Any:
    model = TorchDDP(_Sparse(), bucket_cap_mb=CAP_MB)
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
        return _train(model, rank)


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


def _events(action: Callable[[], Any]) -> tuple[Any, np.ndarray, list[dict[str, Any]]]:
    """What an action returned, the events that it caused, and the descriptions."""
    start, known = ddp_lab.recording.statistics().recorded, ddp_lab.recording.descriptions(0)[1]
    result = action()
    events, dropped, _ = ddp_lab.recording.drain(start)
    assert dropped == 0
    return result, events, ddp_lab.recording.descriptions(known)[0]


def _check_backwards(events: np.ndarray, descriptions: list[dict[str, Any]]) -> None:
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


def _with_and_without(rank: int, size: int, name: str) -> None:
    program, arguments, options = PROGRAMS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without = program(lambda model: contextlib.nullcontext(), rank, *arguments, **options)
        observed, events, descriptions = _events(lambda: program(ddp_lab.observe, rank, *arguments, **options))
    assert_same(observed, without)
    _check_backwards(events, descriptions)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_observing_changes_no_bit_and_sees_every_bucket(ranks: Ranks, name: str) -> None:
    """Parameters, buffers and gradients after some steps are bit-equal, and each bucket's way is recorded."""
    ranks(2, _with_and_without, name)


def _like_ours(rank: int, size: int, name: str, options: dict[str, Any]) -> None:
    def train(wrap: type, watch: Watch) -> Any:
        model = wrap(_Branches() if name == "unused" else mlp(), bucket_cap_mb=CAP_MB, **options)
        with watch(model):
            return _train(model, rank, branches=name == "unused")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, theirs, their_buckets = _events(lambda: train(TorchDDP, ddp_lab.observe))
        _, ours, our_buckets = _events(
            lambda: train(ddp_lab.DistributedDataParallel, lambda model: contextlib.nullcontext())
        )
    # The first assignment is another, see BucketCaps.initial: what is compared is the rebuilt one.
    theirs, ours = (one[one["step"] > 0] for one in (theirs, ours))
    if "static_graph" in options:  # torch rebuilds its buckets one step later
        assert set(theirs["kind"]) == set(ours["kind"])
    else:
        assert Counter(theirs[["step", "kind"]].tolist()) == Counter(ours[["step", "kind"]].tolist())
    last_theirs, last_ours = (
        [one for one in found if one["type"] == "assignment"][-1] for found in (their_buckets, our_buckets)
    )
    assert last_theirs.keys() == last_ours.keys()
    assert last_theirs["parameters"] == last_ours["parameters"]
    assert last_theirs["rebuilt"] == last_ours["rebuilt"]
    assert last_theirs["options"] == last_ours["options"]
    if "static_graph" not in options:
        assert last_theirs["buckets"] == last_ours["buckets"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("views", {"gradient_as_bucket_view": True}),
        ("unused", {"find_unused_parameters": True}),
        ("static", {"static_graph": True}),
    ],
)
def test_events_are_those_of_our_class(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    """On the same model, an observed step has the same events as one of ours, and the same description."""
    ranks(2, _like_ours, name, options)


def _unused_ready(rank: int, size: int) -> None:
    model = TorchDDP(_Branches(), bucket_cap_mb=0.0003, find_unused_parameters=True)  # a bucket for each layer
    ddp_lab.observe(model)
    _, events, _ = _events(lambda: _train(model, rank, 2, branches=True))
    step = events[events["step"] == 1]
    begin = step[step["kind"] == Kind.BACKWARD_BEGIN]["host_ns"][0]
    ready = step[(step["kind"] == Kind.BUCKET_READY)]
    gradients = step[step["kind"] == Kind.GRAD_READY]
    seen = set(gradients["bucket"].tolist())
    without = [int(one["host_ns"]) for one in ready if one["bucket"] not in seen]
    assert without == [int(begin)] * len(without)
    assert without


def test_a_bucket_that_no_gradient_fills_is_ready_when_the_backward_begins(ranks: Ranks) -> None:
    """With unused parameters a bucket is ready with its last used one, or at once."""
    ranks(2, _unused_ready)


def _timeline(rank: int, size: int) -> Any:
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    observation = ddp_lab.observe(model)
    assert ddp_lab.observe(model) is observation
    _, events, _ = _events(lambda: _train(model, rank, 6))
    return events, ddp_lab.recording.descriptions(0)[0], observation.reducer_id


def test_a_timeline_tells_as_much_as_of_our_class(ranks: Ranks) -> None:
    """From observed ranks a timeline makes complete spans with hidden and exposed times, and a summary."""
    from ddp_lab.events import Batch

    timeline = ddp_lab.Timeline()
    found = ranks(2, _timeline)
    numbers = {number for _, _, number in found}
    assert len(numbers) == 1
    for rank, (events, descriptions, _) in enumerate(found):
        for description in descriptions:
            timeline.describe(rank, description | {"session": 1})
        timeline.extend(Batch(rank, 1, int(events["sequence"][0]), 0, events))
    spans = timeline.spans(numbers.pop())
    assert spans["complete"].all()
    assert len(spans) > 2 * 6
    assert np.isfinite(spans[["hidden_ms", "exposed_ms", "ready_ms", "reduced_ms"]]).all().all()
    assert "Sequential" in timeline.summary()


def _removed(rank: int, size: int) -> None:
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    observation = ddp_lab.observe(model)
    _train(model, rank, 1)
    observation.remove()
    observation.remove()
    _, events, _ = _events(lambda: _train(model, rank, 2))
    assert len(events) == 0
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with ddp_lab.observe(model):
        _, events, _ = _events(lambda: _train(model, rank, 2))
    assert (events["kind"] == Kind.BACKWARD_END).sum() == 2


def _freed(rank: int, size: int) -> None:
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    observation = ddp_lab.observe(model)
    _train(model, rank, 2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    observation.remove()


def test_remove_leaves_nothing(ranks: Ranks) -> None:
    """After remove() nothing is recorded and no hook is left; observing again works."""
    ranks(2, _removed)


def test_a_model_that_is_observed_can_be_freed(ranks: Ranks) -> None:
    """Neither the observation nor what it returned keeps the model alive."""
    ranks(2, _freed)


def _copied(rank: int, size: int) -> None:
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    ddp_lab.observe(model)
    _train(model, rank, 2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _, events, _ = _events(lambda twin=twin: _train(twin, rank, 2))
        assert len(events) == 0
    _, events, _ = _events(lambda: _train(model, rank, 2))
    assert len(events)


def test_copies_are_not_observed(ranks: Ranks) -> None:
    """An observed model can be copied and pickled; the copies train, unobserved."""
    ranks(2, _copied)


def _with_an_error(rank: int, size: int) -> None:
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    ddp_lab.observe(model)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("from the test")

    def train() -> None:
        _train(model, rank, 2)
        handle = next(model.parameters()).register_hook(fail)
        with pytest.raises(RuntimeError, match="from the test"):
            _train(model, rank, 1)
        handle.remove()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(samples(rank, 0))

    _, events, _ = _events(train)
    assert (events["kind"] == Kind.BACKWARD_END).sum() == 2
    assert events[events["kind"] == Kind.ABANDONED]["step"].tolist() == [2]
    dist.barrier()


def test_a_backward_that_fails_is_abandoned(ranks: Ranks) -> None:
    """An exception in a backward reads as in our events; what torch then says is torch's."""
    ranks(2, _with_an_error)


def _two_models(rank: int, size: int) -> None:
    models = [TorchDDP(mlp(), bucket_cap_mb=CAP_MB) for _ in range(2)]
    numbers = [ddp_lab.observe(model).reducer_id for model in models]

    def train() -> None:
        for step in range(3):
            x = samples(rank, step)
            outputs = [model(x) for model in models]
            (outputs[0].square().mean() + outputs[1].square().mean()).backward()

    _, events, descriptions = _events(train)
    for number in numbers:
        own = [one for one in descriptions if one.get("reducer") == number]
        first = [one for one in ddp_lab.recording.descriptions(0)[0] if one.get("reducer") == number]
        _check_backwards(events[events["reducer"] == number], [*first, *own])


def test_models_that_share_a_backward_are_told_apart(ranks: Ranks) -> None:
    """Two observed models in one backward: each launch belongs to its own."""
    ranks(2, _two_models)


def _every_model(rank: int, size: int) -> None:
    from ddp_lab.parallel.observe import observe_every_model

    every = observe_every_model()
    try:
        _, events, _ = _events(lambda: _train(TorchDDP(mlp()), rank, 2))
        _, of_ours, _ = _events(lambda: _train(ddp_lab.DistributedDataParallel(mlp()), rank, 2))
    finally:
        every.remove()
    assert (events["kind"] == Kind.BACKWARD_END).sum() == 2
    assert (of_ours["kind"] == Kind.BACKWARD_END).sum() == 2
    _, events, _ = _events(lambda: _train(TorchDDP(mlp()), rank, 2))
    assert len(events) == 0


def test_every_model_of_a_program_can_be_observed(ranks: Ranks) -> None:
    """observe_every_model() reaches models that are wrapped later, until it is removed."""
    ranks(2, _every_model)


def _refused(rank: int, size: int) -> None:
    with pytest.raises(TypeError, match=r"ddp_lab\.DistributedDataParallel records by itself"):
        ddp_lab.observe(ddp_lab.DistributedDataParallel(mlp()))
    with pytest.raises(TypeError, match="got Sequential: pass what wraps the model"):
        ddp_lab.observe(mlp())  # type: ignore[arg-type]


def test_other_models_are_refused(ranks: Ranks) -> None:
    """observe() says which class it expects."""
    ranks(2, _refused)
