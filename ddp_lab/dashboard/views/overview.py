"""The overview: how the training does in a sentence, what a step consists of, and the whole run as a strip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...analysis.findings import Facts
from ...analysis.step_metrics import PHASES, TypicalStep
from ...formatting import ms, step_range
from ...timeline import history
from ...timeline.summary import UNTOLD
from ...timeline.timeline import Timeline
from ..paint.palette import PHASES as LOOKS
from ..paint.palette import TITLES
from ..paint.scene_json import blocks_json
from ..scene import Axis, Bars, Line, Panel, Scene, Table, robust_top
from .view import Selection, View

__all__ = ["Overview", "Strip", "overview", "strip"]

_BLOCKS = 300  # of the strip
_MOST_RANKS = 16  # in a picture
_POINTS = 200  # of a line
_LOW = 0.32  # share of a picture's usual height
_UNLIKE = 0.1  # share by which a step takes longer or shorter than usual
_UNKNOWN = f"how much of a step is exposed communication is not known: {UNTOLD}"
_NONE = "No step is complete on every rank yet."


class Overview(View):
    """What to look at first."""

    name = "overview"
    title = "Overview"
    about = "How training is going, what a step consists of, and what to change first."
    also = ("strip", "findings")
    pixels = (150, 24)

    def facts(self, timeline: Timeline, chosen: Selection) -> dict[str, Any]:
        return overview(timeline, chosen.analysis_input_in(timeline), chosen.model_in(timeline), chosen.between is None)

    def scene(self, facts: dict[str, Any]) -> Scene:
        """Returns a step as a bar of named parts, and below it those of the first 16 ranks."""
        return overview_scene(facts, _MOST_RANKS)

    def page(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Returns ``text``; ``blocks`` of a step; ``course`` of what was logged first, preferably the loss, and all
        that was ``logged``: pairs of a name and its newest value."""
        scene, logged = overview_scene(facts), facts.get("logged", ())
        drawn = sorted((one for one in logged if len(one["values"]) > 1), key=lambda one: one["name"] != "loss")
        return {
            "text": facts["text"],
            "blocks": blocks_json([] if scene.empty or scene.table is None else [scene, scene.table]),
            "logged": [(one["name"], one["value"]) for one in logged],
            "course": blocks_json(_course(one) for one in drawn[:1]),
        }


def overview_scene(facts: dict[str, Any], most_ranks: int | None = None) -> Scene:
    """Returns a step as a bar of named parts, and below it those of the ranks; `most_ranks`: of the first ones."""
    if "parts" not in facts:
        return Scene(Overview.title, empty=f"{facts['text'][:1].lower()}{facts['text'][1:].rstrip('.')}")
    ranks = facts["ranks"][:most_ranks]
    rows = np.array([facts["parts"], *(parts for _, parts in ranks)])
    lanes, totals = ["a step", *(f"rank {rank}" for rank, _ in ranks)], rows.sum(axis=1)
    ends = [ms(total) for total in (facts["total"], *totals[1:])]
    bars = [
        Bars(
            LOOKS[key][1],
            key,
            np.arange(len(rows)),
            rows[:, part],
            ends if key == PHASES[-1] else (),
            about=TITLES[key],
        )
        for part, key in enumerate(PHASES)
    ]
    table = [[lane, float(row.sum()), *map(float, row)] for lane, row in zip(lanes, rows, strict=True)]
    return Scene(
        f"Overview: {facts['words']}",
        (Panel(Axis("ms", unit="ms"), Axis("", lanes), bars, heading="A step", total="step", more="by rank"),),
        Table(
            ["", "ms", *(f"{LOOKS[key][1]}, ms" for key in PHASES)],
            table,
            "What a typical step consists of (ms)",
            folded=True,
        ),
    )


def _course(logged: Mapping[str, Any]) -> Scene:
    """The course of a number that the program logged."""
    name, steps, values = logged["name"], np.array(logged["step"], np.int64), np.array(logged["values"])
    return Scene(
        f"{name}: from {values[0]:.3g} to {values[-1]:.3g}",
        (
            Panel(
                Axis("step"),
                Axis(name, low=min(0.0, float(values.min()))),
                (Line(name, "forward", steps, values),),
                _LOW,
            ),
        ),
    )


class Strip(View):
    """The whole run as a strip above the views of steps; no tab of its own."""

    name = "strip"
    title = "Step time"
    about = "The time of every step since the start."
    pixels = None

    def facts(self, timeline: Timeline, chosen: Selection) -> dict[str, Any]:
        return strip(timeline, chosen.model_in(timeline))

    def page(self, facts: dict[str, Any]) -> dict[str, Any]:
        return facts


def overview(timeline: Timeline, facts: Facts | None, reducer: int, whole: bool = True) -> dict[str, Any]:
    """Returns what the browser shows first: ``text``, its first sentence ``words``, ``logged`` (see `_logged`), and
    for the analysed steps ``first``, ``last``, ``total`` (ms), ``parts`` (ms, in the order of `PHASES`) and ``ranks``:
    pairs of a rank and its parts.

    Args:
        timeline: the source of the numbers.
        facts: of the analysed steps; None if there are none.
        reducer: which model.
        whole: the steps are the newest ones, which can be compared with all before them.
    """
    if facts is None or not len(facts.steps):
        return {"text": _NONE}
    found = facts.typical
    if found is None or not found.ranks:
        return {"text": f"{_UNKNOWN[0].upper()}{_UNKNOWN[1:]}."}
    words = [_words(found), _trend(timeline, reducer, found) if whole else ""]
    ranks = [[rank, np.round(parts, 6).tolist()] for rank, parts in zip(found.ranks, found.by_rank_ms, strict=True)]
    return {
        "text": " ".join(filter(None, words)),
        "words": words[0],
        "first": int(found.steps[0]),
        "last": int(found.steps[-1]),
        "total": found.total_ms,
        "parts": np.round(found.parts_ms, 6).tolist(),
        "ranks": ranks,
        "logged": _logged(timeline, reducer),
    }


def strip(timeline: Timeline, reducer: int) -> dict[str, Any]:
    """Returns the run since its start as at most 300 blocks of steps: a list for each of `history.COLUMNS`, and
    the ``top`` of the scale of times."""
    blocks = timeline.history(reducer).blocks(_BLOCKS)
    columns = dict(zip(history.COLUMNS, blocks.T, strict=True))
    top = robust_top(np.minimum(columns["high"], 3 * columns["median"]))
    return {"top": top, **{name: np.round(values, 3).tolist() for name, values in columns.items()}}


def _logged(timeline: Timeline, reducer: int) -> list[dict[str, Any]]:
    """What the program logged: for each ``name`` the newest ``value`` as text, and ``step`` and ``values`` of at most
    200 points, each the mean over the ranks and over neighbouring steps; values that are not finite are left out."""
    rows = timeline.history(reducer).blocks(_BLOCKS)
    if not len(rows):
        return []
    first, began = (rows[:, history.COLUMNS.index(name)] for name in ("first", "began"))
    by_name: dict[str, list[tuple[int, float]]] = {}
    for _, at_ns, name, value in timeline.logged():
        by_name.setdefault(name, []).append((at_ns, value))
    made = []
    for name, known in by_name.items():
        at, values = np.array([one for one, _ in known]) / 1e9, np.array([value for _, value in known])
        order = np.argsort(at, kind="stable")
        order = order[np.isfinite(values[order])]
        pieces: list[npt.NDArray[np.intp]] = [piece for piece in np.array_split(order, _POINTS) if len(piece)]
        place = np.maximum(np.searchsorted(began, at[[int(piece[-1]) for piece in pieces]], "right") - 1, 0)
        made.append(
            {
                "name": name,
                "value": f"{known[-1][1]:.5g}",
                "step": first[place].astype(int).tolist(),
                "values": [float(values[piece].mean()) for piece in pieces],
            }
        )
    return made


def _words(found: TypicalStep) -> str:
    steps = f"(median of {step_range(found.steps.tolist())})"
    what = "A step takes" if found.is_whole else "A forward and a backward take"
    share = found.ms("exposed") / found.total_ms if found.total_ms > 0 else 0.0
    return f"{what} {ms(found.total_ms)} {steps}; {100 * share:.0f} % of it is exposed communication."


def _trend(timeline: Timeline, reducer: int, found: TypicalStep) -> str:
    """Whether the newest steps take longer or shorter than those before them."""
    before = timeline.history(reducer).blocks(_BLOCKS)
    before = before[before[:, history.COLUMNS.index("last")] < found.steps[0]]
    usual = float(np.median(before[:, history.COLUMNS.index("median")])) if len(before) else float("nan")
    change = found.total_ms / usual - 1 if usual > 0 else 0.0
    if abs(change) < _UNLIKE:
        return ""
    first, last = int(before[0, history.COLUMNS.index("first")]), int(before[-1, history.COLUMNS.index("last")])
    return (
        f"That is {100 * abs(change):.0f} % {'longer' if change > 0 else 'shorter'} than in "
        f"{step_range(range(first, last + 1))} ({ms(usual)})."
    )
