"""The figures of a report, with captions and with their numbers as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...timeline.tables.span_columns import breakdown_of, known_steps
from ...timeline.timeline import Timeline
from ..paint import scene_svg
from ..paint.palette import LABELS
from ..scene import Scene
from ..views.gradients import gradient_facts
from ..views.groups import group_lanes, groups_scene
from ..views.parameter_groups import parameter_groups_scene
from ..views.scenes import gradients_scene, overlap_scene, stragglers_scene, sync_scene
from ..views.timeline_scene import find_step, timeline_scene
from ..views.view_data import sync_of, waiting_of
from .data import ReportData

__all__ = ["Figure", "figures", "group_figures"]


@dataclass(frozen=True)
class Figure:
    """A picture (SVG) with its title, caption and legend (HTML), and its numbers as a table: column names and rows."""

    title: str
    caption: str
    picture: str
    legend: str = ""
    style: str = ""
    table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None


def figures(timeline: Timeline, found: ReportData) -> Iterator[Figure]:
    """Yields the figures for which steps were recorded."""
    yield _step(timeline, found)
    yield _overlap(found)
    if len(found.sync["step"]) and len(found.ranks) > 1:
        yield _waiting(found)
        yield _sync(found)
    groups = parameter_groups_scene(timeline, found.reducer, step=found.drawn[0])
    if not groups.empty:
        yield replace(_of(groups, "Parameter groups", f"{groups.title}. {groups.summary}"), style="step")
    gradients = gradients_scene(gradient_facts(timeline, found.reducer))
    if not gradients.empty:
        yield _gradients(gradients)
    yield from group_figures(timeline)


def group_figures(timeline: Timeline) -> Iterator[Figure]:
    """Yields the operations of the process groups, if some were recorded."""
    scene = groups_scene(group_lanes(timeline))
    if not scene.empty:
        caption = (
            "Every collective, send and receive, from any source: the newest ones of the recording. The table sums "
            "up each group."
        )
        yield replace(_of(scene, "Collectives by group", caption), style="step")


def _step(timeline: Timeline, found: ReportData) -> Figure:
    try:
        frame, assignment = find_step(timeline, found.drawn[0], found.reducer)
    except ValueError as error:  # the other figures come from tables that reach further back
        return Figure("Timeline of a step", f"Not drawn: {error}.", "")
    words = found.words
    terms = {
        LABELS["filling"]: "its gradients are being computed",
        LABELS["queued"]: f"it waits for the {words.unit}s before it",
        LABELS["waiting"]: "launched, but not on every rank",
        words.reduction: "launched on every rank, in flight",
        LABELS["exposed"]: f"(thin line) {words.exposed}",
    }
    if words.grouped:
        del terms[LABELS["filling"]]
    legend = "; ".join(f"{part}: {term}" for part, term in terms.items())
    caption = f"One row per {words.unit} and rank. {legend[0].upper()}{legend[1:]}."
    told = f"{found.drawn[1][:1].upper()}{found.drawn[1][1:]}. " if found.drawn[1] else ""
    scene = timeline_scene(frame, assignment=assignment, tips=False)
    return replace(
        _of(scene, f"Timeline of step {frame.step}", f"{told}{caption} {scene.summary}".rstrip(" .") + "."),
        style="step",
    )


def _of(scene: Scene, title: str, caption: str) -> Figure:
    table = None if scene.table is None else (scene.table.head, scene.table.rows)
    return Figure(title, caption, scene_svg.picture(scene), scene_svg.legend(scene), table=table)


def _overlap(found: ReportData) -> Figure:
    """Forward, computation, communication and the rest of each step."""
    caption = "Means over the ranks. Overlapped communication runs during the backward’s computation. The table "
    scene = overlap_scene(breakdown_of(known_steps(found.shown_steps)))
    return _of(scene, "Step time breakdown", f"{caption}holds the newest 50 steps.")


def _waiting(found: ReportData) -> Figure:
    words = found.words
    first = "last cell of its row with a strong colour: the backward ends with the first module"
    caption = (
        f"Time per step (ms) during which every other rank had launched a {words.unit}’s {words.reduction} and this "
        f"rank had not. A rank that falls behind stays late in the {words.unit}s that follow, so look at the "
        f"{first if words.grouped else 'first cell of its row with a strong colour'}. The strongest colour is the "
        "longest wait."
    )
    shown = stragglers_scene(waiting_of(found.sync, found.ranks, found.last, found.buckets), words)
    return _of(shown, "Waiting for stragglers", caption)


def _sync(found: ReportData) -> Figure:
    words = found.words
    speed = "the bus bandwidth: the rate over each link of a ring of these ranks"
    if words.grouped:
        speed = f"the algorithm bandwidth: the bytes of the gradients divided by the time of the {words.reduction}"
    shown = sync_scene(sync_of(found.sync, found.ranks), words)
    return _of(shown, f"Gradient synchronisation by {words.unit}", f"Medians over the steps, with {speed}.")


def _gradients(scene: Scene) -> Figure:
    caption = (
        "Norms of each rank’s own gradients and of their average. The table holds the newest 50 monitored steps, "
        f"with the noise scale in batches of a rank. {scene.summary}"
    )
    return _of(scene, "Gradients before and after averaging", caption)
