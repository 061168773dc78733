"""Step through: the buckets of each rank in their states, while a backward is paused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..paint.palette import COLOURS, bucket_colour
from ..paint.scene_svg import INK, WIDTH, drawing, empty_svg, text, tile
from .view import View

__all__ = ["StepThrough", "step_svg"]

_STATES = ("pending", "ready", "launched", "reduced")
_COLUMN = WIDTH / len(_STATES)
_TILE, _ACROSS = 38, 5


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

    def svg(self, facts: dict[str, Any] | None) -> str:
        return step_svg(facts)


def step_svg(stepping: dict[str, Any] | None) -> str:
    """Returns the buckets of each rank in their states at the last pause.

    Args:
        stepping: of `stepping.machine`; None if no backward has paused.
    """
    if not stepping:
        return empty_svg("Step through: no backward has paused. Set breakpoints with lab.dashboard('step').")
    body, y = [], 32.0
    for index, name in enumerate(_STATES):
        body.append(tile(index * _COLUMN + 2, 4, _COLUMN - 4, 20, "#eceff1"))
        body.append(text((index + 0.5) * _COLUMN, 18, name, "bold", "middle"))
    for rank in stepping["ranks"]:
        places = [_STATES.index(one[0]) for one in rank["buckets"]]
        most = max((places.count(index) for index in range(len(_STATES))), default=0)
        height = 30 + 26 * max(1, -(-most // _ACROSS))
        paused = rank["kind"] == "paused"
        edge = (COLOURS["bad"], 2) if paused else ("#c4c4c4", 1)
        body.append(tile(1, y, WIDTH - 2, height, edge=edge))
        words = f"rank {rank['rank']}, step {rank['step']}: {rank['text']}"
        body.append(text(8, y + 17, words, "bold" if paused else ""))
        body += _tiles(rank, places, y + 26, COLOURS["bad" if paused else "waiting"])
        y += height + 6
    return drawing(WIDTH, y + 4, body, "Step through: state of each rank at the last pause")


def _tiles(rank: dict[str, Any], places: Sequence[int], top: float, here: str) -> Iterator[str]:
    count = [0] * len(_STATES)
    for bucket, ((state, arrived, of, *_), place) in enumerate(zip(rank["buckets"], places, strict=True)):
        x, y = place * _COLUMN + 8 + (count[place] % _ACROSS) * (_TILE + 3), top + (count[place] // _ACROSS) * 26
        count[place] += 1
        fill, ink = bucket_colour(bucket, len(places))
        share = arrived / max(of, 1) if state == "pending" else 1.0
        yield tile(x, y, _TILE * share, 22, fill)
        edge = (here, 3) if rank["bucket"] == bucket else ("#808080", 1)
        yield tile(x, y, _TILE, 22, edge=edge, tip=f"bucket {bucket}: {state}, {arrived} of {of} gradients")
        yield text(x + _TILE / 2, y + 15, str(bucket), "", "middle", ink if share > 0.5 else INK)
