"""Findings: what to change, the largest estimated saving first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...analysis import findings
from ...analysis.findings import Facts, Finding
from ...analysis.step_metrics import GradientSync, gradient_sync
from ...analysis.steps import Steps
from ...timeline.timeline import Timeline
from ..paint.scene_svg import empty_svg, listed
from ..scene import Advice, Axis, Bars, Block, Panel, Scene
from .view import Selection, View

__all__ = ["SAVINGS", "Findings", "FindingsFacts", "advice", "findings_facts", "findings_scene"]

_MOST_DRAWN = 12
_OF_GROUPS = ("mesh-dimension-between-hosts", "unchanged-buffers")
_OF_PARAMETER_GROUPS = (
    "late-parameter-group",
    "exposed-unshard",
    "exposed-backward-unshard",
    "parameter-groups-too-small",
    "parameter-group-too-large",
)
SAVINGS = "Savings are estimates for each change alone; two that save the same waiting time don’t add up."


@dataclass(frozen=True)
class FindingsFacts:
    """What to change, what sums it up in a sentence, and the first and the last step that were analysed."""

    found: Sequence[Advice]
    headline: str
    analysed: tuple[int, int] | None


class Findings(View):
    """What to change."""

    name = "findings"
    title = "Findings"
    about = "What to change, the largest estimated saving first."
    question = "What to change"
    pixels = (160, 64)

    def facts(self, timeline: Timeline, chosen: Selection) -> FindingsFacts:
        return findings_facts(chosen.analysis_input_in(timeline))

    def scene(self, facts: FindingsFacts) -> Scene:
        return findings_scene(facts.found, facts.headline)

    def blocks(self, facts: FindingsFacts) -> Sequence[Block]:
        return [facts.headline, *([facts.found] if facts.found else []), *([SAVINGS] if len(facts.found) > 1 else [])]

    def page(self, facts: FindingsFacts) -> dict[str, Any]:
        """Returns the blocks; ``count``: of findings; ``analysed``: the first and the last step, or None."""
        return {**super().page(facts), "count": len(facts.found), "analysed": facts.analysed}

    def svg(self, facts: FindingsFacts) -> str:
        """Returns the findings with their evidence and remedies: a list says more than bars."""
        if not facts.found:
            return empty_svg(f"Findings: {facts.headline}")
        return listed("Findings: estimated saving in percent of the step", [facts.found[:_MOST_DRAWN]])


def findings_facts(facts: Facts | None) -> FindingsFacts:
    """Returns what was found in these facts; None: no step is complete on every rank."""
    found = findings.findings(facts)
    shown = [] if facts is None else advice(found, facts)
    return FindingsFacts(shown, findings.headline(facts, found), found[0].steps if found else None)


def advice(found: Sequence[Finding], facts: Facts) -> list[Advice]:
    """Returns the findings in these facts with the place where each shows most."""
    sync = functools.cache(lambda: _sync(facts.steps))
    return [
        Advice(one.kind, one.gain_percent, one.title, one.evidence, one.remedy, **_place(one, facts.steps, sync))
        for one in found
    ]


def _sync(steps: Steps) -> GradientSync:
    """Of all steps and buckets, one after the other."""
    flat = (len(steps.launched), -1)
    launched, reduced = steps.launched.reshape(flat), steps.reduced.reshape(flat)
    return gradient_sync(launched, reduced, np.full(len(launched[0]), -1))


def _place(one: Finding, steps: Steps, sync: Callable[[], GradientSync]) -> dict[str, Any]:
    """The view of a finding; of a rank or a bucket its bucket and the step in which the others waited longest for the
    rank, or in which the all-reduce took longest."""
    if one.kind in _OF_PARAMETER_GROUPS or one.kind in _OF_GROUPS:
        return {"view": "groups" if one.kind in _OF_GROUPS else "parameter_groups"}
    if one.rank is None and one.bucket is None:
        return {}
    late, buckets = sync().all_reduce_ms, steps.launched.shape[2]
    if one.rank is not None:
        late = np.where(np.array([*steps.ranks, -1])[sync().last] == one.rank, sync().alone_ms, 0.0)
    late = np.nan_to_num(late)
    if one.bucket is not None:
        late = np.where(np.arange(len(late)) % buckets == one.bucket, late, -1.0)
    step, bucket = divmod(int(late.argmax()), buckets)
    at = {"rank": one.rank, "bucket": bucket if one.bucket is None else one.bucket}
    return {"view": "timeline", "step": int(steps.step[step]), **at}


def findings_scene(found: Sequence[Advice], headline: str) -> Scene:
    """Returns the findings by estimated saving; `headline` sums them up in a sentence, also if there are none."""
    lane, gains = np.arange(len(found)), np.array([one.gain_percent for one in found])
    tips = [f"{one.evidence} → {one.remedy}" for one in found]
    bars = Bars("estimated saving", "good", lane, gains, [f"{gain:.1f} %" for gain in gains], tips)
    return Scene(
        "Findings: estimated saving of each change alone",
        (Panel(Axis("% of the step"), Axis("", [one.title for one in found]), (bars,)),),
        empty="" if found else headline,
    )
