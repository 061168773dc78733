"""Asks ranks what they do."""

from __future__ import annotations

from collections.abc import Sequence

from ..diagnosis import calls
from ..diagnosis.rank_state import Examined
from .wire import Wire

__all__ = ["with_places"]

_SECONDS = 5.0  # torch looks the source lines of all recorded stacks up


def with_places(wire: Wire, ranks: Sequence[Examined]) -> list[Examined]:
    """As `calls.with_places`, asking the ranks over the wire."""
    return calls.with_places(
        ranks, lambda some, group, number: wire.request(some, "entered_at", _SECONDS, group=group, number=number)
    )
