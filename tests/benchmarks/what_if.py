"""Compares predicted with measured step times.

Real Gloo ranks train each model with each bucket size limit (cap), in turns; the link between them is measured while
they are idle. The simulator gets the link's times for the smallest and the largest world size; the workload of each
model and world size as recorded with one cap, `--base`, and its step time ([Note: the anchor] in
`ddp_lab/simulation/calibration.py`); and, to calibrate contention, the measured steps of the caps `--fit` for all
models but the last and for those two world sizes. It then predicts every other step: caps, a model and a world size of
which no other measured step was used. Contention differs with the number of ranks, because they share the cores: it is
calibrated for each of the two world sizes, and interpolated for those in between. A round's workload predicts that
round's steps; the median over the rounds counts, so that changes of the machine's speed between rounds do less harm.
[Note: the second look] explains how the predicted best cap is compared with the measured best one. `--mbit` trains over
a link shaped to this many megabits per second (needs root). Run it on a quiet machine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ddp_lab.bench.measuring import command, fresh_ranks
from ddp_lab.bench.measuring.command import option
from ddp_lab.bench.measuring.workloads import WORKLOADS
from ddp_lab.command_line import count, positive
from ddp_lab.parallel.monitoring.link import measure as measure_communication
from ddp_lab.simulation.calibration import Measured, anchored, calibrated
from ddp_lab.simulation.link_model import CommModel, Point
from ddp_lab.simulation.simulator import Configuration, simulate_many
from ddp_lab.simulation.workload import Workload
from ddp_lab.timeline import what_if
from ddp_lab.timeline.timeline import Timeline
from notebooks.paper.shaped_link import shaped
from tests.benchmarks import what_if_ranks
from tests.benchmarks.second_look import NOT_NEEDED, second_look, words

_MODELS = ("transformer", "small_tensors", "conv_net")
_CAPS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0)
_LANES = 2  # threads of torch's ProcessGroupGloo


@dataclass(frozen=True)
class _Case:
    """A model on some ranks.

    Attributes:
        model, ranks: which.
        rounds: each round's workload, as recorded with the base cap.
        measured: cap -> the measured steps of each round in ms.
        same: cap -> the smallest of the caps that make the same buckets.
    """

    model: str
    ranks: int
    rounds: list[Workload]
    measured: dict[float, list[float]]
    same: dict[float, float]


def measure(
    models: Sequence[str] = _MODELS,
    ranks: Sequence[int] = (2, 3, 4),
    caps: Sequence[float] = _CAPS,
    *,
    base: float = 25.0,
    fit: Sequence[float] = (0.5, 4.0),
    rounds: int = 9,
    steps: int = 9,
    mbit: float | None = None,
    simulator: bool = False,
) -> dict[str, Any]:
    """Trains, predicts and scores; see the module.

    Args:
        models: of `WORKLOADS`; the last one is held out of the calibration.
        ranks: their numbers; all but the smallest and the largest are held out of it.
        caps: bucket caps in MiB.
        base: the cap of which the workload is recorded.
        fit: caps whose steps calibrate the contention.
        rounds: how often each cap has its turn.
        steps: of a turn.
        mbit: shape the link to so many megabits a second.
        simulator: only time the simulator itself.

    Returns:
        What `_score` returns, with ``seconds`` and what was asked for.
    """
    if simulator:
        return _simulator_speed()
    began = time.monotonic()
    every = sorted({*caps, base, *fit})
    points: dict[int, list[Point]] = {}
    beside: dict[int, tuple[float, float]] = {}
    cases = []
    for world in ranks:
        with shaped(world, mbit) as prepare:
            if world in (min(ranks), max(ranks)):
                found = fresh_ranks.run(partial(measure_communication, repeats=9), ranks=world, prepare=prepare)
                points[world] = [(size, ns, world) for size, ns in found["points"]]
                beside[world] = (found["sharing"], found["launch_ns"])
            cases += [_case(model, world, every, base, rounds, steps, prepare) for model in models]
    made = _score(cases, _links(points, beside, ranks), base, fit)
    for one in made["best"]:
        one["again"] = _again(one, 2 * rounds, steps, mbit)
    asked = {"base": base, "fit": list(fit), "rounds": rounds, "steps": steps, "mbit": mbit}
    return made | asked | {"seconds": time.monotonic() - began}


def _trained(
    model: str, ranks: int, caps: Sequence[float], rounds: int, steps: int, prepare: fresh_ranks.Prepare | None
) -> tuple[Timeline, dict[int, float]]:
    """What was recorded, and which generation of buckets is of which cap."""
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        arguments = (model, caps, rounds, steps, file.name)
        made = fresh_ranks.run(what_if_ranks.train, *arguments, ranks=ranks, prepare=prepare)
        return what_if_ranks.load(file.name), {int(generation): cap for generation, cap in made.items()}


def _typical_ms(timeline: Timeline, generation: int) -> float:
    return float(np.median(what_if.step_times(timeline, generation=generation))) / 1e6


def _case(
    model: str,
    ranks: int,
    caps: Sequence[float],
    base: float,
    rounds: int,
    steps: int,
    prepare: fresh_ranks.Prepare | None,
) -> _Case:
    timeline, made = _trained(model, ranks, caps, rounds, steps, prepare)
    reducer = timeline.reducers()[-1].reducer
    recorded: list[Workload] = []
    measured: dict[float, list[float]] = {cap: [] for cap in caps}
    buckets: dict[float, str] = {}
    for generation, cap in made.items():
        if cap == base:
            recorded.append(what_if.workload(timeline, generation=generation))
        measured[cap].append(_typical_ms(timeline, generation))
        buckets[cap] = str([one["parameters"] for one in timeline.assignment(reducer, generation)["buckets"]])
    same = {cap: min(other for other in caps if buckets[other] == buckets[cap]) for cap in caps}
    return _Case(model, ranks, recorded, measured, same)


def _again(one: dict[str, Any], rounds: int, steps: int, mbit: float | None) -> dict[str, Any]:
    """New turns of the cap that was predicted to be the best and of the one that was measured to be."""
    caps = [one["cap"], one["measured_best"]]
    if caps[0] == caps[1]:
        return NOT_NEEDED
    with shaped(one["ranks"], mbit) as prepare:
        timeline, made = _trained(one["model"], one["ranks"], caps, rounds, steps, prepare)
    turns = {cap: [_typical_ms(timeline, number) for number, of in made.items() if of == cap] for cap in caps}
    return second_look(*turns.values())


def _links(
    points: Mapping[int, list[Point]], beside: Mapping[int, tuple[float, float]], worlds: Sequence[int]
) -> dict[int, CommModel]:
    """The link of each world: of those that were measured their own, of the others what all points say together."""
    together = CommModel.fitted([one for some in points.values() for one in some], algorithm=None, lanes=_LANES)
    sharing, launch_ns = np.mean(list(beside.values()), axis=0).tolist()
    made = {}
    for ranks in worlds:
        if ranks in points:
            own = CommModel.fitted(points[ranks], algorithm=together.algorithm, lanes=_LANES)
            made[ranks] = replace(own, sharing=beside[ranks][0], launch_ns=beside[ranks][1])
        else:
            made[ranks] = replace(together, sharing=sharing, launch_ns=launch_ns)
    return made


def _calibrated(runs: Mapping[int, list[Measured]], links: Mapping[int, CommModel]) -> dict[int, CommModel]:
    """The links with the contention of each world, interpolated where no step was to be seen."""
    found = {ranks: calibrated(of_world, links[ranks]) for ranks, of_world in runs.items() if of_world}
    if not found:  # every model and world is held out
        return dict(links)
    known = sorted(found)
    made = {}
    for ranks, link in links.items():
        slowdowns = {
            name: float(np.interp(ranks, known, [getattr(found[one], name) for one in known]))
            for name in ("compute_slowdown", "comm_slowdown")
        }
        made[ranks] = found.get(ranks) or replace(link, **slowdowns)  # type: ignore[arg-type]
    return made


def _score(cases: Sequence[_Case], links: Mapping[int, CommModel], base: float, fit: Sequence[float]) -> dict[str, Any]:
    """Calibrates contention with the cases that are not held out and predicts the rest.

    Args:
        cases: what was measured.
        links: of each number of ranks.
        base: cap of which the workloads were recorded.
        fit: caps that calibrate.

    Returns:
        ``links`` (words, by ranks), ``cells`` (one for each predicted step: model, ranks, cap, measured and predicted
        ms, error, held_out: what of it the calibration has not seen), ``errors`` of all of them and by what is held
        out (cells, median, p90, worst), ``best`` (for each model and world ``cap``, the one that is predicted to be
        the best, and ``measured_best``; of caps that make the same buckets the smallest).
    """
    known, ranks = list(dict.fromkeys(case.model for case in cases))[:-1], [case.ranks for case in cases]
    unseen = [
        (["model"] if case.model not in known else []) + (["world"] if min(ranks) < case.ranks < max(ranks) else [])
        for case in cases
    ]
    runs: dict[int, list[Measured]] = {ranks: [] for ranks in links}
    for case, out in zip(cases, unseen, strict=True):
        for number, workload in enumerate(case.rounds if not out else ()):
            taken = [1e6 * case.measured[cap][number] for cap in fit]
            runs[case.ranks].append(Measured(workload, [Configuration(cap) for cap in fit], taken))
    chosen = _calibrated(runs, links)
    cells: list[dict[str, Any]] = []
    best: list[dict[str, Any]] = []
    for case, out in zip(cases, unseen, strict=True):
        about = {"model": case.model, "ranks": case.ranks}
        rounds = _predicted(case, chosen[case.ranks])
        predicted = {cap: float(np.median(times)) for cap, times in rounds.items()}
        steps = _steady(case)
        fastest, measured_best = (min(some, key=lambda cap: some[cap]) for some in (predicted, steps))
        best.append(about | {"cap": case.same[fastest], "measured_best": measured_best})
        for cap, value in predicted.items():
            if cap != base and (out or cap not in fit):
                error = float(np.median(np.divide(rounds[cap], case.measured[cap]))) - 1
                cells.append(
                    about
                    | {"cap": cap, "measured": float(np.median(case.measured[cap])), "predicted": value}
                    | {"error": error, "held_out": out or ["cap"]}
                )
    return {
        "links": {ranks: repr(one) for ranks, one in chosen.items()},
        "cells": cells,
        "best": best,
        "errors": {kind: _errors(cells, kind) for kind in ("all", "cap", "model", "world")},
    }


def _predicted(case: _Case, link: CommModel) -> dict[float, list[float]]:
    """Cap -> predicted step of each round in ms."""
    tried = [Configuration(cap) for cap in case.measured]
    both = [anchored(one, link) for one in case.rounds]
    rounds = [(simulate_many(workload, tried, own).step_ns / 1e6).tolist() for workload, own in both]
    return dict(zip(case.measured, map(list, zip(*rounds, strict=True)), strict=True))


def _steady(case: _Case) -> dict[float, float]:
    """Measured steps by cap (one of those that make the same buckets), in multiples of each round's mean over the caps:
    as if all rounds had been equally fast."""
    table = np.array(list(case.measured.values()))
    relative = dict(zip(case.measured, table / table.mean(axis=0), strict=True))
    return {
        cap: float(np.median([relative[other] for other, of in case.same.items() if of == cap]))
        for cap in sorted(set(case.same.values()))
    }


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


def _simulator_speed(configurations: int = 1000, buckets: int = 200, *, ranks: int = 2) -> dict[str, Any]:
    """Times `simulate_many` on configurations that all have a bucket assignment of their own.

    Args:
        configurations: how many.
        buckets: of each; there are twice as many parameters.
        ranks: whose times are replayed.

    Returns:
        ``seconds`` (median of five times), ``configurations``, ``buckets``, ``ranks``.
    """
    made = Workload.made_up([2**19] * (2 * buckets), forward_ns=1e8, backward_ns=2e8, other_ns=1e7)
    workload = replace(
        made,
        world_size=ranks,
        **{name: getattr(made, name).repeat(ranks, axis=0) for name in ("ready_ns", "busy_ns")},
        **{name: getattr(made, name).repeat(ranks) for name in ("computed_ns", "forward_ns", "other_ns")},
    )
    link = CommModel(2e4, 0.1, lanes=2, compute_slowdown=0.3, comm_slowdown=0.3)
    # A cap a little below a mebibyte is reached by the same two parameters, but assigned by itself.
    tried = [Configuration(1 - 1e-6 * number) for number in range(configurations)]
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        simulate_many(workload, tried, link)
        times.append(time.perf_counter() - begin)
    asked = {"configurations": configurations, "buckets": buckets, "ranks": ranks}
    return {"seconds": statistics.median(times)} | asked


def table(found: dict[str, Any]) -> str:
    if "configurations" in found:
        return (
            f"{found['configurations']} configurations of {found['buckets']} buckets on {found['ranks']} ranks: "
            f"{found['seconds']:.2f} s"
        )
    link = "over loopback" if found["mbit"] is None else f"shaped to {found['mbit']:g} Mbit/s"
    cells = [["model", "ranks", "cap MiB", "measured", "predicted", "error", "not used in the fit"]]
    for one in found["cells"]:
        times = [f"{one[what]:.2f}" for what in ("measured", "predicted")]
        told = [*times, f"{100 * one['error']:+.1f}%", ", ".join(one["held_out"])]
        cells.append([one["model"], f"{one['ranks']}", f"{one['cap']:g}", *told])
    lines = [
        f"Gloo ranks {link}, {found['rounds']} rounds of {found['steps']} steps, {found['seconds']:.0f} s",
        *(f"{ranks} ranks: {link}" for ranks, link in found["links"].items()),
        *command.aligned(cells, left=1),
    ]
    for kind, values in found["errors"].items():
        if values["cells"]:
            lines.append(
                f"{kind:6} {values['cells']:3} steps: error {100 * values['median']:.1f} % median, "
                f"{100 * values['p90']:.1f} % at p90, {100 * values['worst']:.1f} % worst"
            )
    for one in found["best"]:
        caps = f"predicted {one['cap']:g} MiB, measured {one['measured_best']:g} MiB"
        lines.append(f"best cap for {one['model']} on {one['ranks']} ranks: {caps}: {words(one['again'])}")
    return "\n".join(lines)


OPTIONS = (
    option("--models", nargs="+", choices=list(WORKLOADS), metavar="NAME", help=", ".join(WORKLOADS)),
    option("--ranks", nargs="+", type=count, help="numbers of ranks"),
    option("--caps", nargs="+", type=positive, help="bucket size limits, in MiB"),
    option("--base", type=positive, help="cap with which workloads are recorded"),
    option("--fit", nargs="+", type=positive, help="caps used to calibrate contention"),
    option("--rounds", type=count, help="turns of each cap"),
    option("--steps", type=count, help="steps per turn"),
    option("--mbit", type=positive, help="shape the link to this many megabits per second (needs root)"),
    option("--simulator", action="store_true", help="only time the simulator itself"),
)
