"""Parameter groups of `fully_shard` and `replicate`: a lane for each group and rank, over one step; as a scene."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...analysis.findings import Facts
from ...analysis.parameter_groups import BEFORE, FORWARD, KINDS, ModelCollectives, done_between
from ...analysis.step_metrics import median
from ...formatting import counted, ms, size, step_range
from ...timeline.steady_steps import ANALYSED_STEPS
from ...timeline.summary import UNTOLD
from ...timeline.tables.span_columns import Columns, TableView
from ...timeline.tables.step_table import STEP_FIELDS
from ...timeline.timeline import Timeline
from ..scene import Axis, Block, Panel, Scene, Spans, Table
from .layout_words import layout_words
from .view import Reported, Selection, View

__all__ = ["ParameterGroups", "parameter_groups_scene"]

_TITLE = "Parameter groups"
_NONE = "no model with fully_shard or replicate has been recorded yet"
_MOST_LANES = 64
_MOST_ROWS = 200
_ROLES = {  # as they are painted
    "forward": ("phase-forward", "forward"),
    "backward": ("phase-backward", "backward"),
    KINDS[0]: ("adds", "all-gather in the forward"),
    KINDS[1]: ("filling", "all-gather in the backward"),
    KINDS[2]: ("reducing", "reduce-scatter"),
    KINDS[3]: ("noise", "all-reduce"),
    "exposed": ("exposed", "exposed (thin line): the rank waits for it"),
}
_TIMES = ("all-gather (forward) ms", "all-gather (backward) ms", "reduce-scatter ms", "all-reduce ms")  # as `KINDS`
_EXPOSED = "of it exposed"
_END, _BEGIN, _FORWARD_BEGIN = map(STEP_FIELDS.index, ("backward_end", "backward_begin", "forward_begin"))


class ParameterGroups(View):
    """The collectives of each parameter group; its facts are the scene, which holds all numbers."""

    name = "parameter_groups"
    title = _TITLE
    about = (
        "With fully_shard or replicate: when each parameter group was gathered and reduced, and what ranks waited for."
    )
    question = "How fast"
    groups = of_step = True
    pixels = (170, 20)

    def facts(self, timeline: Timeline, chosen: Selection) -> Scene:
        return parameter_groups_scene(timeline, chosen.model, chosen.last_steps, step=chosen.step)

    def scene(self, facts: Scene) -> Scene:
        return facts

    def blocks(self, facts: Scene) -> Sequence[Block]:
        if facts.empty or facts.table is None:
            return super().blocks(facts)
        return [f"{facts.title.removeprefix(_TITLE + ': ').capitalize()}. {facts.summary}", facts, facts.table]

    def reported(self, timeline: Timeline, chosen: Selection) -> Reported | None:
        scene = self.facts(timeline, Selection(chosen.model, step=chosen.step))
        return None if scene.empty else Reported(_TITLE, f"{scene.title}. {scene.summary}", scene, style="step")


def parameter_groups_scene(
    timeline: Timeline, model: int | None = None, last_steps: int | None = None, *, step: int | None = None
) -> Scene:
    """Returns a step as lanes, and a table of medians over the newest steps.

    Args:
        timeline: the source of the steps.
        model: which model; None for the one that is analysed, or the newest with parameter groups.
        last_steps: how many steps the medians are taken over.
        step: which step; None, or one that is not held or not complete: the newest complete one.
    """
    chosen = timeline.model_with_groups(model)
    if chosen is None:
        return Scene(_TITLE, empty=_NONE)
    views = [] if step is None else timeline.views_of(chosen, np.array([step]))
    step = _newest(views)
    if step is None:
        views = timeline.views(chosen, last_steps or ANALYSED_STEPS)
        step = _newest(views)
    if step is None:
        return Scene(_TITLE, empty="no step is complete on every rank yet")
    parts = timeline.collectives_in(views)
    layout = timeline.assignment(chosen, max(int(view.generation[view.step == step][0]) for view in views))["buckets"]
    columns = timeline.parameter_group_columns(chosen, last_steps or ANALYSED_STEPS)
    columns = {name: values[columns["complete"]] for name, values in columns.items()}
    spans, lanes, headings, top = _lanes(parts, step, layout)
    if not spans:
        return Scene(_TITLE, empty="the collectives of its steps are no longer kept; train a few more steps")
    facts = timeline.analysis_input(chosen)
    late = {} if facts is None else {(one.rank, one.bucket): one for one in facts.kind.late_places(facts)}
    told = [f"late {one.words}, by {ms(one.delay_ms)}" for one in late.values() if one.words]
    return Scene(
        f"{_TITLE}: step {step}",
        (Panel(Axis("milliseconds since the step began", top=top), Axis("", lanes, headings=headings), spans),),
        _table(columns, late),
        summary=_words(facts, columns)
        + (f" Rank {next(iter(late.values())).rank} is {told[0]}." if told else "")
        + _left_out(parts, layout),
    )


def _shown(
    parts: Sequence[tuple[TableView, ModelCollectives]], layout: Sequence[Mapping[str, Any]]
) -> Sequence[tuple[TableView, ModelCollectives]]:
    """The ranks that have lanes: all, or the first one where these would be too many."""
    return parts if len(parts) * len(layout) <= _MOST_LANES else parts[:1]


def _left_out(parts: Sequence[tuple[TableView, ModelCollectives]], layout: Sequence[Mapping[str, Any]]) -> str:
    """A sentence about ranks without lanes, if there are any."""
    shown = _shown(parts, layout)
    if len(shown) == len(parts):
        return ""
    few = f"{counted(len(layout), 'group')} on {counted(len(parts), 'rank')}"
    return f" The picture shows rank {shown[0][0].rank} only: {few} would have too many rows."


def _newest(views: Sequence[TableView]) -> int | None:
    """The newest step that has ended on all ranks."""
    done = [view.step[view.steps[:, _END] > 0] for view in views]
    common = set(done[0].tolist()).intersection(*(one.tolist() for one in done[1:])) if done else set()
    return max(common, default=None)


def _lanes(
    parts: Sequence[tuple[TableView, ModelCollectives]], step: int, layout: Sequence[Mapping[str, Any]]
) -> tuple[list[Spans], list[str], list[int], float]:
    shown = _shown(parts, layout)
    rows = [int(np.flatnonzero(view.step == step)[0]) for view, _ in shown]
    begins = [_begin(view, one, row) for (view, one), row in zip(shown, rows, strict=True)]
    origin = min(begins)
    words, headings = layout_words({"buckets": layout}), []
    lanes: list[str] = []
    for group in range(len(layout)):
        headings.append(len(lanes))
        lanes += [words.name(group), *(f"rank {view.rank}" for view, _ in shown)]
    found: dict[str, list[tuple[int, float, float, str]]] = {name: [] for name in _ROLES}
    for place, ((view, one), row) in enumerate(zip(shown, rows, strict=True)):
        for name, group, begin, end, tip in _spans_of(view, one, row, layout):
            if 0 <= group < len(layout):
                lane = group * (1 + len(shown)) + 1 + place
                found[name].append((lane, (begin - origin) / 1e6, (end - origin) / 1e6, tip))
    top = max((end for of in found.values() for _, _, end, _ in of), default=1.0)
    return [_as_spans(name, of) for name, of in found.items() if of], lanes, headings, 1.02 * top


def _as_spans(name: str, found: Sequence[tuple[int, float, float, str]]) -> Spans:
    lane, begin, end, tips = zip(*found, strict=True)
    role, title = _ROLES[name]
    of = np.array(lane, np.int64), np.array(begin), np.array(end)
    return Spans(title, role, *of, thin=name == "exposed", tips=tips)


def _begin(view: TableView, one: ModelCollectives, row: int) -> int:
    """When a step begins in the picture: with its forward; on a device, with what it meets first."""
    return one.first_ns(row, *view.steps[row, [_FORWARD_BEGIN, _BEGIN]].tolist())


def _spans_of(
    view: TableView, one: ModelCollectives, row: int, layout: Sequence[Mapping[str, Any]]
) -> list[tuple[str, int, int, int, str]]:
    """Key of `_ROLES`, group, begin and end in ns, and tooltip."""
    made = []
    mine = np.flatnonzero(one.row == row)
    for phase, group, begin, end in done_between(one, mine, layout):
        if phase != BEFORE and end > begin:
            name = str(layout[group].get("name", "?")) if 0 <= group < len(layout) else "?"
            key = "forward" if phase == FORWARD else "backward"
            made.append((key, group, begin, end, f"rank {view.rank}: {phase} of {name}\n{ms((end - begin) / 1e6)}"))
    for at in mine.tolist():
        kind, group, begin, end = (int(values[at]) for values in (one.kind, one.group, one.entered, one.ended))
        if not end or not 0 <= group < len(layout):
            continue
        title = f"rank {view.rank}: {_ROLES[KINDS[kind]][1]} of {layout[group].get('name', '?')}"
        waited = ms(int(one.wait_ns[at]) / 1e6) if one.told[at] else "not known"
        lines = [title, f"{ms((end - begin) / 1e6)}, of it exposed: {waited}", size(float(one.bytes[at]))]
        lines += ["started before it was needed"] if one.ahead[at] else []
        made.append((KINDS[kind], group, begin, end, "\n".join(lines)))
        if one.told[at] and one.wait_ns[at] > 0:
            wait = int(one.wait_begin[at])
            made.append(("exposed", group, wait, wait + int(one.wait_ns[at]), "\n".join(lines)))
    return made


def _words(facts: Facts | None, columns: Columns) -> str:
    one = facts.typical if facts is not None else None
    groups = counted(len(np.unique(columns["group"])), "parameter group")
    if facts is None or not np.isfinite(facts.steps.step_ns()).any():
        return f"{groups}; the first step is not enough to say how long a step takes."
    if one is None or not one.ranks:
        return f"{groups}. How much of the communication is exposed is not known here: {UNTOLD}."
    by_group = {
        int(group): (str(columns["module"][columns["group"] == group][0]), _exposed(columns, columns["group"] == group))
        for group in np.unique(columns["group"])
    }
    module, most = max(by_group.values(), key=lambda one: one[1])
    total = sum(one for _, one in by_group.values())
    share = f", {100 * most / total:.0f} % of it for module {module}" if total > 0 else ""
    return (
        f"{groups}. Exposed communication is {100 * one.ms('exposed') / one.total_ms:.0f} % of a step, "
        f"{ms(one.ms('exposed'))} of {ms(one.total_ms)} (median of {step_range(one.steps.tolist())}){share}."
    )


def _exposed(columns: Columns, chosen: npt.NDArray[np.bool_]) -> float:
    found = sum(columns[f"{kind}_exposed_ms"][chosen] for kind in KINDS)
    return float(np.nanmean(found)) if np.size(found) and np.isfinite(found).any() else 0.0


def _table(columns: Columns, late: Mapping[tuple[int, int | None], Any]) -> Table:
    """Medians, with the kinds of collectives that there are; where a rank is late only if one is."""
    times = {kind: time for kind, time in zip(KINDS, _TIMES, strict=True) if columns[f"{kind}_ms"].any()}
    head = ["module:", "rank", *(name for time in times.values() for name in (time, _EXPOSED))]
    head += ["late:"] if late else []
    return Table([*head, "whole", "held"], _rows(columns, late, list(times)), "Medians by group and rank")


def _rows(columns: Columns, late: Mapping[tuple[int, int | None], Any], kinds: Sequence[str]) -> list[list[object]]:
    made: list[list[object]] = []
    newest = columns["generation"] == columns["generation"].max(initial=0)
    for group in np.unique(columns["group"][newest]).tolist():
        for rank in np.unique(columns["rank"]).tolist():
            of = newest & (columns["group"] == group) & (columns["rank"] == rank)
            if not of.any() or len(made) >= _MOST_ROWS:
                continue
            times = [_typical(columns, f"{kind}{end}", kind, of) for kind in kinds for end in ("_ms", "_exposed_ms")]
            place = late.get((rank, group))
            told = [f"{place.words}, by {ms(place.delay_ms)}" if place is not None else ""] if late else []
            held = [size(float(columns[name][of][-1])) for name in ("unsharded_bytes", "sharded_bytes")]
            made.append([str(columns["module"][of][-1]), rank, *times, *told, *held])
    return made


def _typical(columns: Columns, name: str, kind: str, of: npt.NDArray[np.bool_]) -> float:
    """The median; NaN where the group has no collective of this kind."""
    return float(median(columns[name][of])) if columns[f"{kind}_ms"][of].any() else float("nan")
