"""torch._dynamo.config.optimize_ddp = "python_reducer": gradients are averaged by hooks that compilers can see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import mlp, same_as_torch, samples, state_of
from tests.ranks.harness import on_ranks


@on_ranks(2)
def test_the_python_reducer(rank: int, size: int) -> None:
    """In this mode gradients are averaged, also compiled and after no_sync; bucket_cap_mb_list is refused and comm
    hooks get (gradient, parameter), as in torch."""
    import torch._dynamo

    torch.manual_seed(0)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
        with pytest.raises(AssertionError, match="python reducer is not supported"):
            DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb_list=[1])
    plain = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    plain.load_state_dict(model.state_dict())
    x = torch.full((2, 3), 1.0 + rank)
    compiled = torch.compile(model, backend="eager")
    for run in (model, compiled):
        for each in (run, plain):
            each.zero_grad()
            with each.no_sync() if each is plain else model.no_sync():
                each(x).sum().backward()
            each(x).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert model.reducer.step() == 0  # it has seen nothing

    def hook(state: Any, pair: tuple[torch.Tensor, nn.Parameter]) -> None:
        state.append(pair[1].shape)

    called: list[torch.Size] = []
    model._comm_hooks.append((hook, called))
    model(x).sum().backward()
    assert len(called) == 4


@pytest.mark.parametrize("mode", ["python_reducer", "ddp_optimizer"])
@on_ranks(2)
def test_a_backward_in_the_compiled_function(rank: int, size: int, mode: str) -> None:
    """Compiled autograd compiles the Python reducer's backward into as many graphs as with torch's class; another
    mode refuses it."""
    from torch._dynamo.testing import CompileCounter

    def train(wrap: Any) -> Any:
        torch._dynamo.reset()
        graphs = CompileCounter()
        with torch._dynamo.config.patch(optimize_ddp=mode, compiled_autograd=True):
            model = wrap(mlp())

            @torch.compile(backend=graphs)
            def step(x: torch.Tensor) -> None:
                model(x).square().mean().backward()

            for number in range(2):
                step(samples(rank, number))
        return [state_of(model), graphs.frame_count, graphs.op_count]

    if mode == "python_reducer":
        same_as_torch(train)
        return
    for wrap in (TorchDDP, DistributedDataParallel):
        with pytest.raises(RuntimeError, match=r"Compiled autograd is not compatible with C\+\+ DDP Reducer"):
            train(wrap)
