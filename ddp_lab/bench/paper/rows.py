"""From what the ranks returned to the rows of a result: medians over sets of processes, judged by `noise`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..telling import noise
from .settings import PARTS, Series

__all__ = ["Rows", "breakdown", "of_communication", "of_convergence", "of_steps"]

Rows = list[dict[str, Any]]
_Others = Sequence[float | None]


def of_steps(series: Sequence[Series], raws: Sequence[Mapping[str, Any]], others: _Others, tolerance: float) -> Rows:
    """Rows of the figures about training steps.

    Args:
        series: what was asked for.
        raws: what `ranks.steps.on_ranks` returned in each set of processes.
        others: of each set what other programs took.
        tolerance: see `noise.figure`.

    Returns:
        For each model and variant its fields, ``ms`` and ``ratio`` (to its ``reference``, taken turn by turn), both
        `noise.Figure`; ``parts`` (ms) and ``steps`` (all of them, ms).
    """
    rows = []
    for model in raws[0]:
        for one in series:
            for name, variant in one.variants.items():
                sets = [(raw[model][name], raw[model][one.reference]) for raw in raws]
                ms = [statistics.median(mine["turns"]) for mine, _ in sets]
                ratios = [
                    statistics.median(a / b for a, b in zip(mine["turns"], theirs["turns"], strict=True))
                    for mine, theirs in sets
                ]
                rows.append(
                    {"model": model, "variant": name, "reference": one.reference}
                    | asdict(variant)
                    | {
                        "ms": noise.figure(ms, others, tolerance=tolerance),
                        "ratio": noise.figure(ratios, others, tolerance=tolerance),
                        "parts": {part: statistics.median(mine["parts"][part] for mine, _ in sets) for part in PARTS},
                        "steps": [step for mine, _ in sets for step in mine["steps"]],
                    }
                )
    return rows


def of_communication(raws: Sequence[Mapping[str, Any]], others: _Others, tolerance: float) -> Rows:
    """Rows of figure 2: ``seconds`` of each backend and size, and ``ready`` of each model.

    Args:
        raws: what `ranks.communication.on_ranks` returned in each set of processes.
        others: of each set what other programs took.
        tolerance: see `noise.figure`.
    """
    rows: Rows = []
    for backend, of_sizes in raws[0]["seconds"].items():
        for size in of_sizes:
            seconds = [statistics.median(raw["seconds"][backend][size]) for raw in raws]
            figure = noise.figure(seconds, others, tolerance=tolerance)
            rows.append({"backend": backend, "size": int(size), "seconds": figure})
    for model, first in raws[0]["ready"].items():
        row: dict[str, Any] = {"model": model, "parameters": first["parameters"], "used": first["used"]}
        for which in ("forward", "backward"):
            row[which] = np.median([raw["ready"][model][which] for raw in raws], axis=0).tolist()
        rows.append(row)
    return rows


def of_convergence(raws: Sequence[Sequence[Mapping[str, Any]]]) -> Rows:
    """Rows of figure 11: as of one seed, with the median over the seeds and the range of what is held out.

    Args:
        raws: what `ranks.convergence.on_ranks` returned for each seed.
    """
    rows = []
    for of_seeds in zip(*raws, strict=True):
        row = dict(of_seeds[0])
        row["losses"] = np.median([one["losses"] for one in of_seeds], axis=0).tolist()
        for name in ("held_out", "accuracy"):
            values = [one[name] for one in of_seeds]
            row[name] = statistics.median(values)
            row[f"{name}_range"] = [min(values), max(values)]
        rows.append(row)
    return rows


def breakdown(rows: Rows) -> Rows:
    """Figure 6: for each model and backend the parts of a step with and without overlap, ms, and the gain, percent.

    What is exposed with overlap is by how much the backward takes longer than without any communication.

    Args:
        rows: of `of_steps`.

    Returns:
        ``model``, ``backend``, ``overlap``, ``parts`` and ``gain`` (a `noise.Figure`; 0 without overlap).
    """
    named = {(row["model"], row["variant"]): row for row in rows}
    made = []
    for row in rows:
        if row["alone"]:
            continue
        parts = dict(row["parts"])
        if row["overlap"]:
            alone = named[row["model"], f"{row['backend']}, alone"]["parts"]["backward"]
            parts["communication"] = max(0.0, parts["backward"] - alone)
            parts["backward"] -= parts["communication"]
        ratio = row["ratio"]
        gain = {
            end: 100 * (1 - ratio[other]) for end, other in (("median", "median"), ("low", "high"), ("high", "low"))
        }
        chosen = {name: row[name] for name in ("model", "backend", "overlap")}
        made.append(chosen | {"parts": parts, "gain": gain | {"noisy": ratio["noisy"], "why": ratio["why"]}})
    return made
