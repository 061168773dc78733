"""The bucket timeline of one step as a scene: the states of each bucket on each rank over time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...analysis.step_metrics import EDGES
from ...formatting import counted, size
from ...timeline import steady_steps
from ...timeline.timeline import Timeline
from ..paint.figure import to_plotly
from ..paint.palette import LABELS, PARTS, TITLES
from ..scene import Axis, Panel, Rule, Scene, Spans
from .layout_words import LayoutWords, layout_words
from .step_frames import BEGIN, END, FINALIZE, FORWARD_BEGIN, FORWARD_END, PREVIOUS_END, StepFrame, StepFrames
from .view import Reported, Selection, View

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["BucketTimeline", "Phase", "find_step", "phases", "step_to_draw", "timeline_figure", "timeline_scene"]

Marks = Sequence[tuple[int, int, str]]  # of `Timeline.marks`: rank, host time in ns, name
_KINDS = ("other", "forward", "backward", "finalize")


class BucketTimeline(View):
    """The timeline of one step. In a page it is painted from the steps' feed."""

    name = "timeline"
    title = "Timeline"
    about = "When each bucket on each rank became ready, was launched and was reduced, for one or several steps."
    question = "How fast"
    fed = True

    def facts(self, timeline: Timeline, chosen: Selection) -> tuple[StepFrame, dict[str, Any]] | None:
        """Returns the step and the description of its buckets; None if the step is not held."""
        try:
            return find_step(timeline, chosen.step, chosen.model)
        except ValueError:
            return None

    def scene(self, facts: tuple[StepFrame, dict[str, Any]] | None) -> Scene:
        if facts is None:
            return Scene(self.title, empty="no step has been recorded")
        frame, assignment = facts
        return timeline_scene(frame, assignment.get("module"), assignment=assignment or None, tips=False)

    def figure(self, timeline: Timeline, **options: Any) -> go.Figure:
        return timeline_figure(timeline, **options)

    def reported(self, timeline: Timeline, chosen: Selection) -> Reported:
        """Returns the step that stands for the analysed ones, with how it was chosen."""
        step, why = step_to_draw(timeline, chosen.model_in(timeline))
        try:
            frame, assignment = find_step(timeline, step, chosen.model)
        except ValueError as error:  # the other figures come from tables that reach further back
            return Reported("Timeline of a step", "", Scene(self.title, empty=f"Not drawn: {error}."))
        words = layout_words(assignment)
        terms = {
            "filling": "its gradients are being computed",
            "queued": f"it waits for the {words.unit}s before it",
            "waiting": "launched, but not on every rank",
            "reducing": "launched on every rank, in flight",
            "exposed": f"(thin line) {words.exposed}",
        }
        legend = "; ".join(f"{name}: {terms[part]}" for part, (name, _) in _titles(words).items())
        caption = f"One row per {words.unit} and rank. {legend[0].upper()}{legend[1:]}."
        told = f"{why[:1].upper()}{why[1:]}. " if why else ""
        scene = timeline_scene(frame, assignment=assignment, tips=False)
        caption = f"{told}{caption} {scene.summary}".rstrip(" .") + "."
        return Reported(f"Timeline of step {frame.step}", caption, scene, style="step")


def step_to_draw(timeline: Timeline, reducer: int) -> tuple[int | None, str]:
    """Returns the step that stands for the analysed ones and what it is, see `steady_steps.step_to_draw`; None and ""
    if there is none."""
    facts = timeline.analysis_input(reducer)
    found = None if facts is None else steady_steps.step_to_draw(facts, timeline.held_steps(reducer))
    return (None, "") if found is None else found


def find_step(timeline: Timeline, step: int | None, reducer: int | None) -> tuple[StepFrame, dict[str, Any]]:
    """Returns the step (None: one that stands for the analysed ones) and the description of its buckets.

    Raises:
        ValueError: there is no such step.
    """
    frames, info = StepFrames(timeline), timeline.model(reducer)
    chosen = -1 if info is None else info.reducer
    wanted = step_to_draw(timeline, chosen)[0] if step is None and info is not None else step
    frame = frames.latest(chosen) if wanted is None else frames.frame(chosen, wanted)
    if frame is None:
        held = timeline.held_steps(chosen)
        known = f"choose from steps {held[0]} to {held[-1]}" if len(held) else "no step has been recorded"
        raise ValueError(f"there are no events of step {step} of model {reducer}; {known}")
    try:
        return frame, timeline.assignment(chosen, frame.generation)
    except ValueError:
        return frame, {}


def timeline_scene(
    frame: StepFrame,
    module: str | None = None,
    *,
    rows: Sequence[int] | None = None,
    marks: Marks | None = None,
    assignment: dict[str, Any] | None = None,
    tips: bool = True,
) -> Scene:
    """Returns a lane for each rank's backward, and below it a lane for each of its buckets.

    Args:
        frame: the step.
        module: name of the model's class.
        rows: which of its ranks; None for all.
        marks: the program's annotations, to show the time from the end of the previous step; None: start at the
            backward.
        assignment: description of the buckets, for tooltips of the bars and names of parameter groups; None: neither.
        tips: whether bars have tooltips.
    """
    chosen = list(range(len(frame.ranks)) if rows is None else rows)
    buckets = frame.shape[1]
    heads = np.arange(len(chosen)) * (buckets + 1)
    words = layout_words(assignment)
    names = [words.name(one) for one in range(buckets)]
    lanes = [name for row in chosen for name in (f"rank {frame.ranks[row]}", *names)]
    edges, extent = frame.milliseconds(frame.edges_ns())[chosen], frame.extent_ms()[chosen]
    known = extent[~np.isnan(extent)]
    latest = float(known.max()) if len(known) else 1.0
    found = [(int(head), one) for head, row in zip(heads, chosen, strict=True) for one in phases(frame, row, marks)]
    titles = _titles(words)
    told = None if assignment is None or not tips else _tips(frame, chosen, edges, latest, assignment, titles)
    spans = [*_parts(edges, latest, heads, told, titles), *_phase_spans(found, lanes)]
    bounds = frame.milliseconds(frame.bounds_ns)[chosen]
    ends = [
        Rule("line", float(at), "end of the rank's backward computation", (int(head), int(head) + buckets))
        for head, at in zip(heads, bounds[:, FINALIZE], strict=True)
        if at == at
    ]
    first = min([0.0, *known.tolist(), *(one.begin for _, one in found)])
    x = Axis("milliseconds since the first rank's backward began", low=first, top=1.02 * max(latest, 1e-3))
    share = frame.overlap().hidden_share
    return Scene(
        f"{words.title} timeline{f' of {module}' if module else ''}: step {frame.step}",
        (Panel(x, Axis("", lanes, headings=heads.tolist()), (*spans, *ends)),),
        summary="" if math.isnan(share) else f"{share:.0%} of the communication overlapped",
    )


def _titles(words: LayoutWords) -> dict[str, tuple[str, str]]:
    """Names of the parts of the buckets' time that are recorded, and what they mean."""
    named, meant = {**LABELS, "reducing": words.reduction}, {**TITLES, "exposed": words.exposed}
    return {part: (named[part], meant[part]) for part in PARTS if part not in words.unseen}


def _parts(
    edges: Any, latest: float, heads: Any, tips: list[list[str]] | None, titles: Mapping[str, tuple[str, str]]
) -> Iterator[Spans]:
    """Yields the parts of the buckets' time; `edges` of shape ``[ranks, buckets, 6]``; open parts end at `latest`."""
    for index, part in enumerate(PARTS):
        if part not in titles:
            continue
        first, last = (EDGES.index("exposed_from"), EDGES.index("reduced")) if part == "exposed" else (index, index + 1)
        begin, end = edges[..., first], edges[..., last]
        end = np.where(np.isnan(end), latest, end)
        # A part that took no time is not drawn, except filling and ready: a single gradient fills its bucket at once.
        row, bucket = np.nonzero((end > begin) | (~np.isnan(begin) & (index < PARTS.index("waiting"))))
        about = [] if tips is None else [tips[a][b] for a, b in zip(row, bucket, strict=True)]
        lane = heads[row] + 1 + bucket
        at = (begin[row, bucket], end[row, bucket])
        name, meaning = titles[part]
        yield Spans(name, part, lane, *at, thin=part == "exposed", tips=about, about=meaning)


def _tips(
    frame: StepFrame,
    rows: Sequence[int],
    edges: Any,
    latest: float,
    assignment: dict[str, Any],
    titles: Mapping[str, tuple[str, str]],
) -> list[list[str]]:
    """Returns the tooltip of each bucket on each rank."""
    sizes = {entry["bucket"]: len(entry["parameters"]) for entry in assignment.get("buckets", ())}
    words = layout_words(assignment)
    last, reached = frame.last_rank(frame.sync()), np.where(np.isnan(edges), latest, edges)
    made = []
    for index, row in enumerate(rows):
        of_rank = []
        for bucket in range(frame.shape[1]):
            at = reached[index, bucket]
            lengths = [*np.diff(at[:5]), at[4] - at[5]]
            lines = [
                f"step {frame.step}, rank {frame.ranks[row]}, {words.name(bucket)}",
                f"{size(frame.bucket_bytes[bucket])}"
                + (f", {counted(sizes[bucket], 'parameter')}" if bucket in sizes else ""),
                *(
                    f"{titles[part][0]}: {ms:.2f} ms"
                    for part, ms in zip(PARTS, lengths, strict=True)
                    if ms > 0 and part in titles
                ),
            ]
            of_rank.append(
                "\n".join([*lines, *([f"last to launch: rank {last[bucket]}"] if last[bucket] >= 0 else [])])
            )
        made.append(of_rank)
    return made


def _phase_spans(found: Sequence[tuple[int, Phase]], lanes: Sequence[str]) -> Iterator[Spans]:
    for kind in _KINDS:
        chosen = [(int(lane), one) for lane, one in found if one.kind == kind]
        if chosen:
            texts = [f"{one.name} {one.end - one.begin:.2f} ms" for _, one in chosen]
            yield Spans(
                "",
                f"phase-{kind}",
                np.array([lane for lane, _ in chosen]),
                np.array([one.begin for _, one in chosen]),
                np.array([one.end for _, one in chosen]),
                texts=texts,
                tips=[f"{lanes[lane]}: {text}" for (lane, _), text in zip(chosen, texts, strict=True)],
            )


@dataclass(frozen=True)
class Phase:
    """One phase: milliseconds of the step's common axis; `kind`: other, forward, backward or finalize."""

    name: str
    kind: str
    begin: float
    end: float


def phases(frame: StepFrame, row: int, marks: Marks | None = ()) -> list[Phase]:
    """Returns the phases of one rank, from the end of the previous step to the end of the backward.

    Args:
        frame: the step.
        row: which of its ranks.
        marks: annotations; outside the model, each names the time until the next mark or phase. None: start at the
            backward.
    """
    bounds, outside = frame.milliseconds(frame.bounds_ns)[row], frame.milliseconds(frame.outside_ns)[row]
    begin, finalize, end = float(bounds[BEGIN]), float(bounds[FINALIZE]), float(bounds[END])
    found: list[Phase] = []
    if marks is not None:
        own = sorted(((at - frame.origin_ns) / 1e6, name) for rank, at, name in marks if rank == frame.ranks[row])
        forward = not math.isnan(outside[FORWARD_BEGIN]) and not math.isnan(outside[FORWARD_END])
        first = float(outside[FORWARD_BEGIN]) if forward else begin
        found = _named(own, float(outside[PREVIOUS_END]), first, "optimizer, rest")
        if forward:
            found.append(Phase("forward", "forward", first, float(outside[FORWARD_END])))
            found += _named(own, float(outside[FORWARD_END]), begin, "loss, rest")
    if not math.isnan(begin):
        now = float(np.nanmax(frame.extent_ms()[:, 1]))
        done = next((at for at in (finalize, end, now) if at == at), begin)
        found += [
            Phase("backward", "backward", begin, done),
            Phase("finalize", "finalize", done, now if end != end else end),
        ]
    return [one for one in found if one.end > one.begin]


def _named(marks: Sequence[tuple[float, str]], begin: float, end: float, first: str) -> list[Phase]:
    """The time from `begin` to `end`, divided and named by the marks in between; empty if either is NaN."""
    if math.isnan(begin) or math.isnan(end):
        return []
    points = [(begin, first), *((at, name) for at, name in marks if begin <= at < end), (end, "")]
    return [Phase(name, "other", at, until) for (at, name), (until, _) in itertools.pairwise(points)]


def timeline_figure(
    timeline: Timeline,
    step: int | None = None,
    *,
    model: int | None = None,
    ranks: Sequence[int] | None = None,
    whole: bool = False,
    width: int | None = None,
) -> go.Figure:
    """Returns the bucket timeline of one step: one row per rank and bucket, with time in ms from left to right.

    Args:
        timeline: the source of the events.
        step: which step; None for one that stands for the analysed ones: in which the straggler is late, if there is
            one, else one that is as long as most.
        model: which model; None for the most recently active.
        ranks: which ranks; None for all.
        whole: start at the end of the previous step, to show each rank's forward and the time between the steps.
        width: in pixels; None for the width of the page.

    Raises:
        ValueError: there is no such step, or none of these ranks took part in it.
    """
    frame, assignment = find_step(timeline, step, model)
    rows = [row for row, rank in enumerate(frame.ranks) if ranks is None or rank in ranks]
    if not rows:
        raise ValueError(f"none of the ranks {list(ranks or ())} took part in this step; its ranks are {frame.ranks}")
    marks = timeline.marks() if whole else None
    scene = timeline_scene(frame, assignment.get("module"), rows=rows, marks=marks, assignment=assignment)
    made = to_plotly(scene, max(280, min(1_400, 170 + 18 * len(scene.panels[0].y.lanes))))
    made.update_layout(width=width)
    return made
