"""What `ddp-lab bench step` found, as text: steps, exposed communication, and ours against torch's on Gloo."""

from __future__ import annotations

from typing import Any

from ..measuring.command import aligned, fresh_sets
from . import noise

__all__ = ["text"]

_FIRST = ("model", "mode", "backend")


def text(summary: dict[str, Any], keep: bool) -> str:
    """Returns the three tables.

    Args:
        summary: what `step.measure` returned.
        keep: show figures that are too noisy, too.
    """
    about = (
        f"torch {summary['torch']}, {summary['ranks']} ranks with {summary['threads']} thread each, recording on; "
        f"medians (from .. to) over {fresh_sets(summary['number of sets'])}, builds in each: {summary['builds']}"
    )
    return "\n".join([about, "", *_steps(summary, keep), "", *_exposed(summary, keep), "", *_against(summary, keep)])


def _spread(one: noise.Figure, keep: bool) -> str:
    spread = f" ({one['low']:.2f} .. {one['high']:.2f})" if len(one["samples"]) > 1 else ""
    return noise.shown(one, f"{one['median']:.2f}{spread}", keep)


def _steps(summary: dict[str, Any], keep: bool) -> list[str]:
    lines = [[*_FIRST, "torch ms", "ours ms", "ours/torch", "(95 % <)", "torch/torch", "(95 % <)"]]
    for cell in summary["cells"]:
        told = not cell["ratio"]["noisy"] or keep
        lines.append(
            [cell[name] for name in ("workload", "mode", "backend")]
            + [_spread(cell["classes"][who]["step"], keep) for who in ("torch", "ours")]
            + [noise.shown(cell["ratio"], f"{cell['ours / torch']:.3f}", keep)]
            + [f"{cell['ours / torch upper']:.3f}" if told else "-"]
            + [f"{cell[name]:.3f}" for name in ("torch again / torch", "torch again / torch upper")]
        )
    return ["step:", *aligned(lines, left=3)]


def _exposed(summary: dict[str, Any], keep: bool) -> list[str]:
    names = [f"{who} {what} ms" for who in ("torch", "ours") for what in ("no_sync", "exposed")]
    lines = [[*_FIRST, *names]]
    for cell in summary["cells"]:
        figures = [cell["classes"][who][what] for who in ("torch", "ours") for what in ("floor", "exposed")]
        lines.append([cell["workload"], cell["mode"], cell["backend"], *(_spread(one, keep) for one in figures)])
    return ["exposed communication (a step less the same step under no_sync):", *aligned(lines, left=3)]


def _against(summary: dict[str, Any], keep: bool) -> list[str]:
    usual = summary["exposed"][0]["torch on"]
    lines = [["model", "mode", "ours on", "ratio", "(95 % <)"]]
    for one in summary["exposed"]:
        ratio, upper = ("-", "-") if one["ratio"] is None else (f"{one['ratio']:.3f}", f"{one['upper']:.3f}")
        upper = upper if keep or not one["noisy"] else "-"
        lines.append([one["workload"], one["mode"], one["ours on"], noise.shown(one, ratio, keep), upper])
    return [f"exposed communication of ours / of torch's on {usual}:", *aligned(lines, left=3)]
