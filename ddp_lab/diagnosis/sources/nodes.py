"""The ranks of a script on several nodes, through the job's store: each node's agent puts what its ranks answer.

[Note: one node says it]
Every node puts a message once in `_PERIOD_S`; node 0 reads them all, and says what it finds to the others, so that each
terminal shows it. A node whose message stays the same for `CUT_S` is cut off, or its agent has ended. The store's calls
may block as long as the network is down, so they have a thread of their own; a node whose store doesn't answer for as
long, or that hears nothing of node 0, says what it sees by itself.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...formatting import enumeration
from ..mismatch import with_places
from ..snapshot import RankSnapshot
from .script import Job, JobRanks

__all__ = ["NodeRanks", "Store"]

CUT_S = 6.0  # without a new message
_PERIOD_S = 0.5
_LOOK_S = 0.05
_ANSWER_S = 5.0  # for an answer of the other nodes


class Store(Protocol):
    """The job's store, or a part of it: torch's."""

    def set(self, key: str, value: Any, /) -> None:
        """Sets a key."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are set."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys that are set."""


@dataclass(frozen=True)
class NodeMessage:
    """A node's newest message.

    Attributes:
        at: when it arrived.
        message: what it says, with its number: ``turn``.
    """

    at: float
    message: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """Since it arrived."""
        return time.monotonic() - self.at

    @property
    def expected(self) -> bool:
        """Whether another one will follow."""
        return self.seconds < CUT_S and not self.message.get("ended")

    def is_cut(self, seconds: float) -> bool:
        """Whether the node has said nothing for so long, although it has not ended."""
        return self.seconds >= seconds and not self.message.get("ended")


class _PeerNodes:
    """Exchanges messages with the other nodes, from construction until `close`.

    Args:
        job: the job.
        connect: connects to the store; may take as long as the network does.
    """

    def __init__(self, job: Job, connect: Callable[[Job], Store]) -> None:
        self.job, self._connect = job, connect
        self._lock = threading.Lock()  # guards all below
        self._mine: dict[str, Any] = {"host": socket.gethostname()}
        self._heard: dict[int, NodeMessage] = {}
        self._asked: dict[str, Any] = {}
        self._began_at = self._answered_at = time.monotonic()
        self._numbers = itertools.count(1)
        self._over = threading.Event()
        self._now = threading.Event()  # a message is to be sent before the period is over
        self._sent = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="ddp_lab-nodes", daemon=True)
        self._thread.start()

    @property
    def leads(self) -> bool:
        """Whether this node says what it finds."""
        return self.job.node == 0

    @property
    def age_s(self) -> float:
        """For how long this node has taken part."""
        return time.monotonic() - self._began_at

    @property
    def cut_s(self) -> float:
        """For how long the store has not answered."""
        with self._lock:
            return time.monotonic() - self._answered_at

    @property
    def asked(self) -> Mapping[str, Any]:
        """What node 0 has asked for last: its ``number``, and what it wants to know."""
        with self._lock:
            return dict(self._asked)

    def put(self, **message: Any) -> None:
        """Changes parts of what this node says, JSON-able."""
        with self._lock:
            self._mine.update(message)

    def heard(self) -> dict[int, NodeMessage]:
        """The newest messages of the other nodes, by node; of those that have ever said anything."""
        with self._lock:
            return dict(self._heard)

    def ask(self, **what: Any) -> dict[int, Mapping[str, Any]]:
        """Asks all others; returns the messages of those that answer in time."""
        number = next(self._numbers)
        self.put(ask={"number": number, **what})
        return self.wait_for(lambda message: message.get("answers") == number)

    def wait_for(self, holds: Callable[[Mapping[str, Any]], bool]) -> dict[int, Mapping[str, Any]]:
        """The messages of the others that this holds for, as soon as it does for all that still send some."""
        deadline = time.monotonic() + _ANSWER_S
        while True:
            heard = self.heard()
            found = {node: one.message for node, one in heard.items() if holds(one.message)}
            waited_for = [node for node, one in heard.items() if node not in found and one.expected]
            if not waited_for or time.monotonic() > deadline or self._over.wait(_LOOK_S):
                return found

    def put_now(self, **message: Any) -> None:
        """As `put`; returns when it has been sent, or the store does not answer."""
        self.put(**message)
        self._sent.clear()
        self._now.set()
        self._sent.wait(_ANSWER_S)

    def close(self) -> None:
        """Says that this node has ended, if the store answers."""
        self.put(ended=True)
        self._over.set()
        self._now.set()
        self._thread.join(_ANSWER_S)

    def _exchange(self) -> None:
        try:
            keys = self._connect(self.job)
            for number in itertools.count():
                self._now.wait(_PERIOD_S if number else 0.0)
                self._now.clear()
                ends = self._over.is_set()
                self._turn(keys, number)
                self._sent.set()
                if ends:
                    return
        except (RuntimeError, ValueError):  # the store has ended, or can't be reached: `cut_s` grows
            return

    def _turn(self, store: Store, number: int) -> None:
        """Puts this node's message and takes those of the others: of all on node 0, else of node 0."""
        with self._lock:
            mine = {"turn": number, **self._mine}
        store.set(str(self.job.node), zlib.compress(json.dumps(mine).encode(), 1))
        wanted = [node for node in range(self.job.nodes) if node != self.job.node] if self.leads else [0]
        there = [node for node in wanted if node in self._heard or store.check([str(node)])]
        taken = store.multi_get([str(node) for node in there]) if there else []
        now = time.monotonic()
        with self._lock:
            self._answered_at = now
            for node, raw in zip(there, taken, strict=True):
                message = json.loads(zlib.decompress(raw))
                if node not in self._heard or self._heard[node].message["turn"] != message["turn"]:
                    self._heard[node] = NodeMessage(now, message)
            if not self.leads and 0 in self._heard:
                self._asked = dict(self._heard[0].message.get("ask", {}))


def _all_snapshots(
    own: Sequence[RankSnapshot], nodes: _PeerNodes, answers: Mapping[int, Mapping[str, Any]]
) -> list[RankSnapshot]:
    """The ranks of all nodes.

    Args:
        own: those of this node.
        nodes: the others.
        answers: of the others that have answered when they were asked.
    """
    found, heard = list(own), nodes.heard()
    for node, one in heard.items():
        ranks = one.message.get("ranks", ())
        if node in answers:
            found += [RankSnapshot.of_script(told) for told in answers[node]["whole"]]
        elif one.message.get("ended"):
            found += [RankSnapshot(rank, "idle", runs="script") for rank in ranks]
        elif one.seconds >= CUT_S:
            found += _cut_off(ranks, f"node {node} ({one.message['host']}) does not answer")
        else:
            return []
    if len(heard) < nodes.job.nodes - 1:
        never = [str(node) for node in range(nodes.job.nodes) if node not in heard and node != nodes.job.node]
        why = f"node{'s' if len(never) > 1 else ''} {enumeration(never)} never answered"
        found += _cut_off(set(range(nodes.job.world_size)) - {one.rank for one in found}, why)
    return sorted(found, key=lambda one: one.rank)


def _local_snapshots(own: Sequence[RankSnapshot], nodes: _PeerNodes) -> list[RankSnapshot]:
    """The ranks as a node sees them that has lost node 0, or the store: then those of all other nodes are cut off."""
    first = nodes.heard().get(0)
    if first is not None and nodes.cut_s < CUT_S:  # the store answers, and only node 0 does not
        others = _cut_off(first.message["ranks"], f"node 0 ({first.message['host']}) does not answer")
    else:
        ranks = set(range(nodes.job.world_size)) - {one.rank for one in own}
        others = _cut_off(ranks, f"the job's store at {nodes.job.host}:{nodes.job.port} does not answer")
    return sorted([*own, *others], key=lambda one: one.rank)


def _cut_off(ranks: Iterable[int], why: str) -> list[RankSnapshot]:
    return [RankSnapshot(rank, "cut off", why=why, runs="script") for rank in ranks]


class NodeRanks:
    """One node's part, for one attempt of a job: node 0 asks and says why ranks wait, the others answer and repeat it.

    Args:
        ranks: those of this node.
        seconds: after which waits are said.
        connect: connects to the job's store.
    """

    def __init__(self, ranks: JobRanks, seconds: float, connect: Callable[[Job], Store]) -> None:
        self.job = job = ranks.job
        self._ranks, self._cut_s = ranks, max(CUT_S, seconds / 2)
        self._nodes = _PeerNodes(job, connect)
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

    def snapshots(self) -> list[RankSnapshot]:
        """What each rank of the job does, with the collectives that torch has recorded; empty if not all are known."""
        own = [RankSnapshot.of_script(one) for one in self._ranks.look()]
        if not own or not self._nodes.leads:
            return _local_snapshots(own, self._nodes) if own else []
        return with_places(_all_snapshots(own, self._nodes, self._nodes.ask(whole=True)), self._places)

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
            self._nodes.put(whole=self._ranks.look(), answers=self._answered)
