"""Gradient monitoring: norms, noise scale, the origin of NaN, drift of replicas; in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...formatting import counted, ms, size
from ...timeline.tables.gradients import noise_scale, signal_and_noise
from ...timeline.timeline import Timeline
from ..scene import Axis, Band, Block, Cells, Line, Mark, Notice, Panel, Rule, Scene, Table, robust_top
from .view import Reported, Selection, View

__all__ = ["Gradients", "gradient_facts", "gradients_scene", "gradients_words"]

_STEPS = 200
_NOISE_STEPS = 20  # over which the noise scale is averaged
_CHECKS = 20
_MOST_ROWS, _PAGE_ROWS = 50, 100  # of a table
_MOST_LINES = 8
_WIDE_RANGE = 50  # largest over smallest norm from which the scale is logarithmic
_DASHES = ((), (5, 2), (2, 2), (7, 2, 2, 2))
_OWN = "norm of its own gradients"
_NOISE = (
    "[McCandlish et al. 2018]: the batch size, in batches of a rank, up to which a larger batch still pays off; over "
    "20 monitored steps"
)
_NOT_WATCHED = "no step has been monitored yet; call lab.watch_gradients(), or model.watch_gradients() while training"


class Gradients(View):
    """Gradient monitoring."""

    name = "gradients"
    title = "Gradients"
    about = "Norms before and after averaging by rank and bucket, noise scale, NaN, drift of replicas."
    question = "Look inside"
    steps = False
    of_step = True
    also = ()
    pixels = (460, 0)

    def facts(self, timeline: Timeline, chosen: Selection) -> dict[str, Any]:
        info = None if chosen.model is not None else next(reversed(timeline.reducers()), None)
        found = gradient_facts(timeline, info.reducer if info is not None else chosen.model or 0, chosen.step)
        return {**found, "steps": found["steps"][-(chosen.last_steps or _STEPS) :]}

    def scene(self, facts: Mapping[str, Any]) -> Scene:
        return gradients_scene(facts)

    def blocks(self, facts: Mapping[str, Any]) -> Sequence[Block]:
        steps, drift = facts["steps"], facts["drift"]
        wrong = "\n".join([*_bad_words(steps), *_drift_words(drift)])
        made: list[Block] = [Notice(wrong)] if wrong else []
        if steps:
            made += [_page_words(steps, len(facts["ranks"]), facts["noise_scale"]), self.scene(facts)]
            made += [_bucket_words(facts["buckets"]), _bucket_scene(facts), _page_table(steps)]
        return [*made, *([_drift_table(drift)] if drift else [])]

    def reported(self, timeline: Timeline, chosen: Selection) -> Reported | None:
        scene = self.scene(self.facts(timeline, Selection(chosen.model)))
        caption = (
            "Norms of each rank’s own gradients and of their average. The table holds the newest 50 monitored steps, "
            f"with the noise scale in batches of a rank. {scene.summary}"
        )
        return None if scene.empty else Reported("Gradients before and after averaging", caption, scene)


def gradient_facts(timeline: Timeline, reducer: int, step: int | None = None) -> dict[str, Any]:
    """Returns the monitoring results of a model's gradients and replicas.

    Args:
        timeline: the source of the numbers.
        reducer: which model.
        step: the step whose buckets are shown, or the last one monitored before it; None: the newest.

    Returns:
        ``steps``: for each of the newest 200 monitored steps ``step``, ``before`` (norm by rank, None: none) and its
        ``mean``, ``after``, ``noise`` (scale over the last 20 monitored steps, in batches of a rank; None if not
        measurable), ``bad`` (None, or ``kind``, ``parameter``, ``rank``) and ``ms`` (cost); ``ranks``; ``buckets``: of
        one step, see `_buckets`, None without steps; ``noise_scale``; ``drift``: the newest checks.
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
        finite = totals[index][np.isfinite(totals[index])]
        steps.append(
            {
                "step": one["step"],
                "before": [_known(value) for value in totals[index]],
                "mean": _known(finite.mean()) if len(finite) else None,
                "after": _known(after[index]),
                "noise": _known(noise_scale(signal[recent], noise[recent])),
                "bad": one["nonfinite"],
                "ms": 1e3 * one["seconds"],
            }
        )
    shown = described
    if step is not None:  # it may be older than those
        stored = timeline.watched_gradients(reducer)
        shown = [one for one in stored if one["step"] <= step and one["ranks"] == ranks] or described
    return {
        "ranks": ranks,
        "steps": steps,
        "buckets": _buckets(shown[-1]) if shown else None,
        "noise_scale": _known(timeline.noise_scale(reducer)) if described else None,
        "drift": [
            {"step": one.step, "ok": one.ok, "first": one.first, "groups": one.groups, "differing": one.differing}
            | {"ms": one.cost_ms, "bytes": one.bytes, "error": one.error}
            for one in timeline.drift_records(reducer, _CHECKS)
        ],
    }


def _page_words(steps: Sequence[Mapping[str, Any]], ranks: int, scale: float | None) -> str:
    """The sentences above the pictures of a page."""
    cost = np.median([one["ms"] for one in steps])
    newest = f"{counted(len(steps), 'monitored step')}, the newest {steps[-1]['step']}"
    parts = [f"{newest}; monitoring a step took {ms(cost)}."]
    finite = [one for one in steps if not one["bad"] and one["after"] is not None and one["mean"]]
    if ranks > 1 and finite:
        wide = np.median([np.ptp(_norms(one)) / one["mean"] for one in finite])
        kept = np.median([one["after"] / one["mean"] for one in finite])
        parts.append(
            f"Medians: the ranks' norms differ by {100 * wide:.3g} % of their mean; the norm of the average is "
            f"{100 * kept:.3g} % of it."
        )
    if scale is not None:
        batches = "one batch" if scale < 1 else f"{scale:.3g} batches"
        parts.append(f"Noise scale {scale:.3g}: a larger batch pays off up to about {batches} of a rank.")
    elif ranks > 1:
        parts.append("Noise scale: not measurable, the noise hides the gradient.")
    return " ".join(parts)


def _norms(one: Mapping[str, Any]) -> list[float]:
    return [value for value in one["before"] if value is not None]


def _bad_words(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The newest step with a value that is not finite, if there is one."""
    bad = [one for one in steps if one["bad"]]
    if not bad:
        return []
    one = bad[-1]["bad"]
    where = "only in the average; each rank's own gradients were finite"
    if one["parameter"]:
        where = f"first in the gradient of {one['parameter']} on rank {one['rank']}"
    others = f" (and in {counted(len(bad) - 1, 'other monitored step')})" if len(bad) > 1 else ""
    return [f"{one['kind']} in step {bad[-1]['step']}: {where}{others}."]


def _drift_words(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The newest comparison in which replicas differed, if there is one."""
    apart = [one for one in checks if not one["ok"] and not one["error"]]
    if not apart:
        return []
    one = apart[-1]
    return [
        f"The replicas have diverged, detected before step {one['step']}: {_first(one)}. Ranks with equal values: "
        f"{_holders(one['groups'])}."
    ]


def _total(by_bucket: Any) -> npt.NDArray[np.float64]:
    """Norm of all buckets together, for each rank; NaN if a bucket's norm is unknown or not finite."""
    return np.asarray(np.sqrt((np.array(by_bucket, float) ** 2).sum(axis=1)))


def _known(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _buckets(one: Mapping[str, Any]) -> dict[str, Any]:
    """Of each bucket of a ``step`` the norms ``before``, shape ``[ranks, buckets]``, and ``after``, the ``mean`` of the
    ranks, and by rank how far it is ``off`` in percent; ``spread``: what share of the mean the average keeps."""
    before, after = np.array(one["before"], float), np.array(one["after"], float)
    known = np.isfinite(before)
    count = known.sum(axis=0)
    mean = np.divide(np.where(known, before, 0).sum(axis=0), count, out=np.full(len(count), np.nan), where=count > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.nan_to_num(np.abs(100 * (before / mean - 1)), posinf=0.0)
        shares = 100 * after / mean
    shares = shares[np.isfinite(shares)]
    kept = list(dict.fromkeys(f"{share:.3g}" for share in (shares.min(), shares.max()))) if len(shares) else []
    spread = f"The norm of the average is {' to '.join(kept)} % of a bucket's mean norm." if kept else ""
    return {"step": one["step"], "before": before, "after": after, "mean": mean, "off": off, "spread": spread}


def _bucket_words(found: Mapping[str, Any]) -> str:
    return (
        f"Step {found['step']}, by bucket: difference of each rank's norm from the mean of the ranks, in percent. "
        f"{found['spread']}"
    )


def _bucket_scene(facts: Mapping[str, Any]) -> Scene:
    """How far the norm of each rank is from the mean of the ranks, by bucket."""
    found = facts["buckets"]
    others = [("norm before averaging", found["before"]), ("ranks' mean", found["mean"])]
    cells = Cells(found["off"], "% from the mean", others=[*others, ("norm of the average", found["after"])])
    buckets, ranks = map(str, range(len(found["after"]))), [f"rank {rank}" for rank in facts["ranks"]]
    return Scene(
        "Difference of each rank's norm from the mean of the ranks, by bucket (%)",
        (Panel(Axis("bucket", list(buckets)), Axis("", ranks), (cells,)),),
    )


def _page_table(steps: Sequence[Mapping[str, Any]]) -> Table:
    head = ["step", "before: smallest", "mean", "largest", "average", "noise scale", "not finite", "cost, ms"]
    rows = []
    for one in steps[-_PAGE_ROWS:][::-1]:
        own = _norms(one) or [np.nan]
        numbers = (np.nan if value is None else value for value in (one["mean"], one["after"], one["noise"]))
        mean, after, noise = numbers
        rows.append([one["step"], min(own), mean, max(own), after, noise, _bad(one["bad"]), f"{one['ms']:.2f}"])
    return Table(head, rows, "Monitored steps, newest first", folded=True)


def _bad(bad: Mapping[str, Any] | None) -> str:
    if bad is None:
        return ""
    return f"{bad['kind']}: " + (f"{bad['parameter']}, rank {bad['rank']}" if bad["parameter"] else "average")


def _drift_table(checks: Sequence[Mapping[str, Any]]) -> Table:
    """The comparisons of the replicas."""
    rows = [
        [one["step"], _differ(one), "all" if one["ok"] else _holders(one["groups"]), f"{one['ms']:.2f}"]
        for one in reversed(checks)
    ]
    warned = [row for row, one in enumerate(reversed(checks)) if not one["ok"]]
    head = ["before step", "result:", "ranks with equal values:", "cost, ms"]
    return Table(head, rows, "Comparisons of the replicas, newest first", warned=warned)


def _differ(one: Mapping[str, Any]) -> str:
    """What a comparison found."""
    if one["error"] or one["ok"]:
        return str(one["error"]) or f"equal ({size(one['bytes'])})"
    return f"differ: {_first(one)}"


def _first(one: Mapping[str, Any]) -> str:
    return f"{one['first']} and {one['differing'] - 1} more" if one["differing"] > 1 else str(one["first"])


def _holders(groups: Sequence[Sequence[int]]) -> str:
    return " | ".join(f"rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}" for of in groups)


def gradients_words(facts: Mapping[str, Any]) -> str:
    """Returns the monitoring results in one or two sentences."""
    steps = facts["steps"]
    words = []
    if steps:
        words.append(f"{len(steps)} monitored steps, {steps[0]['step']} to {steps[-1]['step']}.")
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


def gradients_scene(facts: Mapping[str, Any], last_steps: int = 200) -> Scene:
    """Returns norms before and after averaging, and the noise scale, for the monitored steps of `gradient_facts`."""
    steps, ranks, words = facts["steps"][-last_steps:], facts["ranks"], gradients_words(facts)
    if not steps:
        return Scene("Gradients", empty=words.rstrip(".") or _NOT_WATCHED)
    x = np.array([one["step"] for one in steps])
    before, after, noise = (np.array([one[name] for one in steps], float) for name in ("before", "after", "noise"))
    known = np.isfinite(before).any(axis=1)
    low, high = np.full(len(x), np.nan), np.full(len(x), np.nan)
    low[known], high[known] = np.nanmin(before[known], axis=1), np.nanmax(before[known], axis=1)
    lines = [
        Line(f"rank {rank}, before", f"rank{i}", x, before[:, i], 1.2, _DASHES[i % len(_DASHES)], _OWN)
        for i, rank in enumerate(ranks if len(ranks) <= _MOST_LINES else [])
    ]
    marks: list[Mark] = [
        Band("smallest to largest rank", "band", x, low, high, "norms before averaging"),
        *lines,
        Line("average", "line", x, after, 2.3, about="norm after averaging"),
        *(Rule("bad", one["step"], one["bad"]["kind"]) for one in steps if one["bad"]),
    ]
    shown = facts["buckets"]["step"]
    axis = Axis("step", tips=[_tip(one) for one in steps], chooses="step", marked=shown)
    scale = _norm_axis(np.append(before, after))
    noises = Axis("noise, batches", top=robust_top(noise))
    return Scene(
        f"Gradients: norms of {len(ranks)} ranks before and after averaging",
        (
            Panel(axis, scale, marks, 0.7),
            Panel(axis, noises, (Line("noise scale", "noise", x, noise, 1.75, about=_NOISE),), 0.3),
        ),
        Table(
            ["step", "smallest norm", "largest norm", "norm of the average", "noise scale", "NaN or Inf:"],
            [_gradients_row(one) for one in steps[-_MOST_ROWS:]],
        ),
        summary=words,
    )


def _norm_axis(norms: npt.NDArray[np.float64]) -> Axis:
    """The axis of norms, logarithmic if they have a wide range."""
    known = norms[np.isfinite(norms) & (norms > 0)]
    if not len(known):
        return Axis("L2 norm", top=1.0)
    low, high = float(known.min()), float(known.max())
    if high / low < _WIDE_RANGE:
        return Axis("L2 norm", top=1.05 * high)
    ends = 10.0 ** np.floor(np.log10(low)), 10.0 ** np.ceil(np.log10(high))
    return Axis("L2 norm (log)", low=float(ends[0]), top=float(ends[1]), log=True)


def _tip(one: Mapping[str, Any]) -> str:
    """What a tooltip shows of a step besides its norms."""
    bad = one["bad"]
    where = "" if bad is None else "only in the average"
    if bad is not None and bad["parameter"]:
        where = f"first in {bad['parameter']}, rank {bad['rank']}"
    return "\n".join([*([f"{bad['kind']}\t{where}"] if bad else []), f"monitoring cost\t{one['ms']:.2f} ms"])


def _gradients_row(one: Mapping[str, Any]) -> list[object]:
    before, bad = [value for value in one["before"] if value is not None] or [np.nan], one["bad"]
    where = "" if bad is None else f"{bad['kind']} in {bad['parameter']}" if bad["parameter"] else bad["kind"]
    told = (np.nan if one[name] is None else one[name] for name in ("after", "noise"))
    return [one["step"], min(before), max(before), *told, where]
