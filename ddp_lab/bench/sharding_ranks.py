"""The rank side of `ddp-lab bench what-if --sharding`: trains one model in several ways, in turns, and records it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from .measuring.fresh_ranks import block
from .measuring.workloads import WORKLOADS, Step
from .what_if_ranks import WARM_UP, drained, save

__all__ = ["LAYERS", "Way", "train"]

LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "mlp": tuple((str(2 * number),) for number in range(6)),
    "transformer": (("embedding",), *((f"layers.layers.{number}",) for number in range(5)), ("head",)),
    "conv_net": (("0",), ("4",), ("8",), ("13",), ("15",)),
    "small_tensors": tuple(tuple(f"{2 * number}" for number in range(at, at + 10)) for at in range(0, 200, 10)),
}
"""Modules of each model that run one after the other and that a user would put into one group."""


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
        kind: "ddp", "zero-1", "fully_shard" or "replicate".
        groups: modules of each group.
        reshard: after the forward.
        ahead: before a group computes it asks for the next one's parameters.
        replicas: of all parameters; more than one is HSDP.
    """

    kind: str
    groups: Sequence[Sequence[str]] = ()
    reshard: bool = True
    ahead: bool = False
    replicas: int = 1


def train(model: str, ways: Mapping[str, Way], rounds: int, steps: int, path: str) -> dict[str, Any]:
    """Trains every way in every round, in shuffled order, on all ranks.

    Args:
        model: of `WORKLOADS`.
        ways: name -> what to do.
        rounds: how often each has its turn.
        steps: of each turn, beside `WARM_UP`.
        path: rank 0 saves everybody's events there.

    Returns:
        ``ms``: way -> the steps of each turn; ``models``: way -> number of its model in events.
    """
    from .. import recording
    from ..parallel.monitoring import group_collectives

    recording.enable()
    group_collectives.record()
    made = {name: _made(model, way) for name, way in ways.items()}
    shuffle = random.Random(0)
    cursor = recording.statistics().recorded
    parts: list[npt.NDArray[np.void]] = []
    taken: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in shuffle.sample(list(ways), len(ways)):
            block(made[name][0], WARM_UP)
            _, cursor = drained(cursor)
            taken[name].append(block(made[name][0], 1 + steps)[1:])  # the first has no end of a step before it
            found, cursor = drained(cursor)
            parts += found
    save(np.concatenate(parts), recording.descriptions(0)[0], path)
    return {"ms": taken, "models": {name: number() for name, (_, number) in made.items()}}


def _made(model: str, way: Way) -> tuple[Step, Callable[[], int]]:
    """A step of training, and the number of the model once it has trained."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from .. import DistributedDataParallel, observe

    torch.manual_seed(0)
    module, batch = WORKLOADS[model]()
    wrapped: nn.Module
    numbered: Any
    if way.kind in ("fully_shard", "replicate"):
        _group(module, way)
        wrapped, numbered = module, observe(module)
    else:
        wrapped = numbered = DistributedDataParallel(module)
    parameters = wrapped.parameters()
    optimizer: torch.optim.Optimizer
    if way.kind == "zero-1":
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-5)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()

    return step, lambda: int(numbered.model_id)


def _group(module: nn.Module, way: Way) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (way.replicas, ranks // way.replicas) if way.replicas > 1 else (ranks,))
    shards = way.kind == "fully_shard"
    make: Callable[..., Any] = fully_shard if shards else replicate
    sharded: list[Any] = []
    for names in way.groups:
        modules = [module.get_submodule(name) for name in names]
        make(modules, mesh=mesh, **({"reshard_after_forward": way.reshard} if shards else {}))
        sharded.append(modules[0])
    make(module, mesh=mesh)
    if way.ahead:
        for one, following in itertools.pairwise(sharded):
            one.register_forward_pre_hook(_asks_for(following))


def _asks_for(following: Any) -> Callable[..., None]:
    def ask(*_: Any) -> None:
        following.unshard(async_op=True)

    return ask
