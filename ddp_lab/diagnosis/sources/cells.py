"""The ranks of a cluster, which run cells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ...errors import ClusterError
from ...protocol.messages import Examine
from ..mismatch import with_places
from ..snapshot import RankSnapshot
from . import ANSWER_S, Channel, call_sites

__all__ = ["CellRanks"]


@dataclass(frozen=True)
class CellRanks:
    """Asks all ranks, without stopping them.

    Attributes:
        channel: to the ranks.
        world_size: number of ranks.
        lost: returns rank -> how its process ended.
        given: returns the ranks that were sent a cell that has not ended.
        stopped: of a rank that was stopped by a signal, returns its process id; else None.
    """

    channel: Channel
    world_size: int
    lost: Callable[[], Mapping[int, str]]
    given: Callable[[], Collection[int]]
    stopped: Callable[[int], int | None]

    def snapshots(self) -> list[RankSnapshot]:
        """What every rank does now.

        Raises:
            ClusterError: a rank could not be examined.
        """
        lost = self.lost()
        living = [rank for rank in range(self.world_size) if rank not in lost]
        answers, given = self.channel.request(living, Examine(), ANSWER_S), self.given()
        found = []
        for rank in range(self.world_size):
            answer = answers.get(rank)
            if rank in lost:
                found.append(RankSnapshot(rank, "lost", why=lost[rank]))
            elif rank in answers.errors:
                raise ClusterError(f"rank {rank} could not be examined: {answers.errors[rank]}")
            elif answer is None and (pid := self.stopped(rank)) is not None:
                found.append(RankSnapshot(rank, "stopped", why=f"kill -CONT {pid}"))
            elif answer is None:
                found.append(RankSnapshot(rank, "silent"))
            else:
                seen = {**answer.snapshot, "debugger": answer.debugged}
                found.append(RankSnapshot.of(rank, answer.state, seen, asked=rank in given))
        return with_places(found, lambda ranks, group, number: call_sites(self.channel, ranks, group, number))
