"""Around DDP: what users put into the model, around it and beside it leaves the tensors that it leaves with torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import assert_same, mlp, same_as_torch, samples, state_of
from tests.ranks.harness import on_ranks
from tests.ranks.wrapping import FORWARD_SYNC

SMALL = 0.0005  # MiB: several buckets
Call = Callable[[torch.Tensor], Any]


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def _train(model: nn.Module, call: Call | None = None, steps: int = 4) -> dict[str, torch.Tensor]:
    """Weights and gradients after some steps; `call` stands in for the model's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        (call or model)(samples(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    return state_of(model)


def _normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def _averaged(wrap: Any) -> Any:
    """AveragedModel of the wrapper and of the module in it; an average copies what it averages."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

    model = wrap(_seeded(_normalized))
    outer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    inner = AveragedModel(model.module)
    for _ in range(3):
        _train(model, steps=1)
        outer.update_parameters(model)
        inner.update_parameters(model.module)
    update_bn([samples(dist.get_rank(), 9)], outer)
    return dict(outer.state_dict()), dict(inner.state_dict()), _train(model)


def _parametrized(wrap: Any) -> Any:
    """Weights that are computed from other parameters."""
    from torch.nn.utils import parametrizations

    def build() -> nn.Module:
        normed = parametrizations.weight_norm(nn.Linear(10, 8))
        return nn.Sequential(
            normed, parametrizations.spectral_norm(nn.Linear(8, 8)), parametrizations.orthogonal(nn.Linear(8, 4))
        )

    return _train(wrap(_seeded(build)))


def _hooked(wrap: Any) -> Any:
    """Hooks of the wrapper and of a layer in it, which change inputs and outputs."""
    seen: list[Any] = []
    model = wrap(mlp())
    model.register_forward_pre_hook(lambda module, given: (2 * given[0],))
    model.register_forward_hook(lambda module, given, output: 3 * output)
    model.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].sum().item()))
    model.module[0].register_forward_hook(lambda module, given, output: output + 1)
    return _train(model, lambda x: model(x.requires_grad_())), seen


class Parts(nn.Module):
    """Two modules, one after the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def _linear() -> nn.Module:
    return _seeded(lambda: nn.Linear(4, 4))


def _two_parts(wrap: Any) -> Any:
    """Two wrapped parts of one model, in groups of their own: one averages, the other has one rank."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    together = dist.new_group(list(range(dist.get_world_size())))
    mine = alone[dist.get_rank()]
    return _train(Parts(wrap(mlp(), process_group=together), wrap(_linear(), process_group=mine)))


class Recurrent(nn.Module):
    """Recurrent layers and a cell that is used three times; returns a packed sequence and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.cell = nn.LSTM(10, 6, 2, bidirectional=True), nn.GRU(12, 5), nn.LSTMCell(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        packed, _ = self.lstm(nn.utils.rnn.pack_sequence([x, x[:3]]))
        packed, last = self.gru(packed)
        state = None
        for _ in range(3):
            state = self.cell(last[0], state)
        return packed, state


def _recurrent(wrap: Any) -> Any:
    model = wrap(_seeded(Recurrent))

    def loss(x: torch.Tensor) -> torch.Tensor:
        packed, state = model(x)
        return packed.data.mean() + state[0].mean() + state[1].mean()

    return _train(model, loss)


def _without_gradients(wrap: Any) -> Any:
    """Forwards in inference mode and under no_grad, also between a forward and its backward."""
    model = wrap(_seeded(_normalized))
    seen: list[torch.Tensor] = []

    def look(x: torch.Tensor) -> None:
        with torch.inference_mode():
            seen.append(model(x).clone())
        with torch.no_grad():
            seen.append(model(x))

    def call(x: torch.Tensor) -> torch.Tensor:
        model.eval()
        look(x + 1)
        model.train()
        output = model(x)
        look(x + 2)
        return output

    return _train(model, call), seen


def _gradients_of_inputs(wrap: Any) -> Any:
    """A penalty on the gradient of the inputs: a backward through a backward."""
    model = wrap(mlp())
    x = samples(dist.get_rank(), 0).requires_grad_()
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    return state_of(model), x.grad


def _regularized(wrap: Any) -> Any:
    """A loss that also uses the parameters outside forward."""
    model = wrap(mlp())
    return _train(model, lambda x: model(x) + sum(p.square().sum() for p in model.parameters()))


PROGRAMS = {
    function.__name__.strip("_"): function
    for function in (
        _averaged, _parametrized, _hooked, _two_parts, _recurrent, _without_gradients,
        _gradients_of_inputs, _regularized,
    )
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}


# In releases without forward_sync_buffers torch's own class breaks such a backward: it broadcasts in every forward.
CASES = [
    (name, mode)
    for name in PROGRAMS
    for mode in MODES
    if (name, mode) != ("gradients_of_inputs", "static") and (name != "without_gradients" or FORWARD_SYNC)
]


@pytest.mark.parametrize(("name", "mode"), CASES)
@on_ranks(2)
def test_a_program_of_users(rank: int, size: int, name: str, mode: str) -> None:
    """Each of the programs leaves with our class, in each mode, what it leaves with torch's, bit by bit."""

    def run(cls: Any) -> Any:
        return PROGRAMS[name](lambda module, **given: cls(module, bucket_cap_mb=SMALL, **MODES[mode], **given))

    same_as_torch(run)


@on_ranks(2)
def test_a_static_graph_whose_first_backward_is_of_the_inputs(rank: int, size: int) -> None:
    """A gradient penalty in a static graph leaves the gradients that it leaves without (torch's class does not)."""
    plain = _gradients_of_inputs(DistributedDataParallel)
    static = _gradients_of_inputs(lambda module: DistributedDataParallel(module, static_graph=True))
    assert_same(static, plain, exact=False)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_scripted_modules(rank: int, size: int, mode: str) -> None:
    """A scripted model, with buffers, and a model with a traced part train as with torch's class."""

    def run(cls: Any) -> Any:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's own
            whole = torch.jit.script(_seeded(_normalized))
            part = Parts(mlp(), torch.jit.trace(_linear(), torch.ones(2, 4)))
        return [_train(cls(net, bucket_cap_mb=SMALL, **MODES[mode])) for net in (whole, part)]

    same_as_torch(run)
