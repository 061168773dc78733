"""Compares predicted with measured peak memory of DDP, ZeRO-1 and `fully_shard`.

Real Gloo ranks train each model with our DistributedDataParallel and Adam; one step is measured
(`ddp_lab.measure_memory`). From that recording alone the peaks under each strategy are predicted
(`Timeline.predicted_memory`). Then fresh ranks train the model under each strategy and measure its peak. All peaks are
bytes of tensors, of the rank that holds most. `fully_shard` is applied to each module with a number for a name, and to
the root; with ``--keep``, groups keep their parameters after the forward, and with ``--pairs`` two such modules are one
group.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import recording
from ddp_lab.bench.measuring import command, fresh_ranks
from ddp_lab.bench.measuring.command import option
from ddp_lab.bench.measuring.workloads import WORKLOADS
from ddp_lab.command_line import count
from ddp_lab.formatting import size
from ddp_lab.parallel.distributed import DistributedDataParallel
from ddp_lab.parallel.monitoring.memory import measure_memory
from ddp_lab.simulation.parameter_groups import numbered_modules
from ddp_lab.timeline.tables.memory import STRATEGIES
from ddp_lab.timeline.timeline import Timeline

_RECORDED = "recorded"
_STEPS = 4  # before one is measured: buckets are rebuilt, the optimizer's state is made


@dataclass(frozen=True)
class _How:
    """How `fully_shard` is applied: groups keep their parameters, and each has so many modules."""

    keep: bool
    modules: int

    def groups(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """Names of the modules of each group, of a model with such parameters."""
        each = numbered_modules(names)
        return [each[first : first + self.modules] for first in range(0, len(each), self.modules)]

    def sharded(self, module: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for group in self.groups(name for name, _ in module.named_parameters()):
            fully_shard([module.get_submodule(one) for one in group], reshard_after_forward=not self.keep)
        fully_shard(module)
        return module


def _prepared(strategy: str, module: nn.Module, how: _How) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if strategy == "fully_shard":
        model = how.sharded(module)
    else:
        model = DistributedDataParallel(module, gradient_as_bucket_view=strategy == "ddp, views")
    if strategy == "zero-1":
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-5)
    return model, torch.optim.Adam(model.parameters(), lr=1e-5)


def _run(strategy: str, workload: str, how: _How) -> dict[str, Any]:
    """One rank's measured peak; of all ranks what they describe, and the largest peak."""
    torch.manual_seed(0)
    module, batch = WORKLOADS[workload]()
    model, optimizer = _prepared(strategy, module, how)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(_STEPS):
        step()
    found = measure_memory(step, model, optimizer)
    own = recording.descriptions(0)[0] if strategy == _RECORDED else []
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (found.peak, found.where, own))
    peak, where, _ = max(told, key=lambda one: one[0])
    return {"peak": peak, "where": where, "described": [one for _, _, one in told]}


def _case(workload: str, ranks: int, how: _How) -> dict[str, Any]:
    timeline = Timeline()
    recorded = fresh_ranks.run(_run, _RECORDED, workload, how, ranks=ranks)
    for rank, descriptions in enumerate(recorded["described"]):
        for one in descriptions:
            timeline.describe(rank, one)
    groups = how.groups(name for name, _ in WORKLOADS[workload]()[0].named_parameters())
    rows = timeline.predicted_memory(groups=groups, reshard_after_forward=not how.keep).to_dict("records")
    found: dict[str, Any] = {}
    for row in rows:
        real = fresh_ranks.run(_run, row["strategy"], workload, how, ranks=ranks)
        error = row["peak_bytes"] / real["peak"] - 1
        found[row["strategy"]] = {
            "predicted": int(row["peak_bytes"]),
            "measured": int(real["peak"]),
            "error": error,
            "where": row["where"],
            "measured where": real["where"],
        }
    return found


def measure(
    models: Sequence[str] = tuple(WORKLOADS), ranks: Sequence[int] = (2, 4), *, keep: bool = False, pairs: bool = False
) -> dict[str, Any]:
    """Records, predicts and measures; see the module.

    Args:
        models: of `WORKLOADS`.
        ranks: world sizes.
        keep: `fully_shard` with ``reshard_after_forward=False``.
        pairs: `fully_shard` of two modules at once.

    Returns:
        ``cases``: a list with ``model``, ``ranks`` and by strategy ``predicted`` and ``measured`` bytes, ``error``
        (predicted / measured - 1), ``where`` and ``measured where``; ``medians``: strategy -> median of the errors'
        sizes.
    """
    cases: list[dict[str, Any]] = []
    how = _How(keep, 2 if pairs else 1)
    for model in models:
        for world_size in ranks:
            cases.append({"model": model, "ranks": world_size, "strategies": _case(model, world_size, how)})
    errors = {name: [abs(one["strategies"][name]["error"]) for one in cases] for name in STRATEGIES}
    medians = {name: statistics.median(found) for name, found in errors.items()}
    return {"torch": torch.__version__, "keep": keep, "pairs": pairs, "cases": cases, "medians": medians}


def table(found: dict[str, Any]) -> str:
    lines = [["model", "ranks", "strategy", "predicted", "measured", "error", "where, predicted", "measured"]]
    for case in found["cases"]:
        for name, one in case["strategies"].items():
            sizes = [size(one["predicted"]), size(one["measured"])]
            error = f"{100 * one['error']:+.1f} %"
            lines.append([case["model"], str(case["ranks"]), name, *sizes, error, one["where"], one["measured where"]])
    medians = ", ".join(f"{name} {100 * one:.1f} %" for name, one in found["medians"].items())
    kept = "keep their parameters after the forward" if found["keep"] else "are resharded after the forward"
    kept = f"of two modules {kept}" if found["pairs"] else kept
    about = f"torch {found['torch']}, Gloo ranks, Adam; peak bytes of tensors in a step; parameter groups {kept}"
    return "\n".join([about, *command.aligned(lines, left=3), f"median of |error|: {medians}"])


OPTIONS = (
    option("--models", nargs="+", choices=list(WORKLOADS), metavar="NAME", help=", ".join(WORKLOADS)),
    option("--ranks", nargs="+", type=count, metavar="N", help="world sizes"),
    option("--keep", action="store_true", help="fully_shard with reshard_after_forward=False"),
    option("--pairs", action="store_true", help="fully_shard of two modules at once"),
)
