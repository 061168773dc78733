"""Where snapshots of ranks come from: each source is a file with one object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from ...protocol.messages import FindCallSite, R, Replies, Request, plain
from ..snapshot import RankSnapshot

__all__ = ["Channel", "Source", "cells", "debug_server", "dump_files", "nodes", "py_spy", "script"]

ANSWER_S = 1.0  # for a rank's answer: one that takes longer is unresponsive
PLACES_S = 5.0  # for the place of a collective: torch looks the source lines of all recorded stacks up


class Source(Protocol):
    """A job whose ranks can be examined."""

    def snapshots(self) -> list[RankSnapshot]:
        """What each rank does now; empty while not all ranks are known.

        Raises:
            DdpLabError: the ranks can't be examined, and why.
        """


class Channel(Protocol):
    """How ranks are asked, by their names on it."""

    def request(self, ranks: Iterable[int], request: Request[R], timeout: float) -> Replies[R]:
        """The answers that come in time."""

    def connected(self) -> set[int]:
        """Who has said hello."""


def call_sites(channel: Channel, ranks: Iterable[int], group: str, number: int) -> dict[int, dict[str, Any]]:
    """Rank -> ``file`` and ``line`` where it entered a collective, of those that know it."""
    found = channel.request(ranks, FindCallSite(group, number), PLACES_S)
    return {rank: plain(site) for rank, site in found.items() if site.file}
