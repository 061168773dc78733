"""Step through: the buckets of each rank in their states, while a backward is paused."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..paint.scene_json import blocks_json
from ..paint.scene_svg import framed
from ..scene import Arrows, Axis, Panel, Scene, Table, Tiles
from .view import View

__all__ = ["StepThrough", "step_blocks", "step_scene"]

_STATES = ("pending", "ready", "launched", "reduced")
_GATES = ("", "its last gradient is ready", "all buckets before it are launched", "all ranks have launched it")
_MOST_NAMES = 8


class StepThrough(View):
    """The reducer as a state machine; its facts are those of `controls.stepping.machine` at the last pause, or None."""

    name = "step"
    title = "Step through"
    about = "Pauses a backward at chosen points, shows the reducer as a state machine, and continues step by step."
    question = "Look inside"
    steps = model = False
    ranks = fed = True
    also = ()
    pixels = None

    def scene(self, facts: Mapping[str, Any] | None) -> Scene:
        return step_scene(facts)

    def svg(self, facts: Mapping[str, Any] | None) -> str:
        """Returns the picture without its summary, which the rows say."""
        return framed(replace(step_scene(facts), summary=""))


def step_blocks(stepping: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the picture and the table of `stepping.machine` for a page; empty without ranks."""
    scene = step_scene(stepping)
    return [] if scene.empty or scene.table is None else blocks_json([scene, scene.table])


def step_scene(stepping: Mapping[str, Any] | None) -> Scene:
    """Returns the buckets of each rank in their states.

    Args:
        stepping: of `stepping.machine`; None if no backward has paused.
    """
    ranks = stepping["ranks"] if stepping else []
    if not ranks:
        return Scene(StepThrough.title, empty="no backward has paused. Set breakpoints with lab.dashboard('step')")
    known = [
        one["text"] if f"step {one['step']}" in one["text"] else f"step {one['step']}: {one['text']}" for one in ranks
    ]
    names = [f"rank {one['rank']}" for one in ranks]
    wrapped = ["\n".join(textwrap.wrap(one["text"], 44)) for one in ranks]
    tips = [f"{name}\nstep\t{one['step']}\n{text}" for name, one, text in zip(names, ranks, wrapped, strict=True)]
    paused = [row for row, one in enumerate(ranks) if one["kind"] == "paused"]
    row_of = {one["rank"]: row for row, one in enumerate(ranks)}
    waits = [(row, row_of[other]) for row, one in enumerate(ranks) for other in one["for"] if other in row_of]
    begin, end = np.array(waits, np.int64).reshape(-1, 2).T
    return Scene(
        "Step through: state of each rank at the last pause",
        (
            Panel(
                Axis("", _STATES, notes=_GATES),
                Axis("", names, headings=paused, notes=known, tips=tips),
                (_tiles(ranks), *([Arrows("waits for", "waiting", begin, end)] if waits else [])),
            ),
        ),
        Table(
            ["rank", "step", "state:", *_STATES, "gradients missing:"],
            [[one["rank"], one["step"], one["text"], *_in_states(one), _missing(one)] for one in ranks],
            "State of each rank",
            folded=True,
        ),
        summary=" ".join(f"Rank {one['rank']} {one['text']}." for one in ranks),
    )


def _tiles(ranks: list[dict[str, Any]]) -> Tiles:
    found = [(row, rank, bucket) for row, rank in enumerate(ranks) for bucket in range(len(rank["buckets"]))]
    of = [rank["buckets"][bucket] for _, rank, bucket in found]
    counts = [max(len(rank["buckets"]) - 1, 1) for _, rank, _ in found]
    return Tiles(
        np.array([_STATES.index(one[0]) for one in of], np.int64),
        np.array([row for row, *_ in found], np.int64),
        np.array([bucket / most for (_, _, bucket), most in zip(found, counts, strict=True)]),
        np.array([one[1] / max(one[2], 1) if one[0] == "pending" else 1.0 for one in of]),
        [
            [*([f"b{bucket}: {one[1]}/{one[2]}"] if one[0] == "pending" else []), f"b{bucket}", str(bucket)]
            for (_, _, bucket), one in zip(found, of, strict=True)
        ],
        ["\n".join(_tip(rank, bucket)) for _, rank, bucket in found],
        [
            ("bad" if rank["kind"] == "paused" else "waiting") if rank["bucket"] == bucket else ""
            for _, rank, bucket in found
        ],
        [not rank["inFlight"] for rank in ranks],
    )


def _tip(rank: Mapping[str, Any], bucket: int) -> Iterator[str]:
    state, arrived, of, missing, more = rank["buckets"][bucket]
    yield f"rank {rank['rank']} · bucket {bucket}"
    yield f"state\t{state}"
    yield f"gradients\t{arrived} of {of}"
    yield from (f"missing\t{one}" for one in missing)
    if more:
        yield f"and {more} more"


def _in_states(rank: Mapping[str, Any]) -> list[str]:
    """The buckets in each state."""
    known = [(str(bucket), one[0]) for bucket, one in enumerate(rank["buckets"])]
    return [", ".join(bucket for bucket, its in known if its == state) or "–" for state in _STATES]


def _missing(rank: Mapping[str, Any]) -> str:
    named = [name for *_, names, more in rank["buckets"] for name in [*names, *([f"and {more} more"] if more else [])]]
    return ", ".join(named[:_MOST_NAMES]) or "–"
