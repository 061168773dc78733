"""Results as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..measuring.command import aligned, fresh_sets
from ..telling import noise
from .settings import PARTS

__all__ = ["table"]


def table(found: Mapping[str, Any], keep: bool) -> str:
    """What was measured, and below it what was published.

    Args:
        found: of `figures.result`.
        keep: show what is too noisy, too.
    """
    of_figure = {2: _communication, 6: _breakdown, 11: _convergence}.get(found["figure"], _steps)
    sections = ["\n".join(lines) for lines in of_figure(found, keep)]
    return "\n\n".join([_about(found), *sections, *_published(found)])


def _about(found: Mapping[str, Any]) -> str:
    sets = found["number of sets"]
    over = f"over {sets} seed{'' if sets == 1 else 's'}" if found["figure"] == 11 else f"over {fresh_sets(sets)}"
    if "torch" not in found and found["figure"] != 11:  # not of fresh processes
        over = "of one run"
    link = f", links of {found['mbit']:g} Mbit/s, {found['delay_ms']:g} ms away" if found.get("mbit") else ""
    torch = f"torch {found['torch']}, " if "torch" in found else ""
    threads = f" with {found['threads']} thread each" if "threads" in found else ""
    return (
        f"figure {found['figure']}, {found['title']}: {torch}{found['ranks']} ranks{threads}{link}; "
        f"medians{'' if sets == 1 else ' (from .. to)'} {over}"
    )


def _steps(found: Mapping[str, Any], keep: bool) -> list[list[str]]:
    lines = [["model", "variant", "step ms", "against", "ratio"]]
    for row in found["rows"]:
        told = [noise.shown(row["ms"], _spread(row["ms"], 2), keep), row["reference"]]
        lines.append([row["model"], row["variant"], *told, noise.shown(row["ratio"], _spread(row["ratio"], 3), keep)])
    return [aligned(lines, left=2)]


def _breakdown(found: Mapping[str, Any], keep: bool) -> list[list[str]]:
    lines = [["model", "backend", "overlap", *(f"{part} ms" for part in PARTS), "overlap saves"]]
    for one in found["breakdown"]:
        gain, parts = one["gain"], one["parts"]
        lines.append(
            [
                one["model"],
                one["backend"],
                "yes" if one["overlap"] else "no",
                *("-" if gain["noisy"] and not keep else f"{parts[part]:.2f}" for part in PARTS),
                noise.shown(gain, f"{_spread(gain, 1)} %", keep) if one["overlap"] else "-",
            ]
        )
    return [*_steps(found, keep), aligned(lines, left=3)]


def _communication(found: Mapping[str, Any], keep: bool) -> list[list[str]]:
    lines = [["backend", "parameters of a call", "seconds for all"]]
    for row in found["rows"]:
        if "seconds" in row:
            told = noise.shown(row["seconds"], _spread(row["seconds"], 3), keep)
            lines.append([row["backend"], f"{row['size']:,}", told])
    ready = [["model", "parameters", "forward ms", "backward ms", "half of the gradients ready after"]]
    for row in found["rows"]:
        if "backward" in row:
            total = row["parameters"][-1]
            half = next(at for at, count in zip(row["backward"], row["parameters"], strict=True) if count >= total / 2)
            times = [f"{row['forward'][-1]:.1f}", f"{row['backward'][-1]:.1f}", f"{half:.1f} ms"]
            ready.append([row["model"], f"{total:,.0f}", *times])
    return [aligned(lines, left=1), aligned(ready, left=1)]


def _convergence(found: Mapping[str, Any], keep: bool) -> list[list[str]]:
    lines = [["data", "batch", "lr", "averaged every", "held-out loss", "accuracy"]]
    for row in found["rows"]:
        low, high = row["held_out_range"]
        told = [_spread({"median": row["held_out"], "low": low, "high": high}, 3), f"{100 * row['accuracy']:.1f} %"]
        lines.append([row["data"], f"{row['batch']}", f"{row['lr']:g}", f"{row['every']}", *told])
    return [aligned(lines, left=1)]


def _spread(figure: Mapping[str, Any], digits: int) -> str:
    """The median, and the interval where there is one."""
    middle, low, high = (f"{figure[end]:.{digits}f}" for end in ("median", "low", "high"))
    return middle if low == high else f"{middle} ({low} .. {high})"


def _published(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for point in found["published"]:
        about = ", ".join(filter(None, (point["model"], point["backend"])))
        values = " to ".join(f"{value:,.9g}" for value in point["values"])
        unit = point["unit"] if point["unit"].startswith(("%", "x")) else f" {point['unit']}"
        lines.append(f"  {about}: {point['what']} {values}{unit}  [{point['source']}]")
    return ["\n".join(["the paper:", *lines])] if lines else []
