"""Asks ranks what they do."""

from __future__ import annotations

from collections.abc import Sequence

from ..diagnosis import mismatch
from ..diagnosis.snapshot import RankSnapshot
from .wire import Wire

__all__ = ["with_places"]

_SECONDS = 5.0  # torch looks the source lines of all recorded stacks up


def with_places(wire: Wire, ranks: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """As `mismatch.with_places`, asking the ranks over the wire."""
    return mismatch.with_places(
        ranks, lambda some, group, number: wire.request(some, "entered_at", _SECONDS, group=group, number=number)
    )
