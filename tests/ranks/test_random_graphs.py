"""Property: whatever the graph, gradients are torch's DDP's, bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.ranks.conftest import Ranks

WIDTH = 5


class RandomGraph(nn.Module):
    """Each node applies one layer (perhaps another node's, too) to the sum of some earlier nodes."""

    def __init__(self, nodes: list[tuple[int, list[int], bool, bool]]) -> None:
        super().__init__()
        self.nodes = nodes
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.float64 if double else torch.float32)
            for _, _, bias, double in nodes
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        values = [x]
        for index, (shared, sources, _, _) in enumerate(self.nodes):
            total = torch.stack([values[source % len(values)].double() for source in sources]).sum(0)
            for layer in (self.layers[index], self.layers[shared % (index + 1)]):
                total = torch.tanh(layer(total.to(layer.weight.dtype))).double()
            values.append(total)
        return [values[-1], *values[1:-1]]


nodes = st.tuples(
    st.integers(0, 50), st.lists(st.integers(0, 50), min_size=1, max_size=3), st.booleans(), st.booleans()
)
graphs = st.lists(nodes, min_size=1, max_size=8)
steps = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["none", "zero", "keep"])), min_size=2, max_size=4)


def _compare_on_rank(rank: int, size: int, graph: Any, plan: Any, arguments: dict[str, Any]) -> None:
    from ddp_lab import DistributedDataParallel

    torch.manual_seed(11)
    module = RandomGraph(graph)
    pair = (
        DistributedDataParallel(copy.deepcopy(module), **arguments),
        nn.parallel.DistributedDataParallel(copy.deepcopy(module), **arguments),
    )
    for index, (parts, zero) in enumerate(plan):
        for model in pair:
            if zero != "keep":
                model.zero_grad(set_to_none=zero == "none")
            generator = torch.Generator().manual_seed(100 * rank + index)
            for part in range(parts):
                x = torch.randn(3, WIDTH, generator=generator)
                model.require_backward_grad_sync = part == parts - 1
                torch.stack([value.square().mean() for value in model(x)]).sum().backward()
        for (name, mine), other in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad), f"step {index}: {name}"
    pair[0]._check_reducer_finalized()


@settings(
    max_examples=60,
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a failure may be a hang: shrinking would take an hour
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    graph=graphs,
    plan=steps,
    cap=st.sampled_from([None, 0.0001, 0.0003, 0.001]),
    as_view=st.booleans(),
    size=st.sampled_from([2, 2, 2, 4]),
)
def test_random_graphs(ranks: Ranks, graph: Any, plan: Any, cap: float | None, as_view: bool, size: int) -> None:
    """Random graphs, sharing, dtypes, caps, accumulation and zero_grad: gradients are torch's, bit by bit."""
    arguments = {"bucket_cap_mb": cap, "gradient_as_bucket_view": as_view}
    ranks(size, _compare_on_rank, graph, plan, arguments, timeout=30)
