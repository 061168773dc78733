"""Results as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import noise
from ..command import aligned, fresh_sets
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
    over = f"{sets} seed{'' if sets == 1 else 's'}" if found["figure"] == 11 else fresh_sets(sets)
    link = f", links of {found['mbit']:g} Mbit/s, {found['delay_ms']:g} ms away" if found.get("mbit") else ""
    torch = f"torch {found['torch']}, " if "torch" in found else ""
    threads = f" with {found['threads']} thread each" if "threads" in found else ""
    return (
        f"figure {found['figure']}, {found['title']}: {torch}{found['ranks']} ranks{threads}{link}; "
        f"medians (from .. to) over {over}"
    )


def _steps(found: Mapping[str, Any], keep: bool) -> list[list[str]]:
    lines = [["model", "variant", "step ms", "against", "ratio", "(from .. to)"]]
    for row in found["rows"]:
        ms, ratio = row["ms"], row["ratio"]
        lines.append(
            [
                row["model"],
                row["variant"],
                noise.shown(ms, f"{ms['median']:.2f} ({ms['low']:.2f} .. {ms['high']:.2f})", keep),
                row["reference"],
                noise.shown(ratio, f"{ratio['median']:.3f}", keep),
                f"({ratio['low']:.3f} .. {ratio['high']:.3f})" if keep or not ratio["noisy"] else "-",
            ]
        )
    return [aligned(lines, left=2)]


def _breakdown(found: Mapping[str, Any], keep: bool) -> list[list[str]]:
    lines = [["model", "backend", "overlap", *(f"{part} ms" for part in PARTS), "overlap saves"]]
    for one in found["breakdown"]:
        gain, parts = one["gain"], one["parts"]
        saved = f"{gain['median']:.1f} % ({gain['low']:.1f} .. {gain['high']:.1f})"
        lines.append(
            [
                one["model"],
                one["backend"],
                "yes" if one["overlap"] else "no",
                *("-" if gain["noisy"] and not keep else f"{parts[part]:.2f}" for part in PARTS),
                noise.shown(gain, saved, keep) if one["overlap"] else "-",
            ]
        )
    return [*_steps(found, keep), aligned(lines, left=3)]


def _communication(found: Mapping[str, Any], keep: bool) -> list[list[str]]:
    lines = [["backend", "parameters of a call", "seconds for all", "(from .. to)"]]
    for row in found["rows"]:
        if "seconds" in row:
            one = row["seconds"]
            told = noise.shown(one, f"{one['median']:.3f}", keep)
            spread = f"({one['low']:.3f} .. {one['high']:.3f})" if keep or not one["noisy"] else "-"
            lines.append([row["backend"], f"{row['size']:,}", told, spread])
    ready = [["model", "parameters", "forward ms", "backward ms", "half of the gradients ready after"]]
    for row in found["rows"]:
        if "backward" in row:
            total = row["parameters"][-1]
            half = next(at for at, count in zip(row["backward"], row["parameters"], strict=True) if count >= total / 2)
            times = [f"{row['forward'][-1]:.1f}", f"{row['backward'][-1]:.1f}", f"{half:.1f} ms"]
            ready.append([row["model"], f"{total:,.0f}", *times])
    return [aligned(lines, left=1), aligned(ready, left=1)]


def _convergence(found: Mapping[str, Any], keep: bool) -> list[list[str]]:
    lines = [["data", "batch", "lr", "averaged every", "held-out loss", "(from .. to)", "accuracy"]]
    for row in found["rows"]:
        low, high = row["held_out_range"]
        told = [f"{row['held_out']:.3f}", f"({low:.3f} .. {high:.3f})", f"{100 * row['accuracy']:.1f} %"]
        lines.append([row["data"], f"{row['batch']}", f"{row['lr']:g}", f"{row['every']}", *told])
    return [aligned(lines, left=1)]


def _published(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for point in found["published"]:
        about = ", ".join(filter(None, (point["model"], point["backend"])))
        values = " to ".join(f"{value:,g}" for value in point["values"])
        unit = point["unit"] if point["unit"].startswith(("%", "x")) else f" {point['unit']}"
        lines.append(f"  {about}: {point['what']} {values}{unit}  [{point['source']}]")
    return ["\n".join(["the paper:", *lines])] if lines else []
