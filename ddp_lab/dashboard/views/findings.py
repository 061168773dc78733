"""Findings: what to change, the largest estimated saving first."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...analysis import findings
from ...analysis.findings import Facts, Finding
from ...timeline.timeline import Timeline
from ..paint.scene_svg import WIDTH, drawing, empty_svg, text
from ..scene import Axis, Bars, Panel, Scene
from .view import Selection, View

__all__ = ["Findings", "FindingsFacts", "findings_facts", "findings_scene"]

_MOST_DRAWN = 12


@dataclass(frozen=True)
class FindingsFacts:
    """What was found, what sums it up in a sentence, and in how many steps."""

    found: Sequence[Finding]
    headline: str
    steps: int


class Findings(View):
    """What to change."""

    name = "findings"
    title = "Findings"
    about = "What to change, the largest estimated saving first."
    question = "What to change"
    pixels = (160, 64)

    def facts(self, timeline: Timeline, chosen: Selection) -> FindingsFacts:
        return findings_facts(chosen.judgement_in(timeline))

    def scene(self, facts: FindingsFacts) -> Scene:
        return findings_scene(facts.found, facts.headline)

    def page(self, facts: FindingsFacts) -> dict[str, Any]:
        """Returns ``text``, ``steps``, and of each finding what `findings.js` shows."""
        items = [
            {"kind": one.kind, "title": one.title, "evidence": one.evidence, "remedy": one.remedy}
            | {"gain": one.gain_percent, "rank": one.rank, "bucket": one.bucket, "steps": one.steps}
            for one in facts.found
        ]
        return {"text": facts.headline, "items": items, "steps": facts.steps}

    def svg(self, facts: FindingsFacts) -> str:
        """Returns the findings with their evidence and remedies: a list says more than bars."""
        if not facts.found:
            return empty_svg(f"Findings: {facts.headline}")
        body, y = [], 4
        for one in facts.found[:_MOST_DRAWN]:
            saving = f"{one.gain_percent:.1f} %"
            body.append(f"<text x='6' y='{y + 14}' style='font-weight:700;font-size:15px'>{saving}</text>")
            for style, words in (("bold", one.title), ("", one.evidence), ("role-forward", f"→ {one.remedy}")):
                for line in textwrap.wrap(words, 120):
                    body.append(text(80, y + 13, line, style))
                    y += 17
            y += 9
        return drawing(WIDTH, y, body, "Findings: estimated saving in percent of the step")


def findings_facts(facts: Facts | None) -> FindingsFacts:
    """Returns what was found in these facts; None: no step is complete on every rank."""
    found = findings.findings(facts)
    return FindingsFacts(found, findings.headline(facts, found), 0 if facts is None else len(facts.steps))


def findings_scene(found: Sequence[Finding], headline: str) -> Scene:
    """Returns the findings by estimated saving; `headline` sums them up in a sentence, also if there are none."""
    lane, gains = np.arange(len(found)), np.array([one.gain_percent for one in found])
    tips = [f"{one.evidence} → {one.remedy}" for one in found]
    bars = Bars("estimated saving", "good", lane, gains, [f"{gain:.1f} %" for gain in gains], tips)
    return Scene(
        "Findings: estimated saving of each change alone",
        (Panel(Axis("% of the step"), Axis("", [one.title for one in found]), (bars,)),),
        empty="" if found else headline,
    )
