"""Around DDP: torch.compile splits our model's graphs where it splits those of torch's class."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp_lab
from tests.ranks.compare import mlp, same_as_torch, samples, state_of
from tests.ranks.harness import on_ranks
from tests.ranks.wrapping import needs_forward_sync

SMALL = 0.0005  # MiB: several buckets, so DDPOptimizer splits


class Recorder:
    """A backend that runs graphs as they are and keeps, for each, what it computes."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.graphs.append([f"{node.op} {node.target}" for node in graph.graph.nodes])
        return graph.forward


class Plain(nn.Module):
    """Layers of several buckets (torch.compile starts no graph in the frame of `nn.Sequential` itself)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()


class Checkpointed(nn.Module):
    """Two checkpointed blocks, so that the backward recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.second, y, use_reentrant=False)


class Broken(nn.Module):
    """A graph break of the user's own between two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y)


BUILD = {"plain": Plain, "checkpointed": Checkpointed, "broken": Broken}


@contextlib.contextmanager
def small_first_bucket() -> Iterator[None]:
    """DDPOptimizer refuses caps below that of the first bucket."""
    kept, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 64
    try:
        yield
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = kept


def _graphs_as_torch(rank: int, name: str, where: str, arguments: dict[str, Any]) -> int:
    """How many graphs a model is compiled to: with torch's class and ours, with the same contents and weights."""

    def train(wrap: Any) -> Any:
        torch._dynamo.reset()
        backend = Recorder()
        net = BUILD[name]()
        if where == "module":
            model = wrap(net, bucket_cap_mb=SMALL, **arguments)
            model.module.compile(backend=backend)
            called: Any = model
        else:
            model = wrap(net, bucket_cap_mb=SMALL, **arguments)
            called = torch.compile(model, backend=backend)
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            called(samples(rank, step)).square().mean().backward()
            seen.append(state_of(model))
            optimizer.step()
        return backend.graphs, seen

    with small_first_bucket():
        graphs, _ = same_as_torch(train)
    return len(graphs)


@pytest.mark.parametrize(("name", "where"), [*((name, "whole") for name in BUILD), ("plain", "module")])
@on_ranks(2)
def test_graphs_break_where_torchs_do(rank: int, size: int, name: str, where: str) -> None:
    """Compiled, our model has the same number of graphs with the same contents as torch's, and the same weights."""
    assert _graphs_as_torch(rank, name, where, {}) > 1  # DDPOptimizer did split


@pytest.mark.parametrize("arguments", [{"static_graph": True}, {"find_unused_parameters": True}])
@on_ranks(2)
def test_modes_compile_alike(rank: int, size: int, arguments: dict[str, Any]) -> None:
    """The same with a static graph (checkpointed) and with the search for unused parameters."""
    _graphs_as_torch(rank, "checkpointed", "whole", arguments)


@on_ranks(2)
def test_without_the_ddp_optimizer_there_is_one_graph(rank: int, size: int) -> None:
    """With `optimize_ddp` off the whole module is one graph, as with torch's class."""

    def train(wrap: Any) -> Any:
        torch._dynamo.reset()
        backend = Recorder()
        model = wrap(Plain(), bucket_cap_mb=SMALL)
        with torch._dynamo.config.patch(optimize_ddp=False):
            compiled = torch.compile(model, backend=backend)
            for step in range(3):
                compiled(samples(rank, step)).square().mean().backward()
        return backend.graphs, state_of(model)

    graphs, _ = same_as_torch(train)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "arguments",
    [{}, {"find_unused_parameters": True}, pytest.param({"forward_sync_buffers": False}, marks=needs_forward_sync)],
)
@on_ranks(2)
def test_only_the_module_is_compiled(rank: int, size: int, arguments: dict[str, Any]) -> None:
    """Nothing that runs around the module is compiled: neither our functions nor what they call."""
    import torch._dynamo
    from torch._dynamo import convert_frame

    torch._dynamo.reset()
    seen: list[Any] = []
    hook = convert_frame.register_bytecode_hook(lambda before, after: seen.append(before.co_filename))
    model = ddp_lab.DistributedDataParallel(Plain(), **arguments)
    compiled = torch.compile(model, backend="eager")
    try:
        for step in range(3):
            with model.no_sync():
                compiled(samples(rank, step)).square().mean().backward()
            compiled(samples(rank, step)).square().mean().backward()
    finally:
        hook.remove()
    files = seen
    assert set(files) == {__file__}
