"""`ddp-lab bench what-if`: are predicted steps the ones that are measured?

Real Gloo ranks train each model with each bucket cap, in turns; the link between them is measured while they are idle.
What the simulator gets of all this: the link's times for the smallest and the largest world; the workload of each model
and world as recorded with one cap, `--base`; and, to calibrate contention, the measured steps of the caps `--fit` for
all models but the last and for those two worlds. It then predicts every other step: caps, a model and a world of
which no measured step was used. A round's workload predicts that round's steps; the median over the rounds counts, so
that a machine that changes its speed from round to round does less harm. `--mbit` trains over a link shaped to so many
megabits a second (needs root). Run it on a quiet machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..client import workloads
from ..insight.calibrate import Measured, calibrated
from ..insight.link_model import LinkModel
from ..insight.simulate import Configuration, simulate_many
from ..insight.workload import Workload
from . import fresh_ranks, simulator_speed, what_if_ranks
from .command import new_parser, show
from .shaped_link import ShapedLink
from .workloads import WORKLOADS

__all__ = ["Case", "main", "measure", "score"]

_MODELS = ("transformer", "small_tensors", "conv_net")
_CAPS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0)
_LANES = 2  # threads of torch's ProcessGroupGloo


@dataclass(frozen=True)
class Case:
    """A model on some ranks: each round's workload, as recorded with the base cap, and measured steps (ms) by cap."""

    model: str
    ranks: int
    rounds: list[Workload]
    measured: dict[float, list[float]]


def measure(
    models: Sequence[str] = _MODELS,
    worlds: Sequence[int] = (2, 3, 4),
    caps_mb: Sequence[float] = _CAPS,
    *,
    base: float = 25.0,
    fit: Sequence[float] = (0.5, 4.0),
    rounds: int = 5,
    steps: int = 15,
    mbit: float | None = None,
) -> dict[str, Any]:
    """Trains, predicts and scores; see the module.

    Args:
        models: of `WORKLOADS`; the last one is held out of the calibration.
        worlds: numbers of ranks; all but the smallest and the largest are held out of it.
        caps_mb: bucket caps in MiB.
        base: the cap of which the workload is recorded.
        fit: caps whose steps calibrate the contention.
        rounds: how often each cap has its turn.
        steps: of a turn.
        mbit: shape the link to so many megabits a second.

    Returns:
        What `score` returns, with ``seconds`` and what was asked for.
    """
    began = time.monotonic()
    caps = sorted({*caps_mb, base, *fit})
    points, beside, cases = [], [], []
    for ranks in worlds:
        with _prepared(ranks, mbit) as prepare:
            if ranks in (min(worlds), max(worlds)):
                found = fresh_ranks.run(what_if_ranks.measure_link, 9, ranks=ranks, prepare=prepare)
                points += [(size, ns, ranks) for size, ns in found["points"]]
                beside.append((found["sharing"], found["launch_ns"]))
            cases += [_case(model, ranks, caps, base, rounds, steps, prepare) for model in models]
    sharing, launch_ns = np.mean(beside, axis=0).tolist()
    fitted = LinkModel.fitted(points, algorithm=None, lanes=_LANES)
    link = replace(fitted, sharing=sharing, launch_ns=launch_ns)
    asked = {"base": base, "fit": list(fit), "rounds": rounds, "steps": steps, "mbit": mbit}
    return score(cases, link, base, fit) | asked | {"seconds": time.monotonic() - began}


@contextmanager
def _prepared(ranks: int, mbit: float | None) -> Iterator[Callable[[int], None] | None]:
    with nullcontext() if mbit is None else ShapedLink(ranks, mbit) as prepare:
        yield prepare


def _case(
    model: str,
    ranks: int,
    caps: Sequence[float],
    base: float,
    rounds: int,
    steps: int,
    prepare: Callable[[int], None] | None,
) -> Case:
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        arguments = (model, caps, rounds, steps, file.name)
        made = fresh_ranks.run(what_if_ranks.train, *arguments, ranks=ranks, prepare=prepare)
        timeline = what_if_ranks.load(file.name)
    recorded: list[Workload] = []
    measured: dict[float, list[float]] = {cap: [] for cap in caps}
    for generation, cap in made.items():
        if cap == base:
            recorded.append(workloads.workload(timeline, generation=int(generation)))
        measured[cap].append(float(np.median(workloads.step_times(timeline, generation=int(generation)))) / 1e6)
    return Case(model, ranks, recorded, measured)


def score(cases: Sequence[Case], link: LinkModel, base: float, fit: Sequence[float]) -> dict[str, Any]:
    """Calibrates contention with the cases that are not held out and predicts the rest.

    Returns:
        ``link`` (words), ``fit`` of the link, ``cells`` (one for each predicted step: model, ranks, cap, measured and
        predicted ms, error, held_out: what of it the calibration has not seen), ``median_error`` and ``p90_error`` of
        all of them and by what is held out, ``best`` (for each model and world the cap chosen and what it costs beyond
        the best measured one).
    """
    known, ranks = list(dict.fromkeys(case.model for case in cases))[:-1], [case.ranks for case in cases]
    unseen = [
        (["model"] if case.model not in known else []) + (["world"] if min(ranks) < case.ranks < max(ranks) else [])
        for case in cases
    ]
    runs = [
        Measured(workload, [Configuration(cap) for cap in fit], [1e6 * case.measured[cap][number] for cap in fit])
        for case, out in zip(cases, unseen, strict=True)
        if not out
        for number, workload in enumerate(case.rounds)
    ]
    chosen = calibrated(runs, link)
    cells: list[dict[str, Any]] = []
    best: list[dict[str, Any]] = []
    for case, out in zip(cases, unseen, strict=True):
        about = {"model": case.model, "ranks": case.ranks}
        rounds = _predicted(case, chosen)
        predicted = {cap: float(np.median(times)) for cap, times in rounds.items()}
        steps = {cap: float(np.median(times)) for cap, times in _steady(case).items()}
        taken = min(predicted, key=lambda cap: predicted[cap])
        best.append(about | {"cap": taken, "cost": steps[taken] / min(steps.values()) - 1})
        for cap, value in predicted.items():
            if cap != base and (out or cap not in fit):
                error = float(np.median(np.divide(rounds[cap], case.measured[cap]))) - 1
                cells.append(
                    about
                    | {"cap": cap, "measured": float(np.median(case.measured[cap])), "predicted": value}
                    | {"error": error, "held_out": out or ["cap"]}
                )
    return {
        "link": repr(chosen),
        "r2": chosen.fit.r2 if chosen.fit else None,
        "cells": cells,
        "best": best,
        "errors": {kind: _errors(cells, kind) for kind in ("all", "cap", "model", "world")},
    }


def _predicted(case: Case, link: LinkModel) -> dict[float, list[float]]:
    """Cap -> predicted step of each round in ms."""
    tried = [Configuration(cap) for cap in case.measured]
    rounds = [(simulate_many(one, tried, link).step_ns / 1e6).tolist() for one in case.rounds]
    return dict(zip(case.measured, map(list, zip(*rounds, strict=True)), strict=True))


def _steady(case: Case) -> dict[float, list[float]]:
    """The measured steps as if all rounds had been equally fast: multiples of each round's mean over the caps."""
    table = np.array(list(case.measured.values()))
    return dict(zip(case.measured, (table / table.mean(axis=0)).tolist(), strict=True))


def _errors(cells: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    chosen = [abs(one["error"]) for one in cells if kind == "all" or kind in one["held_out"]]
    if not chosen:
        return {"cells": 0}
    return {
        "cells": len(chosen),
        "median": float(np.median(chosen)),
        "p90": float(np.percentile(chosen, 90)),
        "worst": max(chosen),
    }


def _table(found: dict[str, Any]) -> str:
    link = "over loopback" if found["mbit"] is None else f"shaped to {found['mbit']:g} Mbit/s"
    lines = [
        f"Gloo ranks {link}, {found['rounds']} rounds of {found['steps']} steps, {found['seconds']:.0f} s",
        f"{found['link']}",
        f"{'model':14} {'ranks':>5} {'cap MiB':>8} {'measured':>9} {'predicted':>9} {'error':>7}  not seen in the fit",
    ]
    for one in found["cells"]:
        lines.append(
            f"{one['model']:14} {one['ranks']:5} {one['cap']:8g} {one['measured']:9.2f} {one['predicted']:9.2f} "
            f"{100 * one['error']:+6.1f}%  {', '.join(one['held_out'])}"
        )
    for kind, values in found["errors"].items():
        if values["cells"]:
            lines.append(
                f"{kind:6} {values['cells']:3} steps: error {100 * values['median']:.1f} % median, "
                f"{100 * values['p90']:.1f} % at p90, {100 * values['worst']:.1f} % worst"
            )
    for one in found["best"]:
        cost = f"{100 * one['cost']:.1f} % over the best measured"
        lines.append(f"best cap for {one['model']} on {one['ranks']} ranks: {one['cap']:g} MiB, {cost}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    parser = new_parser("what-if", __doc__)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(_MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--caps", nargs="+", type=float, default=list(_CAPS), help="MiB")
    parser.add_argument("--base", type=float, default=25.0, help="cap of which workloads are recorded (%(default)s)")
    parser.add_argument("--fit", nargs="+", type=float, default=[0.5, 4.0], help="caps that calibrate contention")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each cap (%(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="of a turn (%(default)s)")
    parser.add_argument("--mbit", type=float, help="shape the link to so many megabits a second (needs root)")
    parser.add_argument("--simulator", action="store_true", help="only time the simulator itself")
    given = parser.parse_args(argv)
    if given.simulator:
        speed = simulator_speed.measure()
        show(speed, simulator_speed.words(speed), given.json)
        return 0
    found = measure(
        given.models,
        given.ranks,
        given.caps,
        base=given.base,
        fit=given.fit,
        rounds=given.rounds,
        steps=given.steps,
        mbit=given.mbit,
    )
    show(found, _table(found), given.json)
    return 0
