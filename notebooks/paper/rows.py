"""The rows of a result (medians over sets, with noise checks) from the ranks' results, and their text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ddp_lab.bench.measuring import noise
from ddp_lab.bench.measuring.command import aligned

from .settings import PARTS, Series

__all__ = ["breakdown", "link", "of_communication", "of_convergence", "of_steps", "over", "table", "values"]

_Rows = list[dict[str, Any]]


def of_steps(series: Sequence[Series], raws: Sequence[Mapping[str, Any]], judge: noise.Judge) -> _Rows:
    """Rows of the figures about training steps.

    Args:
        series: what was asked for.
        raws: what `steps.on_ranks` returned in each set of processes.
        judge: makes figures of sets.

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
                        "ms": judge(ms),
                        "ratio": judge(ratios),
                        "parts": {part: statistics.median(mine["parts"][part] for mine, _ in sets) for part in PARTS},
                        "steps": [step for mine, _ in sets for step in mine["steps"]],
                    }
                )
    return rows


def of_communication(raws: Sequence[Mapping[str, Any]], judge: noise.Judge) -> _Rows:
    """Rows of figure 2: ``seconds`` of each backend and size, and ``ready`` of each model.

    Args:
        raws: what `communication.on_ranks` returned in each set of processes.
        judge: makes figures of sets.
    """
    rows: _Rows = []
    for backend, of_sizes in raws[0]["seconds"].items():
        for size in of_sizes:
            seconds = [statistics.median(raw["seconds"][backend][size]) for raw in raws]
            rows.append({"backend": backend, "size": int(size), "seconds": judge(seconds)})
    for model, first in raws[0]["ready"].items():
        row: dict[str, Any] = {"model": model, "parameters": first["parameters"], "used": first["used"]}
        for which in ("forward", "backward"):
            row[which] = np.median([raw["ready"][model][which] for raw in raws], axis=0).tolist()
        rows.append(row)
    return rows


def of_convergence(raws: Sequence[Sequence[Mapping[str, Any]]]) -> _Rows:
    """Rows of figure 11: as of one seed, with the median over the seeds and the range of what is held out.

    Args:
        raws: what `convergence.on_ranks` returned for each seed.
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


def breakdown(rows: _Rows) -> _Rows:
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
        ends = {"median": "median", "low": "high", "high": "low"}
        gain = {end: 100 * (1 - ratio[other]) for end, other in ends.items()}
        chosen = {name: row[name] for name in ("model", "backend", "overlap")}
        made.append(chosen | {"parts": parts, "gain": gain | {"noisy": ratio["noisy"], "why": ratio["why"]}})
    return made


def table(found: Mapping[str, Any], keep: bool = False) -> str:
    """The measured values, and below them the published ones.

    Args:
        found: of `result`.
        keep: show what is too noisy, too.
    """
    of_figure = {2: _communication, 6: _breakdown, 11: _convergence}.get(found["figure"], _steps)
    torch = f"torch {found['torch']}, " if "torch" in found else ""
    threads = f" with {found['threads']} thread each" if "threads" in found else ""
    spread = "" if found["number of sets"] == 1 else " (from .. to)"
    about = f"figure {found['figure']}, {found['title']}: {torch}{found['ranks']} ranks{threads}{link(found)}; "
    texts = [f"{about}medians{spread} {over(found)}"]
    texts += ["\n".join(aligned(lines, left)) for left, lines in of_figure(found, keep)]
    if found["published"]:
        texts.append("\n".join(["the paper:", *map(_published, found["published"])]))
    return "\n\n".join(texts)


def link(found: Mapping[str, Any]) -> str:
    """What is said of a link that was shaped."""
    return f", links of {found['mbit']:g} Mbit/s, {found['delay_ms']:g} ms away" if found.get("mbit") else ""


def over(found: Mapping[str, Any]) -> str:
    """What medians are taken over; a result that is not of fresh processes is one of a notebook."""
    sets = found["number of sets"]
    if found["figure"] == 11:
        return f"over {sets} seed{'' if sets == 1 else 's'}"
    return f"over {noise.fresh_sets(sets)}" if "torch" in found else "of one run"


_Table = tuple[int, list[list[str]]]  # how many columns are aligned to the left, and lines


def _steps(found: Mapping[str, Any], keep: bool) -> list[_Table]:
    lines = [["model", "variant", "step ms", "against", "ratio"]]
    for row in found["rows"]:
        told = [noise.told(row["ms"], 2, keep), row["reference"], noise.told(row["ratio"], 3, keep)]
        lines.append([row["model"], row["variant"], *told])
    return [(2, lines)]


def _breakdown(found: Mapping[str, Any], keep: bool) -> list[_Table]:
    lines = [["model", "backend", "overlap", *(f"{part} ms" for part in PARTS), "overlap saves"]]
    for one in found["breakdown"]:
        gain, overlap = one["gain"], "yes" if one["overlap"] else "no"
        parts = ["-" if gain["noisy"] and not keep else f"{one['parts'][part]:.2f}" for part in PARTS]
        saves = noise.shown(gain, f"{noise.spread(gain, 1)} %", keep) if one["overlap"] else "-"
        lines.append([one["model"], one["backend"], overlap, *parts, saves])
    return [*_steps(found, keep), (3, lines)]


def _communication(found: Mapping[str, Any], keep: bool) -> list[_Table]:
    calls = [["backend", "parameters of a call", "seconds for all"]]
    ready = [["model", "parameters", "forward ms", "backward ms", "half of the gradients ready after"]]
    for row in found["rows"]:
        if "seconds" in row:
            calls.append([row["backend"], f"{row['size']:,}", noise.told(row["seconds"], 3, keep)])
        else:
            total = row["parameters"][-1]
            half = next(at for at, count in zip(row["backward"], row["parameters"], strict=True) if count >= total / 2)
            times = [f"{row['forward'][-1]:.1f}", f"{row['backward'][-1]:.1f}", f"{half:.1f} ms"]
            ready.append([row["model"], f"{total:,.0f}", *times])
    return [(1, calls), (1, ready)]


def _convergence(found: Mapping[str, Any], keep: bool) -> list[_Table]:
    lines = [["data", "batch", "lr", "averaged every", "held-out loss", "accuracy"]]
    for row in found["rows"]:
        low, high = row["held_out_range"]
        loss = noise.spread({"median": row["held_out"], "low": low, "high": high}, 3)
        trained = [row["data"], f"{row['batch']}", f"{row['lr']:g}", f"{row['every']}"]
        lines.append([*trained, loss, f"{100 * row['accuracy']:.1f} %"])
    return [(1, lines)]


def _published(point: Mapping[str, Any]) -> str:
    about = ", ".join(filter(None, (point["model"], point["backend"])))
    unit = point["unit"] if point["unit"].startswith(("%", "x")) else f" {point['unit']}"
    return f"  {about}: {point['what']} {values(point)}{unit}  [{point['source']}]"


def values(point: Mapping[str, Any]) -> str:
    """The number that was published, or a range."""
    return " to ".join(f"{value:,.9g}" for value in point["values"])
