"""Asks ranks what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..diagnostics.calls import mismatch_of
from ..diagnostics.rank_state import Examined, Place
from .wire import Wire

__all__ = ["with_places"]

_SECONDS = 5.0  # torch looks the source lines of all recorded stacks up


def with_places(wire: Wire, ranks: Sequence[Examined]) -> list[Examined]:
    """The same; where the ranks entered different collectives, with the line that entered each, if it is known."""
    found = mismatch_of(ranks)
    if found is None:
        return list(ranks)
    answers = wire.request(list(found.calls), "entered_at", _SECONDS, group=found.group, number=found.number)
    places = {
        rank: Place(answer["file"], answer["line"], "", "", users=True)
        for rank, answer in answers.items()
        if "file" in answer
    }
    return [replace(one, entered_at=places.get(one.rank)) for one in ranks]
