"""Watched gradients: norms, noise, where NaN came from, drift of replicas; as numbers, as SVG, as a plotly figure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..analysis.gradient_noise import noise_scale, signal_and_noise
from ..timeline.timeline import Timeline
from .paint.palette import RANK_COLOURS, plotly_text
from .paint.svg import empty_svg

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["gradient_facts", "gradients_figure", "gradients_svg", "gradients_words"]

_STEPS = 200
_NOISE_STEPS = 20  # over which the noise scale is averaged
_MOST_NUMBERS = 8_000  # of single buckets, in one message
_CHECKS = 20
_NOTHING = (
    "Gradients: no step has been watched yet (lab.watch_gradients(), or model.watch_gradients() in the training)."
)
_MOST_LINES = 8
_WIDTH, _HEIGHT, _LEFT, _TOP = 860, 316, 62, 86


def gradient_facts(timeline: Timeline, reducer: int) -> dict[str, Any]:
    """Returns what is known of a model's gradients and replicas.

    Returns:
        ``steps``: of each of the newest 200 watched steps ``step``, ``before`` (norm by rank, None: none), ``after``,
        ``noise`` (scale over the last 20 watched steps, in batches of a rank; None if hidden), ``bad`` (None, or
        ``kind``, ``parameter``, ``rank``) and ``ms`` (cost); ``ranks``; ``buckets``: of as many of the newest as fit,
        ``step`` -> ``before`` [ranks][buckets] and ``after`` [buckets]; ``noise_scale``; ``drift``: the newest checks.
    """
    described = timeline.watched_gradients(reducer, _STEPS)
    ranks = described[-1]["ranks"] if described else []
    described = [one for one in described if one["ranks"] == ranks]
    totals = np.array([_total(one["before"]) for one in described]).reshape(len(described), len(ranks))
    after = np.array([_total([one["after"]])[0] for one in described])
    signal, noise = signal_and_noise(totals, after)
    steps = []
    for index, one in enumerate(described):
        recent = slice(max(0, index + 1 - _NOISE_STEPS), index + 1)
        steps.append(
            {
                "step": one["step"],
                "before": [_known(value) for value in totals[index]],
                "after": _known(after[index]),
                "noise": _known(noise_scale(signal[recent], noise[recent])),
                "bad": one["nonfinite"],
                "ms": 1e3 * one["seconds"],
            }
        )
    return {
        "ranks": ranks,
        "steps": steps,
        "buckets": _buckets(described),
        "noise_scale": _known(timeline.noise_scale(reducer)) if described else None,
        "drift": [
            {"step": one.step, "ok": one.ok, "first": one.first, "groups": one.groups, "differing": one.differing}
            | {"ms": one.cost_ms, "bytes": one.bytes, "error": one.error}
            for one in timeline.drift_records(reducer, _CHECKS)
        ],
    }


def _total(by_bucket: Any) -> npt.NDArray[np.float64]:
    """Norm of all buckets together, for each rank; NaN where one is unknown or not finite."""
    return np.asarray(np.sqrt((np.array(by_bucket, float) ** 2).sum(axis=1)))


def _known(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _buckets(described: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest steps' buckets, as many as fit."""
    found: dict[str, Any] = {}
    numbers = 0
    for one in reversed(described):
        numbers += (len(one["ranks"]) + 1) * len(one["after"])
        if found and numbers > _MOST_NUMBERS:
            break
        found[str(one["step"])] = {"before": one["before"], "after": one["after"]}
    return found


def gradients_words(facts: dict[str, Any]) -> str:
    """Returns what is known of watched steps and replicas, in a sentence or two."""
    steps = facts["steps"]
    words = []
    if steps:
        words.append(f"{len(steps)} watched steps, {steps[0]['step']} to {steps[-1]['step']}.")
        if facts["noise_scale"] is not None:
            words.append(f"Noise scale {facts['noise_scale']:.3g} batches of a rank.")
    for one in [one for one in steps if one["bad"]][-1:]:
        bad = one["bad"]
        where = f"first in {bad['parameter']} on rank {bad['rank']}" if bad["parameter"] else "in the average alone"
        words.append(f"{bad['kind']} in step {one['step']}: {where}.")
    for check in facts["drift"][-1:]:
        found = "equal" if check["ok"] else f"differ, first in {check['first']}" if check["first"] else check["error"]
        words.append(f"Replicas before step {check['step']}: {found}.")
    return " ".join(words)


def gradients_svg(timeline: Timeline, reducer: int) -> str:
    """Returns the norms before and after averaging over the watched steps as a self-contained SVG."""
    facts = gradient_facts(timeline, reducer)
    steps, ranks = facts["steps"], facts["ranks"]
    if not steps:
        words = gradients_words(facts)
        return empty_svg(f"Gradients: {words}" if words else _NOTHING)
    values = [value for one in steps for value in (*one["before"], one["after"]) if value is not None]
    top = 1.05 * max(values, default=1.0) or 1.0
    x = np.linspace(_LEFT, _WIDTH - 20, len(steps)) if len(steps) > 1 else np.array([_LEFT + 20.0])

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - 46) * (1 - value / top)

    body = [_text(14, 20, f"Gradients: norms of {len(ranks)} ranks before and after averaging", 13, 600)]
    for place, words in enumerate(textwrap.wrap(gradients_words(facts), 140)[:2]):
        body.append(_text(14, 38 + 15 * place, words, fill="#59636e"))
    for mark in np.linspace(0, top / 1.05, 5):
        body.append(f"<path d='M{_LEFT} {y(mark):.1f}H{_WIDTH - 20}' stroke='#e6e8ea'/>")
        body.append(_text(_LEFT - 6, y(mark) + 4, f"{mark:.3g}", fill="#59636e", anchor="end"))
    series = [
        (f"rank {rank}", [one["before"][row] for one in steps], RANK_COLOURS[row], 1.2)
        for row, rank in enumerate(ranks[:_MOST_LINES])
    ]
    series.append(("average", [one["after"] for one in steps], "#1f2328", 2.2))
    for place, (name, line, colour, width) in enumerate(series):
        body.append(_line(x.tolist(), line, y, colour, width))
        body.append(f"<rect x='{14 + 84 * place}' y='63' width='14' height='4' fill='{colour}'/>")
        body.append(_text(32 + 84 * place, 69, name, fill="#59636e"))
    for at, one in zip(x, steps, strict=True):
        if one["bad"]:
            body.append(f"<path d='M{at:.1f} {_TOP}V{_HEIGHT - 46}' stroke='#d55e00' stroke-width='2'/>")
            body.append(_text(at, _TOP - 2, one["bad"]["kind"], fill="#d55e00", anchor="middle"))
    for index in sorted({0, len(steps) // 2, len(steps) - 1}):
        body.append(_text(x[index], _HEIGHT - 28, str(steps[index]["step"]), fill="#59636e", anchor="middle"))
    body.append(_text(_LEFT, _HEIGHT - 10, "step; vertical: L2 norm", fill="#59636e"))
    font = "font-family='system-ui,-apple-system,Segoe UI,sans-serif'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{_HEIGHT}' viewBox='0 0 {_WIDTH} {_HEIGHT}' "
        f"role='img' aria-label='{escape(gradients_words(facts), quote=True)}' {font}>"
        f"<rect width='100%' height='100%' rx='4' fill='#fff'/>{''.join(body)}</svg>"
    )


def gradients_figure(timeline: Timeline, *, reducer: int | None = None, last_steps: int = 200) -> go.Figure:
    """Returns the norms before and after averaging and the noise scale over the watched steps.

    Raises:
        ValueError: no step has been watched.
    """
    import plotly.graph_objects as go

    known = [one.reducer for one in timeline.reducers()]
    facts = gradient_facts(timeline, known[-1] if reducer is None and known else reducer or 0)
    steps = facts["steps"][-last_steps:]
    if not steps:
        raise ValueError("no step has been watched: lab.watch_gradients(), or model.watch_gradients() in the training")
    numbers = [one["step"] for one in steps]
    made = go.Figure()
    for row, rank in enumerate(facts["ranks"][:_MOST_LINES]):
        line = {"color": RANK_COLOURS[row], "width": 1.2}
        made.add_scatter(name=f"rank {rank}, before", x=numbers, y=[one["before"][row] for one in steps], line=line)
    made.add_scatter(
        name="average", x=numbers, y=[one["after"] for one in steps], line={"color": "#808080", "width": 3}
    )
    noise = {"color": "#cc79a7", "width": 2}
    made.add_scatter(name="noise scale", x=numbers, y=[one["noise"] for one in steps], line=noise, yaxis="y2")
    for one in steps:
        if one["bad"]:
            made.add_vline(x=one["step"], line={"color": "#d55e00"}, annotation_text=plotly_text(one["bad"]["kind"]))
    grey, lines = "#808080", "rgba(128, 128, 128, 0.3)"
    made.update_layout(
        title={"text": f"Gradients: {plotly_text(gradients_words(facts))}", "font": {"size": 13}},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": grey},
        height=460,
        xaxis={"title": "step", "anchor": "y2", "gridcolor": lines},
        yaxis={"title": "L2 norm", "domain": [0.36, 1], "gridcolor": lines, "rangemode": "tozero"},
        yaxis2={"title": "noise, batches of a rank", "domain": [0, 0.26], "gridcolor": lines, "rangemode": "tozero"},
    )
    return made


def _line(x: Sequence[float], values: Sequence[float | None], y: Any, colour: str, width: float) -> str:
    """A line with gaps where nothing is known."""
    path, pen = "", "M"
    for at, value in zip(x, values, strict=True):
        if value is None:
            pen = "M"
            continue
        path += f"{pen}{at:.1f} {y(value):.1f}"
        pen = "L"
    return f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='{width}'/>" if path else ""


def _text(
    x: float, y: float, text: str, size: int = 11, weight: int = 400, fill: str = "#1f2328", anchor: str = "start"
) -> str:
    font = f"font-size='{size}' font-weight='{weight}' fill='{fill}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {font} text-anchor='{anchor}'>{escape(text)}</text>"
