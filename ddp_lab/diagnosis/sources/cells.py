"""The ranks of a cluster, which run cells: asked once, or watched while a cell runs.

They answer with `ddp_lab.diagnosis.on_rank.examine`, and are not stopped for it; one that does not answer within a
second is called silent. `ddp_lab.diagnosis.detector` decides what is said of the answers, and when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import ClusterError, DdpLabError
from ...protocol.messages import Examine
from ..detector import LOOKS, Detector
from ..mismatch import with_places
from ..rules import Diagnosis
from ..snapshot import RankSnapshot
from . import ANSWER_S, Channel, Source, call_sites

__all__ = ["CellRanks", "Watch"]

_SURE_SECONDS = 2.0  # a rank waits for one that was not sent the cell: only another cell changes that
_BACKWARD = "_engine_run_backward"


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


class Watch:
    """Notices that a running cell makes no progress, or that its ranks fall out of step, and reports it once.

    `look` is called by the thread that shows the cell's outputs; examinations run on threads of their own.

    Args:
        source: the cell's ranks.
        cause_of_wait: called with the ranks that run the cell when they wait for others that have finished it: says why
            from what each has recorded last, or returns None.
        seconds: time without progress after which the cell is reported.
        partial: whether the cell runs on some ranks only; that they wait for others is then reported sooner.
    """

    def __init__(
        self,
        source: Source,
        cause_of_wait: Callable[[Collection[int]], Diagnosis | None],
        seconds: float,
        partial: bool = False,
    ) -> None:
        self._source, self._cause_of_wait = source, cause_of_wait
        sure_s = min(seconds, _SURE_SECONDS) if partial else seconds
        self._detector, self._pause_s = Detector(seconds, sure_s=sure_s), sure_s / LOOKS
        self._lock = threading.Lock()  # guards what the examining thread leaves
        self._found: tuple[Sequence[RankSnapshot], float] | None = None
        self._thread: threading.Thread | None = None
        self._outputs: object = None
        self._detector.progress(time.monotonic())
        self._next = time.monotonic() + self._pause_s

    def look(self, outputs: object) -> str | None:
        """Returns what to report, else None: once in the life of a cell, and once before that ranks wait for one that
        imports or compiles.

        Args:
            outputs: a value that changes with every output, which counts as progress.
        """
        now = time.monotonic()
        if self._detector.is_over:
            return None
        if outputs != self._outputs:
            self._outputs = outputs
            self._detector.progress(now)
        with self._lock:
            found, self._found = self._found, None
        if found is not None:
            ranks, at = found
            notice = self._detector.judge(at, ranks, self._detector.add(at, ranks))
            if notice is not None and notice.diagnosis is not None:
                diagnosis = self._of_an_end(notice.diagnosis, ranks)
                more = f"; {diagnosis.lesson} explains it" if diagnosis.lesson else ""
                return f"{replace(notice, diagnosis=diagnosis)}\n  `%cluster doctor` shows every rank{more}."
        if now >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next = now + self._pause_s
            self._thread = threading.Thread(target=self._work, name="ddp_lab-doctor", daemon=True)
            self._thread.start()
        return None

    def _of_an_end(self, diagnosis: Diagnosis, ranks: Sequence[RankSnapshot]) -> Diagnosis:
        """The same of a rank whose cell has ended while others wait for it, from what each has recorded."""
        running = [one for one in ranks if one.state == "running"]
        waits = diagnosis.kind == "ended" or any(one.within(_BACKWARD) for one in running)  # torch's reducer waits
        if diagnosis.kind not in ("ended", "ahead") or len(running) == len(ranks) or not waits:
            return diagnosis
        return self._cause_of_wait([one.rank for one in running]) or diagnosis

    def _work(self) -> None:
        at = time.monotonic()
        try:
            ranks = self._source.snapshots()
        except DdpLabError:  # the cluster is being stopped, which the cell itself reports
            return
        with self._lock:
            self._found = (ranks, at)
