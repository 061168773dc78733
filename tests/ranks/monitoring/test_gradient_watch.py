"""Watched gradients: norms before and after averaging, noise, and where NaN and Inf come from."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_lab import Timeline, recording
from tests.ranks.conftest import Ranks
from tests.ranks.harness import on_ranks
from tests.ranks.models import MODELS, batch_of, loss_of
from tests.ranks.wrapping import wrap

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "lazy": {"lazy_bucket_allocation": True},
    "unused": {"find_unused_parameters": True},
    "hook": {},
}


def _check_norms(rank: int, size: int, name: str, kind: str) -> None:
    torch.manual_seed(7)
    model = wrap(MODELS[name].build(), bucket_cap_mb=0.0005, **OPTIONS[kind])
    alone = [MODELS[name].build() for _ in range(size)]
    if kind == "hook":
        model.register_comm_hook(None, allreduce_hook)
    watch = model.watch_gradients()
    for step in range(3):
        buckets = [bucket.parameters for bucket in model.buckets()] if step == 2 else None
        model.zero_grad()
        for other, module in enumerate(alone):
            module.load_state_dict(model.module.state_dict())
            module.zero_grad()
            loss_of(module(batch_of(MODELS[name], other, step))).backward()
        loss_of(model(batch_of(MODELS[name], rank, step))).backward()
        if buckets is None:
            continue
        found = watch.last
        assert found.step == step
        assert found.nonfinite is None
        for index, names in enumerate(buckets):
            for other, module in enumerate(alone):
                assert found.before[other][index] == pytest.approx(_norm(module, names), rel=1e-4, abs=1e-7)
            assert found.after[index] == pytest.approx(_norm(model.module, names), rel=1e-4, abs=1e-7)
    assert watch.steps == 3
    assert len(buckets) > 1 or name != "mlp"


def _norm(module: nn.Module, names: tuple[str, ...]) -> float:
    gradients = [dict(module.named_parameters())[name].grad for name in names]
    squares = [g.detach().abs().double().square().sum() for g in gradients if g is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@on_ranks(2)
def test_norms_are_those_of_each_rank_and_of_the_average(rank: int, size: int, kind: str) -> None:
    """For each bucket: every rank's own norm, as one process computes it, and that of `.grad` afterwards."""
    _check_norms(rank, size, "mlp", kind)


@pytest.mark.parametrize("name", ["mixed_dtypes", "many_dtypes", "strided", "undefined", "shared"])
@on_ranks(2)
def test_norms_of_other_models(rank: int, size: int, name: str) -> None:
    """The same for parameters of all dtypes, complex ones, odd layouts and absent gradients."""
    _check_norms(rank, size, name, "plain")


class _Poisoned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.poison: dict[int, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index in self.poison and x.requires_grad:
                x.register_hook(lambda gradient, value=self.poison[index]: gradient * value)
        return x


@pytest.mark.parametrize(
    ("action", "value", "kind", "options"),
    [
        ("warn", float("nan"), "NaN", {}),
        ("raise", float("inf"), "Inf", {}),
        ("warn", float("inf"), "Inf", {"gradient_as_bucket_view": True}),
        ("raise", float("nan"), "NaN", {"gradient_as_bucket_view": True}),
    ],
)
@on_ranks(2)
def test_nan_and_inf_are_traced_to_parameter_and_rank(
    rank: int, size: int, action: str, value: float, options: dict[str, Any], kind: str
) -> None:
    """The first bad gradient in the order of readiness is named with its rank, on all ranks, and training goes on."""
    torch.manual_seed(1)
    model = wrap(_Poisoned(), bucket_cap_mb=0.0001, **options)
    watch = model.watch_gradients(nonfinite=action)
    told: list[str] = []
    for step in range(5):
        # gradients flow from layer 3 to 0: the first that is ready and bad is that of layer 1
        model.module.poison = {1: value} if (rank, step) == (size - 1, 3) else {}
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model(torch.ones(3, 6)).sum().backward()
            except RuntimeError as error:
                told.append(f"raised {error}")
        told += [str(one.message) for one in caught if "not finite" in str(one.message)]
        if step == 3:
            bad = watch.last.nonfinite
    assert watch.last.nonfinite is None
    assert len(told) == 1
    assert "'layers.1." in told[0]
    assert "on rank 1" in told[0]
    assert "in step 3" in told[0]
    assert told[0].startswith("raised") == (action == "raise")
    assert bad.kind == kind or value == float("inf")  # Inf times 0 is NaN
    assert bad.parameter in ("layers.1.weight", "layers.1.bias")
    assert (bad.rank, bad.ranks) == (1, (1,))


@on_ranks(2)
def test_another_rhythm_keeps_what_happens(rank: int, size: int) -> None:
    """Watched more or less often, or switched off and on from outside, a watch that raises goes on to raise."""
    model = wrap(_Poisoned())
    model.watch_gradients(7, nonfinite="raise")
    rhythms = [model._monitors.gradients_every]
    for every in (0, 1):
        model._monitors.set_gradients(every)
        rhythms.append(model._monitors.gradients_every)
    model.module.poison = {1: float("nan")}
    with pytest.raises(RuntimeError, match="not finite"):
        model(torch.ones(3, 6)).sum().backward()
    assert rhythms == [7, 0, 1]


@on_ranks(2)
def test_an_overflow_of_the_average_is_told_from_bad_gradients(rank: int, size: int) -> None:
    """Finite gradients whose reduction overflows are no rank's fault, and the words say so."""
    torch.manual_seed(1)
    model = wrap(nn.Linear(4, 1, bias=False).half())

    def doubled(state: Any, bucket: Any) -> Any:
        made: Any = torch.futures.Future()
        made.set_result(bucket.buffer() * 60000)
        return made

    model.register_comm_hook(None, doubled)
    watch = model.watch_gradients()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.full((1, 4), 4.0, dtype=torch.float16)).sum().backward()
    bad, told = watch.last.nonfinite, [str(one.message) for one in caught]
    assert (bad.kind, bad.parameter) == ("Inf", None)
    assert "each rank's own were" in told[0]


@on_ranks(2)
def test_only_watched_steps_cost_and_only_rank_0_describes(rank: int, size: int) -> None:
    """With every=3 steps 0, 3 and 6 are watched; a watch that replaces another begins anew."""
    model = wrap(nn.Linear(4, 2))
    _, cursor = recording.descriptions(0)
    watch = model.watch_gradients(every=3)
    seen = []
    for step in range(8):
        model(torch.ones(2, 4)).sum().backward()
        seen.append(watch.steps)
        if step == 6:
            watch.remove()
            del watch
            watch = model.watch_gradients(every=100)
    found, _ = recording.descriptions(cursor)
    assert seen == [1, 1, 1, 2, 2, 2, 3, 0]
    assert [one["step"] for one in found if one["type"] == "gradients"] == ([] if rank else [0, 3, 6])


@on_ranks(2)
def test_a_model_that_changes_stays_watched_and_a_watch_keeps_none_alive(rank: int, size: int) -> None:
    """Freezing a layer builds a new reducer, which is watched too; the watch does not keep the model."""
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    watch = model.watch_gradients()
    model(torch.ones(2, 4)).sum().backward()
    model.module[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(2, 4)).sum().backward()
    steps = watch.steps
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert (steps, gone() is None) == (2, True)


@on_ranks(2)
def test_ranks_that_have_joined_take_part(rank: int, size: int) -> None:
    """Under join a rank without inputs has no norm, and all are finite."""
    model = wrap(nn.Linear(4, 2))
    watch = model.watch_gradients()
    with model.join():
        for _ in range(3 + 2 * rank):
            model(torch.ones(2, 4)).sum().backward()
    steps, before, nonfinite = watch.steps, watch.last.before, watch.last.nonfinite
    assert steps == 5
    assert np.isnan(before[0]).all()
    assert np.isfinite(before[1]).all()
    assert nonfinite is None


def _timeline_on_rank(rank: int, size: int) -> list[dict[str, Any]]:
    torch.manual_seed(2)
    _, cursor = recording.descriptions(0)
    model = wrap(nn.Linear(50, 1, bias=False))
    model.watch_gradients()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(200):
        model.zero_grad()
        inputs = torch.randn(8, 50, generator=generator)
        (model(inputs).squeeze(1) - inputs[:, 0]).square().mean().backward()
    return recording.descriptions(cursor)[0]


def test_the_timeline_has_norms_and_the_noise_scale(ranks: Ranks, tmp_path: Any) -> None:
    """The frame has one row for each bucket and one for all; the noise scale is that of the known distribution."""
    timeline = Timeline()
    for rank, found in enumerate(ranks(2, _timeline_on_rank)):
        for description in found:
            timeline.describe(rank, description)
    frame = timeline.gradients()
    assert list(frame["bucket"].unique()) == [-1, 0]
    assert len(frame) == 400
    one = frame[frame["bucket"] == 0].iloc[5]
    assert set(one["before"]) == {0, 1}
    assert one["before_min"] <= one["before_mean"] <= one["before_max"]
    assert (frame["nonfinite"] == "").all()
    # tr Σ / |G|² of this model at this point, by many samples, over the 8 samples of a rank's batch
    torch.manual_seed(2)
    error = nn.Linear(50, 1, bias=False).weight[0].detach().double()
    error[0] -= 1
    inputs = torch.randn(200_000, 50, generator=torch.Generator().manual_seed(9)).double()
    gradients = 2 * (inputs @ error)[:, None] * inputs
    mean = gradients.mean(0)
    scale = float((gradients - mean).square().sum(1).mean() / mean.square().sum())
    assert timeline.noise_scale() == pytest.approx(scale / 8, rel=0.15)
    again = Timeline.load(timeline.save(tmp_path / "watched.npz"))
    assert again.gradients().drop(columns="before").equals(frame.drop(columns="before"))
