"""When to say that ranks make no progress: snapshots go in, notices come out. No thread, clock or connection is here.

[Note: no progress]
The ranks of a cell make none while nothing of any rank changes, and nothing is printed: a rank that computes for long
is seen at other lines. A script's rank may run at other lines without end. So of a script one rank's wait for the same
thing is enough, and `diagnose` says whether those that it waits for will come. A cell's user reads one notice: the cell
is interrupted or ends. A script runs on: another reason is said, too, and that the ranks make progress again. The same
ranks that are busy at another line are no other reason: that is said when the wait has become twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .mismatch import Distance, Distances
from .rules import BUSY, Diagnosis, diagnose, diagnose_ahead, different_calls, wait_of
from .snapshot import RankSnapshot

__all__ = ["LOOKS", "PROGRESS_AGAIN", "Detector", "Notice"]

LOOKS = 5  # examinations within the time after which no progress is said
PROGRESS_AGAIN = "the ranks make progress again"
_APART = 0.7  # of that time: ranks that are out of step are said within it


@dataclass(frozen=True)
class Notice:
    """What is to be said.

    Attributes:
        what: e.g. ``"no progress for 12 s"``.
        diagnosis: why; None if the ranks make progress again.
        waited: for how many seconds.
        is_sure: whether waiting longer would not change it.
    """

    what: str
    diagnosis: Diagnosis | None
    waited: float
    is_sure: bool = False

    def __str__(self) -> str:
        return self.what if self.diagnosis is None else f"{self.what}: {self.diagnosis.brief}"


class Detector:
    """Notices that the ranks of a cell, or of a script, make no progress. See [Note: no progress].

    Args:
        seconds: without progress after which it is said.
        sure_s: after which it is judged: what is certain is said then.
        of_script: whether the ranks run a script. Then no look is whole before `sure_s`, so that no rank is found to be
            out of step.

    Attributes:
        last: the newest reason, said or not; None while the ranks make progress.
        is_over: whether nothing more will be said.
    """

    def __init__(self, seconds: float, *, sure_s: float, of_script: bool = False) -> None:
        self._seconds, self.sure_s, self._of_script = seconds, sure_s, of_script
        self._since: dict[int, tuple[object, float]] = {}  # rank -> what it does, or waits for, since when
        self._progress_at = -math.inf
        self._distances = Distances(seconds * _APART)
        self._some_ended = False
        self._said: Notice | None = None
        self._said_of: object = None  # what distinguishes its reason from others
        self.last: Notice | None = None
        self.is_over = False

    def progress(self, at: float) -> None:
        """Notes an output of a cell."""
        self._progress_at = at

    def add(self, at: float, ranks: Sequence[RankSnapshot]) -> float:
        """Adds an examination; returns for how many seconds there has been no progress.

        Args:
            at: when it was made; increases.
            ranks: all, or of a script those of this node; of these the calls in flight are not looked at here.
        """
        if any(one.debugged for one in ranks):  # the user knows, and its peers may wait for as long as that takes
            self._since, self._progress_at, self._distances = {}, at, Distances(self._seconds * _APART)
            return 0.0
        self._some_ended = any(one.state != "running" for one in ranks)
        if self._of_script:
            self._since = {one.rank: self._begun(one.rank, wait_of(one), at) for one in ranks if one.waits}
            begun = [since for _, since in self._since.values()]
            # Where all wait, the one that came last has made progress until then.
            return at - (max(begun) if len(begun) == len(ranks) else min(begun)) if begun else 0.0
        self._since = {one.rank: self._begun(one.rank, _all_of(one), at) for one in ranks}
        return at - max([self._progress_at, *(since for _, since in self._since.values())])

    def judge(self, at: float, ranks: Sequence[RankSnapshot], waited: float) -> Notice | None:
        """What to say now, if anything.

        Args:
            at: when the ranks were examined.
            ranks: all; empty if they have not waited for `sure_s`.
            waited: what `add` has returned; of several nodes the longest.
        """
        if self.is_over or any(one.debugged for one in ranks):
            return None
        notice = self._reason(at, ranks, waited)
        if notice is None or notice.diagnosis is None:
            return self._progresses(waited)
        self.last, found, said = notice, notice.diagnosis, self._said
        reason = _reason_of(found, ranks)
        is_due = notice.is_sure or waited >= self._seconds
        if said is not None:
            is_new = found.stuck and found != said.diagnosis
            if is_new and reason == self._said_of:
                notice = replace(notice, what=f"ranks have waited for {waited:.0f} s")
                is_new = waited >= 2 * said.waited
            is_due = is_due and is_new
        if not is_due:
            return None
        self._said, self._said_of, self.is_over = notice, reason, found.stuck and not self._of_script
        return notice

    def _begun(self, rank: int, does: object, at: float) -> tuple[object, float]:
        known = self._since.get(rank)
        return known if known is not None and known[0] == does else (does, at)

    def _reason(self, at: float, ranks: Sequence[RankSnapshot], waited: float) -> Notice | None:
        """Why the ranks make no progress, if they don't."""
        apart = None if self._of_script else self._out_of_step(at, ranks)
        different = different_calls(ranks, [one for one in ranks if one.waits])
        if different is not None:
            return Notice("the ranks make different calls", different, waited, is_sure=True)
        if apart is not None:
            calls = "collective" if apart.gap == 1 else "collectives"
            what = f"the ranks are out of step, by {apart.gap} {calls}"
            return Notice(what, diagnose_ahead(ranks, apart), waited, is_sure=True)
        if waited < self.sure_s:
            return None
        found = diagnose(ranks)
        if not (found.stuck or found.kind == BUSY):  # one that imports or compiles is not stuck: that ends by itself
            return None
        what = f"{'no progress' if found.stuck else 'ranks have waited'} for {waited:.0f} s"
        return Notice(what, found, waited, is_sure=found.kind == "subset")

    def _out_of_step(self, at: float, ranks: Sequence[RankSnapshot]) -> Distance | None:
        ended = [one.rank for one in ranks if one.state != "running"]
        apart = self._distances.add(at, {one.rank: one.flights for one in ranks}, ended)
        by_rank = {one.rank: one for one in ranks}
        if apart is not None and by_rank[apart.ahead].waits and apart.behind in ended:
            return None  # it waits for one whose cell has ended: `diagnose` explains that better
        return apart

    def _progresses(self, waited: float) -> Notice | None:
        if not self._of_script or self._some_ended:  # others may have stopped to wait: that is no progress
            return None
        self.last = None
        if self._said is None:
            return None
        self._said = None
        return Notice(PROGRESS_AGAIN, None, waited)


def _reason_of(found: Diagnosis, ranks: Sequence[RankSnapshot]) -> object:
    """What distinguishes a reason from others, wherever ranks are that do not wait."""
    waits = frozenset(wait_of(one) for one in ranks if one.waits)
    return found.kind, found.stuck, waits, frozenset((one.rank, one.state) for one in ranks if not one.waits)


def _all_of(one: RankSnapshot) -> object:
    """What changes when a rank makes progress, whether it waits or not."""
    return one.state, one.place, one.models, wait_of(one)
