"""Slow computations of the kernel: findings, stragglers, readiness of each parameter; only for views on the page.

[Note: at most a fiftieth]
Each round takes some milliseconds (more with many ranks and parameters). The next one waits fifty times as long, and at
least a second. What no page shows is not computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis import findings
from ..analysis.findings import Facts
from ..analysis.findings.ranks import last_most_often, varying_rank
from ..formatting import counted, ms, step_range
from ..timeline import judged_steps
from ..timeline.tables.step_table import STEP_FIELDS
from ..timeline.timeline import LatePlace, Timeline
from .views.catalogue import VIEWS
from .views.gradients import gradient_facts
from .views.groups import group_lanes, groups_trait
from .views.overview import overview, strip
from .views.parameter_groups import parameter_groups_scene, parameter_groups_trait
from .views.view_data import parts_table, parts_words, readiness

__all__ = ["SlowFacts", "bucket_gradients", "last_ranks", "late_places", "late_text"]

_SHARE, _LEAST_SECONDS = 50, 1.0
_VIEWS = {"overview", "findings", "overlap", "parameter_groups", "stragglers", "buckets", "gradients", "groups"}
_BEGIN = STEP_FIELDS.index("backward_begin")


class SlowFacts:
    """Keeps the data of the browser's views up to date, for the views that are on a page."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._looks: dict[str, _Look] = {}  # by page
        self._next = 0.0
        self._done: object = None

    def look(
        self,
        page: str,
        views: Sequence[str],
        reducer: int | None,
        between: tuple[int, int] | None = None,
        step: int | None = None,
    ) -> None:
        """Notes which views a page shows now, for which model, the first and last step that a reader chose, and the
        one that is shown (None: the newest)."""
        self._looks.pop(page, None)
        if views:
            self._looks[page] = _Look(frozenset(views), reducer, between, step)
        self._next = 0.0

    def forget(self) -> None:
        """Forgets what was returned: the timeline was cleared."""
        self._next, self._done = 0.0, None

    def update(self, *, force: bool = False) -> dict[str, dict[str, Any]]:
        """Returns what has changed, by the name of its trait.

        Args:
            force: compute now, whatever it costs.
        """
        seen = {view for one in self._looks.values() for view in one.views}
        wanted = seen & _VIEWS
        if any(VIEWS[view].steps for view in seen if view in VIEWS):
            wanted.add("strip")
        last = next((one for one in reversed(self._looks.values()) if one.reducer is not None), _Look())
        reducer = last.reducer
        key = (self._timeline.version, last, frozenset(wanted))
        if not wanted or key == self._done or (not force and time.monotonic() < self._next):
            return {}
        begin = time.thread_time()
        chosen = [one for one in self._timeline.reducers() if one.last_step >= 0 and reducer in (None, one.reducer)]
        made = self._look_at(chosen[-1].reducer, wanted, last) if chosen else {}
        if "groups" in wanted:
            made["groups"] = groups_trait(group_lanes(self._timeline))
        if not made:
            return {}
        self._done = key
        self._next = time.monotonic() + max(_LEAST_SECONDS, _SHARE * (time.thread_time() - begin))
        return made

    def _look_at(self, reducer: int, wanted: set[str], asked: _Look) -> dict[str, dict[str, Any]]:
        made: dict[str, dict[str, Any]] = {}
        between = asked.between
        facts = None
        if wanted & {"overview", "findings", "stragglers"}:
            facts = self._timeline.judgement(reducer, between=between)  # the same for all, so that they agree
        steps = 0 if facts is None else len(facts.steps)
        if wanted & {"overview", "findings"}:
            made["findings"] = {"reducer": reducer, "steps": steps, **_findings(facts)}
        if "overview" in wanted:
            made["overview"] = {"reducer": reducer, **overview(self._timeline, facts, reducer, between is None)}
        if "strip" in wanted:
            made["strip"] = {"reducer": reducer, **strip(self._timeline, reducer)}
        if "stragglers" in wanted:
            late = judged_steps.late_places(facts) if facts is not None else []
            text = late_text(facts, late)
            made["late"] = {"reducer": reducer, "steps": steps, "text": text, "places": late_places(late)}
            made["late"]["last"] = last_ranks(facts)
        if "buckets" in wanted:
            views = self._timeline.views(reducer, judged_steps.ANALYSED_STEPS)
            made["readiness"] = {"reducer": reducer, **readiness(views, self._parameters(reducer))}
        if "overlap" in wanted:
            parts = self._timeline.parts(reducer)
            head, rows = parts_table(parts)
            made["parts"] = {"reducer": reducer, "text": parts_words(parts), "head": head, "rows": rows}
        if "parameter_groups" in wanted:
            shown = parameter_groups_trait(parameter_groups_scene(self._timeline, reducer, step=asked.step))
            made["parameter_groups"] = {"reducer": reducer, **shown}
        if "gradients" in wanted:
            made["norms"] = {"reducer": reducer, **gradient_facts(self._timeline, reducer)}
        return made

    def _parameters(self, reducer: int) -> int:
        """How many parameters a model has; 0 until a rank has described it."""
        try:
            return len(self._timeline.assignment(reducer)["parameters"])
        except ValueError:
            return 0


@dataclass(frozen=True)
class _Look:
    """What a page shows now."""

    views: frozenset[str] = frozenset()
    reducer: int | None = None
    between: tuple[int, int] | None = None
    step: int | None = None


def _findings(facts: Facts | None) -> dict[str, Any]:
    found = findings.findings(facts)
    items = [
        {"kind": one.kind, "title": one.title, "evidence": one.evidence, "remedy": one.remedy}
        | {"gain": one.gain_percent, "rank": one.rank, "bucket": one.bucket, "steps": one.steps}
        for one in found
    ]
    return {"text": findings.headline(facts, found), "items": items}


def late_places(found: Sequence[LatePlace]) -> list[dict[str, Any]]:
    """Returns straggler locations as the browser shows them."""
    return [
        {"rank": one.rank, "where": _where(one), "delay": one.delay_ms, "share": one.share}
        | {"pattern": one.pattern, "cost": one.cost_percent, "bucket": one.bucket}
        for one in found
    ]


def late_text(facts: Facts | None, late: Sequence[LatePlace]) -> str:
    """Returns a sentence about stragglers, in the same words as findings and the summary.

    Args:
        facts: None if no step is complete on every rank.
        late: the straggler locations that were found in them, the most expensive first.
    """
    if facts is None or not len(facts.steps):
        return "No step is complete on every rank yet."
    judged = f"{counted(len(facts.steps), 'step')} ({step_range(facts.steps.step.tolist())})"
    if late:
        worst = late[0]
        if worst.words:
            often = f"in {100 * worst.share:.0f} % of the steps"
            told = f"Rank {worst.rank} is late {worst.words}, by {ms(worst.delay_ms)} {often}."
        elif worst.where == "varying":
            told = varying_rank(worst.rank, worst.share, worst.delay_ms)
        else:
            told = (
                f"Rank {worst.rank} falls behind {_where(worst)}, by {ms(worst.delay_ms)} in {100 * worst.share:.0f} % "
                f"of the steps ({worst.pattern})."
            )
        return f"{told} It costs {worst.cost_percent:.1f} % of the step. Analysed: {judged}."
    if len(facts.steps.ranks) < 2:
        return "A single rank has no stragglers."
    return f"No rank is a straggler in {judged}. {last_most_often(facts)}".rstrip()


def last_ranks(facts: Facts | None) -> dict[str, Any]:
    """Returns by rank how often it was last (share of the steps), and how many ms the others then waited for it."""
    if facts is None or len(facts.steps.ranks) < 2:
        return {}
    each = zip(facts.steps.ranks, facts.last.share.tolist(), facts.last.delay_ns.tolist(), strict=True)
    return {str(rank): [share, delay / 1e6 if delay == delay else None] for rank, share, delay in each}


def _where(one: LatePlace) -> str:
    if one.words:
        return one.words
    if one.parameter is not None:
        return f"at the gradient of {one.parameter}" + (f" (bucket {one.bucket})" if one.bucket is not None else "")
    if one.bucket is not None:
        return f"in bucket {one.bucket}"
    if one.where == "everywhere":
        return "throughout its backward"
    if one.where == "varying":
        return "at varying places"
    return "before its backward (input data, forward, code between the steps)"


def bucket_gradients(timeline: Timeline, reducer: int, step: int, bucket: int) -> dict[str, Any]:
    """Returns when each gradient of a bucket was ready in one step.

    Returns:
        ``type``, ``reducer``, ``step``, ``bucket``, ``generation``; ``ranks``; ``ms``: for each rank, a list of ms
        since its backward began, in the order of the bucket's buffer, None where there was no gradient.
    """
    held = [one for one in timeline.views_of(reducer, np.array([step])) if len(one.step)]
    generation = int(held[0].generation[0]) if held else 0
    members = _members(timeline, reducer, generation, bucket)
    times: list[list[float | None]] = []
    for one in held:
        begin, ready = one.steps[0, _BEGIN], np.append(one.gradients[0], 0)  # the last one: of a parameter without any
        at = ready[np.minimum(members, len(ready) - 1)]
        times.append([round(float(ns - begin) / 1e6, 4) if ns > 0 else None for ns in at.tolist()])
    found = {"type": "gradients", "reducer": reducer, "step": step, "bucket": bucket, "generation": generation}
    return {**found, "ranks": [one.rank for one in held], "ms": times}


def _members(timeline: Timeline, reducer: int, generation: int, bucket: int) -> npt.NDArray[np.int64]:
    try:
        buckets = timeline.assignment(reducer, generation)["buckets"]
    except ValueError:
        return np.zeros(0, np.int64)
    found: list[int] = next((one["parameters"] for one in buckets if one["bucket"] == bucket), [])
    return np.asarray(found, np.int64)
