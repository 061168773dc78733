"""The doctor of `ddp-lab run`: says when the ranks of a script wait for each other, who waits where, and for whom.

It runs beside torch's agent, on a thread, and asks the ranks of this host over a wire of its own, and other nodes
through the job's store. Nothing is asked of the ranks' main threads: a hung rank answers, too.
"""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ..cluster.processes.launchers import make_run_dir
from ..command_line import tell
from ..control.wire import Wire
from ..diagnosis.mismatch import with_places
from ..diagnosis.report import HangReport
from ..diagnosis.rules import BUSY, Diagnosis, diagnose, different_calls, wait_of
from ..diagnosis.snapshot import RankSnapshot
from .exchange import Exchange
from .invitation import invite
from .local_ranks import LocalRanks
from .nodes import Job, made
from .reports import GOES_ON, HANGS

__all__ = ["ACTIONS", "HangWatch"]

ACTIONS = ("wait", "dump", "stop")
_LOOKS = 5  # within the time after which a wait is told
_LONGEST_PAUSE_S = 1.0  # between two looks


class HangWatch:
    """Watches the ranks of a job, with the watches of its other nodes.

    Ownership: between `start` and `stop` its thread owns everything but the wire.

    Args:
        record: the run's folder, for what is dumped.
        seconds: for which ranks may wait.
        action: what is done then besides saying so: ``"wait"`` (nothing), ``"dump"`` (every rank's stack into a file),
            ``"stop"`` (dump, and end the run).

    Attributes:
        invitation: file with which a rank connects.
        ends_run: whether it ends the run, on all nodes: how ranks end from then on, is a consequence.
    """

    def __init__(self, record: Path, seconds: float, action: str) -> None:
        self._record, self._seconds, self._action = record, seconds, action
        self._folder = make_run_dir()
        self._wire = Wire(str(self._folder))
        self.invitation = invite(self._wire, self._folder)
        self._exchange: Exchange | None = None  # with other nodes
        self._since: dict[int, tuple[object, float]] = {}  # rank -> what it waits for, since when
        self._told = ""
        self._last: tuple[float, Diagnosis] | None = None  # the last look: seconds of the longest wait, and why
        self._one_ended = False  # a rank of this host
        self._seen: list[RankSnapshot] = []  # this host's ranks, when all were running
        self._seen_at = 0.0  # monotonic
        self._numbers = itertools.count(1)
        self.ends_run = False  # set by the thread alone
        self._over = threading.Event()
        self._ending = threading.Lock()  # held while `_over` is set, and while the agent is asked to end if it is not
        self._signals, self._signalled = os.pipe()  # readable when this process is asked to end
        self._thread = threading.Thread(target=self._watch, name="ddp_lab-doctor", daemon=True)

    def start(self, ranks: int) -> None:
        """Begins to look as soon as so many ranks have answered; call it on the main thread."""
        self._ranks = LocalRanks(self._wire, ranks)
        os.set_blocking(self._signalled, False)
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        self._thread.start()

    def run_has_ended(self) -> None:
        """From now on, this process is not asked to end any more; call it when torch's agent has ended."""
        with self._ending:
            self._over.set()

    def stop(self) -> None:
        """Looks no more; who waits for an answer of ranks that have ended waits no longer."""
        self.run_has_ended()
        self._wire.close()
        self._thread.join()
        self._leave_nodes()
        signal.set_wakeup_fd(-1)

    def close(self) -> None:
        """Releases what it holds, started or not; call it once, after `stop`."""
        self._wire.close()
        os.close(self._signalled)
        os.close(self._signals)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _leave_nodes(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def tell_last(self) -> None:
        """Says once more what the ranks waited for at the end, if they did."""
        if self._action != "stop" and self._last is not None:
            waited, diagnosis = self._last
            tell(f"before the end, ranks had waited for {waited:.0f} s: {_indented(diagnosis)}")

    def tell_seen(self, rank: int) -> None:
        """Says what a rank did when it was last seen, and how long ago that is, if it was."""
        found = next((one for one in self._seen if one.rank == rank and one.state == "running"), None)
        if found is not None:
            tell(f"last seen {time.monotonic() - self._seen_at:.1f} s ago: rank {rank} {found}")

    def _watch(self) -> None:
        while not self._over.wait(min(self._seconds / _LOOKS, _LONGEST_PAUSE_S)):
            own = self._ranks.look(whole=False)
            ranks = [made(one) for one in own]
            job = self._ranks.job
            if not own or job is None or self._over.is_set() or self._ends(ranks):
                continue
            self._seen, self._seen_at = ranks, time.monotonic()
            waited = self._longest_wait(ranks, time.monotonic())
            self._one_ended = any(one.state != "running" for one in ranks)
            of_all = self._wait_of_all(job, ranks, waited)
            if of_all is not None:
                self._judge(of_all)

    def _ends(self, ranks: Sequence[RankSnapshot]) -> bool:
        """Whether torch's agent ends the run, and says why: the ranks stop in any order."""
        asked_to_end = bool(select.select([self._signals], [], [], 0)[0])
        return asked_to_end or (not self._ranks.are_of_script and any(one.state == "lost" for one in ranks))

    def _wait_of_all(self, job: Job, ranks: Sequence[RankSnapshot], waited: float) -> float | None:
        """The same for all nodes; None if another node judges: then this one repeats what that one says."""
        if job.nodes == 1:
            return waited
        if self._exchange is None or self._exchange.job != job:
            self._leave_nodes()
            self._exchange, self._told = Exchange(job, self._ranks, self._seconds), ""
        of_all = self._exchange.turn(ranks, waited)
        for text, acts in self._exchange.heard():
            tell(text)
            self._note(text)
            if acts:
                self.ends_run = self._action == "stop"
                self._act([made(one) for one in self._ranks.look(whole=True)])
        return of_all

    def _everyone(self) -> list[RankSnapshot]:
        """What each rank of the job does, with the collectives that torch has recorded; empty if not all are known."""
        if self._exchange is not None:
            return self._exchange.everyone()
        return with_places([made(one) for one in self._ranks.look(whole=True)], self._ranks.places)

    def _tell(self, text: str, *, acts: bool = False) -> None:
        """Says it here, and on the other nodes."""
        tell(text)
        self._note(text)
        if self._exchange is not None:
            self._exchange.say(text, acts)

    def _note(self, text: str) -> None:
        """Keeps it for the report."""
        path = self._record / HANGS
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%H:%M:%S')} {' '.join(text.split())}\n")
        except OSError as error:
            tell(f"can't write {path}: {error.strerror}")

    def _longest_wait(self, ranks: Sequence[RankSnapshot], now: float) -> float:
        """For how many seconds a rank has waited for the same thing."""
        self._since = {one.rank: self._begun(one, now) for one in ranks if one.waits}
        return max((now - at for _, at in self._since.values()), default=0.0)

    def _judge(self, waited: float) -> None:
        found, different, ranks = None, None, []
        if waited >= self._seconds / 2:
            ranks = self._everyone()
            if not ranks or self._ends(ranks):
                return
            different = different_calls(ranks, [one for one in ranks if one.waits])
            found = different or diagnose(ranks)
        if found is None or not (found.stuck or found.kind == BUSY):
            if self._one_ended:  # so others may have stopped to wait: that is no progress
                return
            self._last = None
            if self._told:
                self._told = ""
                self._tell(GOES_ON)
            return
        self._last = (waited, found)
        if not found.stuck:  # a rank imports or compiles: that ends by itself, so it is said once, and nothing is done
            if waited >= self._seconds and not self._told:
                self._told = found.sentence
                self._tell(f"ranks have waited for {waited:.0f} s: {_indented(found)}")
            return
        if found.sentence != self._told and (different or waited >= self._seconds):
            self._told = found.sentence
            self.ends_run = self._action == "stop"  # the other nodes' ranks may end before this one's
            what = "the ranks make different calls" if different else f"no progress for {waited:.0f} s"
            self._tell(f"{what}: {_indented(found)}", acts=self._action != "wait")
            self._act(ranks)

    def _begun(self, one: RankSnapshot, now: float) -> tuple[object, float]:
        """What a rank waits for, and since when."""
        wait = wait_of(one)
        known = self._since.get(one.rank)
        return known if known is not None and known[0] == wait else (wait, now)

    def _act(self, ranks: Sequence[RankSnapshot]) -> None:
        if self._action == "wait":
            return
        path = self._record / f"hang-{next(self._numbers)}.txt"
        try:
            path.write_text(f"{HangReport.of(ranks)}\n", encoding="utf-8")
            tell(f"what every rank does: {path}")
        except OSError as error:
            tell(f"can't write {path}: {error.strerror}")
        if self._action == "stop":
            tell("the run is ended (--on-hang stop)")
            with self._ending:
                if not self._over.is_set():
                    self._over.set()
                    os.kill(os.getpid(), signal.SIGTERM)


def _indented(diagnosis: Diagnosis) -> str:
    return diagnosis.brief.replace("\n", "\n  ")
