"""Measures the memory of gradients and buckets, with our class and with torch's.

Measured with the memory events of torch's profiler: torch's CPU allocator reports each allocation and deallocation, in
Python or in C++, so the sum at each moment is exact. The model has many equal linear layers and the batch one row, so
that almost only parameters, gradients and buckets use memory; the parameters are subtracted. (Gloo's own memory is not
counted; it is the same for both classes. Deallocations by Gloo's threads are not seen, which adds to all later values:
hence no broadcast at construction, barriers between the steps, which let these threads finish, and the smallest value
of several sets of processes.) All values are multiples of the parameters' bytes: 1 is one gradient for each parameter.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.bench.measuring import command, fresh_ranks
from ddp_lab.bench.measuring.workloads import wrappers
from ddp_lab.command_line import count

# name -> (the wrapper's arguments, set_to_none)
CASES: dict[str, tuple[dict[str, bool], bool]] = {
    "views, set to None": ({"gradient_as_bucket_view": True}, True),
    "views, zeros": ({"gradient_as_bucket_view": True}, False),
    "plain, set to None": ({}, True),
    "plain, zeros": ({}, False),
}
_FIRST = 3  # steps that are not like all others: the first assignment, the rebuild, the first after it
_STEPS = 7


def _model(layers: int, width: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]), torch.randn(1, width)


def _train(label: str, layers: int, width: int) -> int:
    """Trains one contestant in one case, with marks for `_figures`; returns the parameters' bytes."""
    who, case = label.split("|")
    options, to_none = CASES[case]
    mark = torch.profiler.record_function
    module, batch = _model(layers, width)
    size = sum(parameter.nbytes for parameter in module.parameters())
    with mark(f"{label}|begin"):
        torch.empty(1)
    with mark(f"{label}|constructor"):
        model = wrappers()[who](module, init_sync=False, **options)
    for step in range(_STEPS):
        with mark(f"{label}|{step}"):
            module.zero_grad(set_to_none=to_none)
            model(batch).sum().backward()
        for _ in range(4):
            dist.barrier()
    module.zero_grad(set_to_none=to_none)
    with mark(f"{label}|idle"):
        torch.empty(1)
    return size


def _figures(label: str, size: int, events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the trace of `torch.profiler` tells about one contestant in one case."""
    spans = {
        event["name"].removeprefix(f"{label}|"): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event["name"].startswith(f"{label}|")
    }
    totals = [
        (event["ts"], float(event["args"]["Total Allocated"])) for event in events if event.get("name") == "[memory]"
    ]

    def peak(name: str) -> float:
        begin, end = spans[name]
        return max(total for at, total in totals if begin <= at <= end)

    base = peak("begin")
    peaks = {name: (peak(name) - base) / size for name in spans}
    steps = [peaks[str(step)] for step in range(_STEPS)]
    return {"peak": max(steps[_FIRST:]), "peak of the first steps": max(steps[:_FIRST]), "idle": peaks["idle"]}


def _measure_cases(cases: Sequence[str], layers: int, width: int) -> dict[str, dict[str, dict[str, float]]]:
    labels = [f"{who}|{case}" for case in cases for who in ("torch", "ours")]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        sizes = {label: _train(label, layers, width) for label in labels}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found: dict[str, dict[str, dict[str, float]]] = {case: {} for case in cases}
    for label, size in sizes.items():
        who, case = label.split("|")
        found[case][who] = _figures(label, size, events)
    return found


def measure(
    cases: Sequence[str] = tuple(CASES), *, layers: int = 24, width: int = 1024, sets: int = 2, ranks: int = 2
) -> dict[str, Any]:
    """Measures on `ranks` Gloo processes.

    Args:
        cases: of `CASES`.
        layers: linear layers of the model.
        width: inputs and outputs of each.
        sets: fresh sets of processes.
        ranks: processes.

    Returns:
        ``cases``: case -> ``"torch"`` and ``"ours"`` -> ``peak`` (of a step in the steady state), ``peak of the first
        steps`` and ``idle`` (after zero_grad), in multiples of the parameters' bytes; and ``"ours / torch"``, the
        ratio of the peaks; beside it what was asked for.
    """
    measured = [fresh_ranks.run(_measure_cases, tuple(cases), layers, width, ranks=ranks) for _ in range(sets)]
    found: dict[str, Any] = {}
    for case in cases:
        one = found[case] = {who: _least([of_set[case][who] for of_set in measured]) for who in ("torch", "ours")}
        one["ours / torch"] = one["ours"]["peak"] / one["torch"]["peak"]
    return {
        "torch": torch.__version__,
        "ranks": ranks,
        "number of sets": sets,
        "layers": layers,
        "width": width,
        "cases": found,
    }


def _least(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: min(one[name] for one in figures) for name in figures[0]}


def table(found: dict[str, Any]) -> str:
    size = found["layers"] * (found["width"] + 1) * found["width"] * 4 / 2**20
    names = {"peak": "peak", "peak of the first steps": "first steps", "idle": "after zero_grad"}
    lines = [["case", *(f"{name}, {who}" for name in names.values() for who in ("torch", "ours")), "ours / torch"]]
    for case, one in found["cases"].items():
        figures = [f"{one[who][what]:.3f}" for what in names for who in ("torch", "ours")]
        lines.append([case, *figures, f"{one['ours / torch']:.3f}"])
    told = [
        f"torch {found['torch']}, {found['ranks']} Gloo ranks, {size:.0f} MiB of parameters; gradients and buckets in "
        "multiples of that: peak of a step, peak of the first steps, and what is left after zero_grad",
        *command.aligned(lines, left=1),
    ]
    best, usual = "views, set to None", "plain, set to None"
    if best in found["cases"] and usual in found["cases"]:
        ratio = found["cases"][best]["ours"]["peak"] / found["cases"][usual]["torch"]["peak"]
        told.append(f"ours with {best} / torch's default ({usual}): {ratio:.3f}")
    return "\n".join(told)


OPTIONS = (
    command.option("--cases", nargs="+", choices=list(CASES), metavar="NAME", help="; ".join(CASES)),
    command.option("--layers", type=count, help="number of linear layers of the model"),
    command.option("--width", type=count, help="inputs and outputs of each layer"),
    command.SETS,
    command.RANKS,
)
