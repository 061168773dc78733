"""The numbers of a report: one model's steps, ranks and buckets, without pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...analysis import findings
from ...analysis.step_metrics import PHASES, TypicalStep, typical
from ...formatting import counted, ms, rate, size, step_range
from ...timeline import steady_steps
from ...timeline.tables import span_columns
from ...timeline.tables.span_columns import Columns
from ...timeline.timeline import Timeline
from ..scene import Advice
from ..views import LayoutWords, advice, last_shares, layout_words, parts_table

__all__ = ["ReportData", "gather"]

_OF_RANK = (PHASES, ("forward",), ("alone", "hidden"), ("hidden",), ("exposed",))  # columns of the table of ranks
_NO_OPTIONS = {"averages_in_place"}  # what a description holds besides: a fact about the backend

Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class ReportData:
    """The data of one model; columns as in `Timeline`, complete steps only: of the analysed steps, and `last_steps`:
    of how many the pictures of the run show; `drawn`: see `steady_steps.step_to_draw`."""

    reducer: int
    module: str
    ranks: tuple[int, ...]
    buckets: int
    words: LayoutWords
    parameters: int
    recorded_steps: int
    analysed: str
    other_models: int
    steps: Columns
    last_steps: int
    spans: Columns
    findings: Sequence[Advice]
    headline: str
    last: Mapping[int, float]
    drawn: tuple[int | None, str]
    tiles: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = field(default_factory=list)


def gather(timeline: Timeline, reducer: int | None, last_steps: int) -> ReportData | None:
    """Reads a timeline; None if no step of the model is complete."""
    known = [one for one in timeline.reducers() if one.last_step >= 0]
    wanted = [one for one in known if reducer in (None, one.reducer)]
    if not wanted:
        return None
    info = wanted[-1]
    layout, judged = timeline.analysis_layout(info.reducer), timeline.analysis_input(info.reducer)
    if layout is None or judged is None:
        return None
    views = timeline.views_of(info.reducer, judged.steps.step)
    steps = span_columns.step_columns(views)
    spans = span_columns.span_columns(views, {})
    sync = span_columns.sync_columns(spans, {info.reducer: len(info.ranks)})
    assignment = layout.description or {"parameters": [], "buckets": []}
    found = findings.findings(judged)
    dropped = {one.rank: one.dropped for one in timeline.ranks()}
    last = last_shares(judged)
    return ReportData(
        reducer=info.reducer,
        module=info.module,
        ranks=tuple(sorted({*info.ranks, *steps["rank"].astype(int).tolist()})),  # a file may have other ranks
        buckets=max(len(assignment["buckets"]), int(spans["bucket"].max(initial=-1)) + 1),
        words=layout_words(assignment),
        parameters=len(assignment["parameters"]),
        recorded_steps=len(layout.step),
        analysed=step_range(judged.steps.step.tolist()),
        other_models=len(known) - 1,
        steps=steps,
        last_steps=last_steps,
        spans=spans,
        findings=advice(found, judged),
        headline=findings.headline(judged, found),
        last=last,
        drawn=steady_steps.step_to_draw(judged, timeline.held_steps(info.reducer)) or (None, ""),
        tiles=_tiles(judged.typical, steps),
        tables=[
            *_parts_table(timeline, info.reducer),
            _rank_table(judged.typical, steps, last, dropped),
            _bucket_table(judged.typical, spans, sync, assignment),
            *_options(assignment),
        ],
    )


def _rows(columns: Columns, chosen: npt.NDArray[Any]) -> Columns:
    return {name: values[chosen] for name, values in columns.items()}


def _median(values: npt.NDArray[Any]) -> float:
    known = values[np.isfinite(values)] if len(values) else values
    return float(np.median(known)) if len(known) else float("nan")


def _tiles(one: TypicalStep | None, steps: Columns) -> list[tuple[str, str]]:
    tiles = []
    if one is not None and one.ranks:
        tiles = [("step (median)", ms(one.total_ms))] if one.is_whole else []
        shown = ("forward", "backward computation", "exposed communication")
        tiles += [(name, ms(value)) for name, value in one.named() if name in shown]
        share = one.overlapped_share
        tiles += [("overlapped communication", f"{100 * share:.0f} %" if share == share else "none")]
    elif (whole := typical(steps["step"], steps["step_ms"])) == whole:
        tiles = [("step (median)", ms(whole))]
    return [*tiles, ("gradients per step", size(_median(steps["bytes"].astype(float))))]


def _parts_table(timeline: Timeline, reducer: int) -> list[Table]:
    parts = timeline.parts(reducer)
    (first, *head), rows = parts_table(parts)
    steps = f"means of {counted(parts.steps, 'step')}; the mean step takes {ms(1e3 * parts.total)}"
    title = f"Parts of a step ({steps}; indented lines belong to the part above)"
    return [(title, [f"{first}:", *head], rows)] if rows else []


def _rank_table(one: TypicalStep | None, steps: Columns, shares: Mapping[int, float], dropped: dict[int, int]) -> Table:
    lines = []
    for rank in np.unique(steps["rank"]).astype(int).tolist():
        last = 100 * shares.get(rank, float("nan"))
        own = [float("nan")] * len(_OF_RANK)
        if one is not None and rank in one.ranks:
            of_rank = dict(zip(PHASES, one.by_rank_ms[one.ranks.index(rank)].tolist(), strict=True))
            own = [sum(of_rank[part] for part in parts) for parts in _OF_RANK]
        count = int((steps["rank"] == rank).sum())
        lines.append([rank, count, *own, f"{last:.0f}" if last == last else "–", dropped.get(rank, 0)])
    head = [
        "rank",
        "steps",
        "step ms",
        "forward ms",
        "computation ms",
        "overlapped ms",
        "exposed ms",
        "last, % of steps",
        "dropped events",
    ]
    return ("Ranks (medians)", head, lines)


def _bucket_table(one: TypicalStep | None, spans: Columns, sync: Columns, assignment: dict[str, Any]) -> Table:
    lines: list[list[Any]] = []
    of_step = typical if one is None or not one.ranks else one.of
    words = layout_words(assignment)
    of_parameters = {one["index"]: one["name"] for one in assignment["parameters"]}
    for bucket in assignment["buckets"]:
        number, members = bucket["bucket"], [of_parameters[index] for index in bucket["parameters"]]
        mine, ours = _rows(spans, spans["bucket"] == number), _rows(sync, sync["bucket"] == number)
        ready, exposed = typical(mine["step"], mine["ready_ms"]), of_step(mine["step"], mine["exposed_ms"])
        late, reduced, speed = (_median(ours[name]) for name in ("late_ms", "all_reduce_ms", "bandwidth_gb_s"))
        of_all = [late, reduced, rate(speed) if speed == speed else "–"]
        named = [words.cell(number), size(bucket["bytes"]), len(members), ready, *of_all, exposed]
        lines.append([*named, *words.members(members)])
    head = [words.head, "size", "parameters", "ready ms", "waiting ms", f"{words.reduction} ms", "bandwidth"]
    return (words.reductions, [*head, "exposed ms", *words.holds], lines)


def _options(assignment: dict[str, Any]) -> list[Table]:
    options = assignment.get("options")
    if not options:
        return []
    lines = [[name, _shown(value)] for name, value in options.items() if name not in _NO_OPTIONS]
    return [("Options of the model", ["option", "value:"], lines)]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
