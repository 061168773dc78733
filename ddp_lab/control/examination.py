"""Asks ranks what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..diagnosis import calls
from ..diagnosis.rank_state import Examined
from ..protocol.messages import FindCallSite, plain
from .wire import Wire

__all__ = ["with_places"]

_SECONDS = 5.0  # torch looks the source lines of all recorded stacks up


def with_places(wire: Wire, ranks: Sequence[Examined]) -> list[Examined]:
    """As `calls.with_places`, asking the ranks over the wire."""

    def ask(some: list[int], group: str, number: int) -> dict[int, dict[str, Any]]:
        sites = wire.request(some, FindCallSite(group, number), _SECONDS)
        return {rank: plain(site) for rank, site in sites.items() if site.file}

    return calls.with_places(ranks, ask)
