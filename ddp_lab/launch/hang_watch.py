"""The doctor of `ddp-lab run`: says when the ranks of a script wait for each other, who waits where, and for whom.

It runs beside torch's agent, on a thread, and asks the ranks of this host over a wire of its own. Nothing is asked of
their main threads: a hung rank answers, too.
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
from typing import Any

import psutil

from .. import machine
from ..cluster.processes.launchers import make_run_dir
from ..command_line import tell
from ..control.examination import with_places
from ..control.wire import Wire
from ..diagnostics.calls import Diagnosis
from ..diagnostics.hang_report import HangReport, brief
from ..diagnostics.hangs import diagnose, different_calls, wait_of
from ..diagnostics.rank_state import Examined
from .invitation import invite

__all__ = ["ACTIONS", "HangWatch"]

ACTIONS = ("wait", "dump", "stop")
_LOOKS = 5  # within the time after which a wait is told
_LONGEST_PAUSE_S = 2.0  # between two looks
_ANSWER_S = 1.0


class HangWatch:
    """Watches the ranks of one host.

    Ownership: between `start` and `stop` its thread owns everything but the wire.

    Args:
        record: the run's folder, for what is dumped.
        seconds: for which ranks may wait.
        action: what is done then besides saying so: ``"wait"`` (nothing), ``"dump"`` (every rank's stack into a file),
            ``"stop"`` (dump, and end the run).

    Attributes:
        invitation: file with which a rank connects.
    """

    def __init__(self, record: Path, seconds: float, action: str) -> None:
        self._record, self._seconds, self._action = record, seconds, action
        self._folder = make_run_dir()
        self._wire = Wire(str(self._folder))
        self.invitation = invite(self._wire, self._folder)
        self._pids: dict[int, int] = {}  # of all ranks that have ever answered
        self._since: dict[int, tuple[object, float]] = {}  # rank -> what it waits for, since when
        self._told = ""
        self._last: tuple[float, Diagnosis] | None = None  # the last look: seconds of the longest wait, and why
        self._numbers = itertools.count(1)
        self._over = threading.Event()
        self._signals, self._signalled = os.pipe()  # readable when this process is asked to end
        self._thread = threading.Thread(target=self._watch, name="ddp_lab-doctor", daemon=True)

    def start(self, ranks: int) -> None:
        """Begins to look as soon as so many ranks have answered; call it on the main thread."""
        self._ranks = ranks
        os.set_blocking(self._signalled, False)
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Looks no more; who waits for an answer of ranks that have ended waits no longer."""
        self._over.set()
        self._wire.close()
        self._thread.join()
        signal.set_wakeup_fd(-1)

    def close(self) -> None:
        """Releases what it holds, started or not; call it once, after `stop`."""
        self._wire.close()
        os.close(self._signalled)
        os.close(self._signals)
        shutil.rmtree(self._folder, ignore_errors=True)

    def tell_last(self) -> None:
        """Says once more what the ranks waited for at the end, if they did."""
        if self._action != "stop" and self._last is not None:
            waited, diagnosis = self._last
            tell(f"before the end, ranks had waited for {waited:.0f} s: {_indented(diagnosis)}")

    def _watch(self) -> None:
        while not self._over.wait(min(self._seconds / _LOOKS, _LONGEST_PAUSE_S)):
            ranks = self._examined(whole=False)
            if ranks and not self._ends(ranks):
                self._judge(self._longest_wait(ranks, time.monotonic()))

    def _ends(self, ranks: Sequence[Examined]) -> bool:
        """Whether torch's agent ends the run, and says why: the ranks stop in any order."""
        asked_to_end = bool(select.select([self._signals], [], [], 0)[0])
        return asked_to_end or any(one.state == "lost" for one in ranks)

    def _examined(self, *, whole: bool) -> list[Examined]:
        """What each rank does; empty while not all have begun, or if one can't be examined (its own log says why).

        Args:
            whole: with the collectives that torch has recorded, which takes milliseconds of the ranks' time.
        """
        connected = self._wire.connected()
        answers = self._wire.request(connected, "examine", _ANSWER_S, whole=whole)
        self._pids |= {rank: answer["pid"] for rank, answer in answers.items() if "pid" in answer}
        if len(self._pids) < self._ranks or self._over.is_set() or any("error" in one for one in answers.values()):
            return []
        made = [self._state(rank, rank in connected, answers.get(rank)) for rank in sorted(self._pids)]
        return with_places(self._wire, made)

    def _state(self, rank: int, connected: bool, answer: dict[str, Any] | None) -> Examined:
        if answer is not None:
            return Examined.of(rank, answer["state"], answer, runs="script")
        if not connected:
            return Examined(rank, "idle", runs="script")
        if not psutil.pid_exists(self._pids[rank]):
            return Examined(rank, "lost", runs="script")
        if machine.stopped(self._pids[rank]):
            return Examined(rank, "stopped", why=f"kill -CONT {self._pids[rank]}", runs="script")
        return Examined(rank, "silent", runs="script")

    def _longest_wait(self, ranks: Sequence[Examined], now: float) -> float:
        """For how many seconds a rank has waited for the same thing."""
        self._since = {one.rank: self._begun(one, now) for one in ranks if one.waits}
        return max((now - at for _, at in self._since.values()), default=0.0)

    def _judge(self, waited: float) -> None:
        found, different, ranks = None, None, []
        if waited >= self._seconds / 2:
            ranks = self._examined(whole=True)
            if not ranks or self._ends(ranks):
                return
            different = different_calls(ranks, [one for one in ranks if one.waits])
            found = different or diagnose(ranks)
        if found is None or not found.stuck:
            self._last = None
            if self._told:
                self._told = ""
                tell("the ranks make progress again")
            return
        self._last = (waited, found)
        if found.sentence != self._told and (different or waited >= self._seconds):
            self._told = found.sentence
            what = "the ranks make different calls" if different else f"no progress for {waited:.0f} s"
            tell(f"{what}: {_indented(found)}")
            self._act(ranks)

    def _begun(self, one: Examined, now: float) -> tuple[object, float]:
        """What a rank waits for, and since when."""
        wait = wait_of(one)
        known = self._since.get(one.rank)
        return known if known is not None and known[0] == wait else (wait, now)

    def _act(self, ranks: Sequence[Examined]) -> None:
        if self._action == "wait":
            return
        path = self._record / f"hang-{next(self._numbers)}.txt"
        try:
            path.write_text(f"{HangReport.of(ranks)}\n", encoding="utf-8")
            tell(f"what every rank does: {path}")
        except OSError as error:
            tell(f"can't write {path}: {error.strerror}")
        if self._action == "stop":
            self._over.set()
            tell("the run is ended (--on-hang stop)")
            os.kill(os.getpid(), signal.SIGTERM)


def _indented(diagnosis: Diagnosis) -> str:
    return brief(diagnosis).replace("\n", "\n  ")
