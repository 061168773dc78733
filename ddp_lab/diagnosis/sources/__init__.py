"""Where snapshots of ranks come from: each source is a file with one object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

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

    def request(self, ranks: Iterable[int], op: str, timeout: float, **arguments: Any) -> dict[int, dict[str, Any]]:
        """The answers that come in time."""

    def connected(self) -> set[int]:
        """Who has said hello."""
