"""How the watches of several nodes find out together why their ranks wait: node 0 asks and says it, the others answer
and repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..diagnosis.mismatch import with_places
from ..diagnosis.snapshot import RankSnapshot
from .local_ranks import LocalRanks
from .nodes import CUT_S, Job, Nodes, alone, everyone, made

__all__ = ["Exchange"]


class Exchange:
    """One node's part, for one attempt of a job.

    Args:
        job: the job.
        ranks: those of this node.
        seconds: after which waits are said.
    """

    def __init__(self, job: Job, ranks: LocalRanks, seconds: float) -> None:
        self.job = job
        self._ranks, self._cut_s = ranks, max(CUT_S, seconds / 2)
        self._nodes = Nodes(job)
        self._answered = self._repeated = 0  # of node 0's questions and sentences
        self._said: list[tuple[str, bool]] = []

    def turn(self, ranks: Sequence[RankSnapshot], waited: float) -> float | None:
        """Says how long ranks of this node have waited, and answers node 0.

        Returns:
            For how long ranks of all nodes have waited, as far as known; None if another node judges.
        """
        nodes = self._nodes
        nodes.put(ranks=[one.rank for one in ranks], waited=waited)
        if nodes.leads:
            heard = nodes.heard().values()
            known = [waited, *(one.message.get("waited", 0.0) for one in heard)]
            return max(known) if len(known) == self.job.nodes or nodes.age_s >= self._cut_s else 0.0
        first = nodes.heard().get(0)
        if nodes.cut_s >= self._cut_s or (first is not None and first.is_cut(self._cut_s)):
            return waited
        self._answer()
        return None

    def everyone(self) -> list[RankSnapshot]:
        """What each rank of the job does, with the collectives that torch has recorded; empty if not all are known."""
        own = [made(one) for one in self._ranks.look(whole=True)]
        if not own or not self._nodes.leads:
            return alone(own, self._nodes) if own else []
        return with_places(everyone(own, self._nodes, self._nodes.ask(whole=True)), self._places)

    def say(self, text: str, acts: bool) -> None:
        """Has the other nodes repeat a sentence, and do what follows if `acts`; returns when they have heard it."""
        self._said.append((text, acts))
        self._nodes.put(told=self._said)
        self._nodes.wait_for(lambda message: message.get("repeated", 0) >= len(self._said))

    def heard(self) -> list[tuple[str, bool]]:
        """The sentences of node 0 that are new, each with whether something follows."""
        if self._nodes.leads:
            return []
        told = [each for one in self._nodes.heard().values() for each in one.message.get("told", [])]
        new = [(str(text), bool(acts)) for text, acts in told[self._repeated :]]
        if new:
            self._repeated = len(told)
            self._nodes.put_now(repeated=self._repeated)
        return new

    def close(self) -> None:
        """Says that this node has ended."""
        self._nodes.close()

    def _places(self, some: list[int], group: str, number: int) -> dict[int, Any]:
        """Where ranks of all nodes entered a collective."""
        found = self._ranks.places(some, group, number)
        for message in self._nodes.ask(places=[group, number]).values():
            found |= {int(rank): place for rank, place in message["places"].items()}
        return found

    def _answer(self) -> None:
        """Answers node 0, if it asks."""
        asked = self._nodes.asked
        if not asked or asked["number"] == self._answered:
            return
        self._answered = asked["number"]
        if "places" in asked:
            found = self._ranks.places(range(self.job.world_size), *asked["places"])
            self._nodes.put(places=found, answers=self._answered)
        else:
            self._nodes.put(whole=self._ranks.look(whole=True), answers=self._answered)
