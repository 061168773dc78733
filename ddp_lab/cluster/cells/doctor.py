"""The doctor of cells: watches running cells for hangs.

The ranks answer with `ddp_lab.diagnosis.on_rank.examine`; [Note: who waits for whom] in `ddp_lab.diagnosis.rules` says
what follows from that. Ranks are not stopped for it; one that does not answer within a second is called silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ...diagnosis.mismatch import Distance, Distances
from ...diagnosis.rules import BUSY, Diagnosis, diagnose, diagnose_ahead, different_calls
from ...diagnosis.snapshot import RankSnapshot
from ...errors import DdpLabError

_SURE_SECONDS = 2.0  # a rank waits for one that was not sent the cell: only another cell changes that
_LOOKS = 4  # examinations within the time after which a cell without progress is reported
_BACKWARD = "_engine_run_backward"
_APART = 0.7  # of that time: what is found then is reported within it


class Watch:
    """Notices that a running cell makes no progress, or that its ranks fall out of step, and reports it once.

    `look` is called by the thread that shows the cell's outputs; examinations run on threads of their own.

    Args:
        examine: examines all ranks; may raise `DdpLabError`.
        cause_of_wait: called with the ranks that run the cell when they wait for others that have finished it: says why
            from what each has recorded last, or returns None.
        seconds: time without progress after which the cell is reported.
        partial: whether the cell runs on some ranks only; that they wait for others is then reported sooner.
    """

    def __init__(
        self,
        examine: Callable[[], Sequence[RankSnapshot]],
        cause_of_wait: Callable[[Collection[int]], Diagnosis | None],
        seconds: float,
        partial: bool = False,
    ) -> None:
        self._examine, self._cause_of_wait, self._seconds = examine, cause_of_wait, seconds
        self._lock = threading.Lock()  # guards what the examining thread leaves
        self._found: tuple[Sequence[RankSnapshot], float] | None = None
        self._thread: threading.Thread | None = None
        self._sure = min(seconds, _SURE_SECONDS) if partial else seconds
        self._next = time.monotonic() + self._sure / _LOOKS
        self._seen: Any = None
        self._same_since = time.monotonic()
        self._distances = Distances(seconds * _APART)
        self._outputs: Any = None
        self._told = False
        self._told_busy = False

    def look(self, outputs: object) -> str | None:
        """Returns what to report, else None: once in the life of a cell, and once before that ranks wait for one that
        imports or compiles.

        Args:
            outputs: a value that changes with every output, which counts as progress.
        """
        now = time.monotonic()
        if self._told:
            return None
        if outputs != self._outputs:
            self._outputs, self._same_since = outputs, now
        with self._lock:
            found, self._found = self._found, None
        told = self._judge(*found) if found is not None else None
        if told is not None:
            what, diagnosis = told
            self._told, self._told_busy = diagnosis.stuck, True
            if found is not None:
                diagnosis = self._of_an_end(diagnosis, found[0])
            lesson = diagnosis.lesson
            more = f"; {lesson} explains it" if lesson else ""
            return f"{what}: {diagnosis.brief}\n  `%cluster doctor` shows every rank{more}."
        if now >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next = now + self._sure / _LOOKS
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

    def _judge(self, ranks: Sequence[RankSnapshot], at: float) -> tuple[str, Diagnosis] | None:
        """What is certainly wrong: calls that differ, ranks that are out of step, ranks that wait too long."""
        if any(one.debugged for one in ranks):  # the user knows, and its peers may wait for as long as that takes
            self._seen, self._same_since, self._distances = None, at, Distances(self._seconds * _APART)
            return None
        flights = {one.rank: one.flights for one in ranks}
        apart = self._distances.add(at, flights, [one.rank for one in ranks if one.state != "running"])
        different = different_calls(ranks, [one for one in ranks if one.waits])
        if different is not None:
            return "the ranks make different calls", different
        if apart is not None and not _waits_for_an_end(ranks, apart):
            calls = "collective" if apart.gap == 1 else "collectives"
            return f"the ranks are out of step, by {apart.gap} {calls}", diagnose_ahead(ranks, apart)
        seen = _fingerprint(ranks)
        if seen != self._seen:
            self._seen, self._same_since = seen, max(self._same_since, at)
            return None
        waited = at - self._same_since
        if waited < self._sure:
            return None
        diagnosis = diagnose(ranks)
        if not (diagnosis.stuck or (diagnosis.kind == BUSY and not self._told_busy)):
            return None
        if diagnosis.kind == "subset" or waited >= self._seconds:
            return f"{'no progress' if diagnosis.stuck else 'ranks have waited'} for {waited:.0f} s", diagnosis
        return None

    def _work(self) -> None:
        at = time.monotonic()
        try:
            ranks = self._examine()
        except DdpLabError:  # the cluster is being stopped, which the cell itself reports
            return
        with self._lock:
            self._found = (ranks, at)


def _waits_for_an_end(ranks: Sequence[RankSnapshot], apart: Distance) -> bool:
    """Whether the rank ahead waits for one whose cell has ended: `diagnose` explains that better."""
    by_rank = {one.rank: one for one in ranks}
    return by_rank[apart.ahead].waits and by_rank[apart.behind].state != "running"


def _fingerprint(ranks: Sequence[RankSnapshot]) -> Any:
    """Changes when a rank makes progress."""
    return [(one.rank, one.state, one.place, one.call, sorted(one.sequences.items()), one.models) for one in ranks]
