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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from ..cluster.processes.launchers import make_run_dir
from ..command_line import tell
from ..control.wire import Wire
from ..diagnosis.detector import LOOKS, Detector, Notice
from ..diagnosis.report import HangReport
from ..diagnosis.snapshot import RankSnapshot
from ..diagnosis.sources.nodes import NodeRanks, Store
from ..diagnosis.sources.script import Job, JobRanks, ScriptRanks
from ..formatting import enumeration
from .endpoint_file import write_endpoint
from .reports import HANGS

__all__ = ["ACTIONS", "HangWatch"]

ACTIONS = ("wait", "dump", "stop")
_PREFIX = "ddp_lab/doctor"
_CONNECT = timedelta(seconds=30)
_LONGEST_PAUSE_S = 1.0  # between two looks


@dataclass
class _WatchedJob:
    """What is known of a job.

    Attributes:
        ranks: its ranks on this host.
        detector: notices that they make no progress.
        nodes: its other nodes, if there are any.
    """

    ranks: JobRanks
    detector: Detector
    nodes: NodeRanks | None

    def close(self) -> None:
        """Leaves the other nodes."""
        if self.nodes is not None:
            self.nodes.close()


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
        self.invitation = write_endpoint(self._wire, self._folder)
        self._jobs: dict[Job, _WatchedJob] = {}  # several if the script runs them at a time; of the newest look
        self._numbers = itertools.count(1)
        self.ends_run = False  # set by the thread alone
        self._over = threading.Event()
        self._ending = threading.Lock()  # held while `_over` is set, and while the agent is asked to end if it is not
        self._signals, self._signalled = os.pipe()  # readable when this process is asked to end
        self._thread = threading.Thread(target=self._watch, name="ddp_lab-doctor", daemon=True)

    def start(self, ranks: int) -> None:
        """Begins to look as soon as so many ranks have answered; call it on the main thread."""
        self._ranks = ScriptRanks(self._wire, ranks)
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
        for job in self._jobs.values():
            job.close()
        signal.set_wakeup_fd(-1)

    def close(self) -> None:
        """Releases what it holds, started or not; call it once, after `stop`."""
        self._wire.close()
        os.close(self._signalled)
        os.close(self._signals)
        shutil.rmtree(self._folder, ignore_errors=True)

    def tell_last(self) -> None:
        """Says once more what the ranks waited for at the end, if they did."""
        for job in self._jobs.values():
            last = job.detector.last
            if self._action != "stop" and last is not None:
                what = f"before the end, ranks had waited for {last.waited:.0f} s"
                tell(self._words(job, replace(last, what=what)))

    def tell_seen(self, pid: int) -> None:
        """Says what a rank's process did when it was last seen, and how long ago that is, if it was."""
        found = self._ranks.last_seen(pid)
        if found is not None:
            seconds, seen = found
            tell(f"last seen {seconds:.1f} s ago: rank {seen.rank} {seen}")

    def _watch(self) -> None:
        while not self._over.wait(min(self._seconds / LOOKS, _LONGEST_PAUSE_S)):
            looked = self._ranks.look(whole=False)
            if looked.keys() - self._jobs.keys():
                self._follow(looked)
            for job, told in looked.items():
                self._look(self._jobs[job], [RankSnapshot.of_script(one) for one in told])

    def _follow(self, jobs: Iterable[Job]) -> None:
        """Watches these jobs, of which some are new, and no others."""
        before = self._jobs
        self._jobs = {job: before[job] if job in before else self._watched(job) for job in jobs}
        for job in before.keys() - self._jobs.keys():
            before[job].close()

    def _watched(self, job: Job) -> _WatchedJob:
        ranks = JobRanks(self._ranks, job)
        nodes = NodeRanks(ranks, self._seconds, _connected) if job.nodes > 1 else None
        return _WatchedJob(ranks, Detector(self._seconds, sure_s=self._seconds / 2, of_script=True), nodes)

    def _look(self, job: _WatchedJob, ranks: Sequence[RankSnapshot]) -> None:
        if self._over.is_set() or self._ends(job, ranks):
            return
        of_all = self._wait_of_all(job, ranks, job.detector.add(time.monotonic(), ranks))
        if of_all is not None:
            self._judge(job, of_all)

    def _ends(self, job: _WatchedJob, ranks: Sequence[RankSnapshot]) -> bool:
        """Whether torch's agent ends the run, and says why: the ranks stop in any order."""
        asked_to_end = bool(select.select([self._signals], [], [], 0)[0])
        return asked_to_end or (not job.ranks.job.of_script and any(one.state == "lost" for one in ranks))

    def _wait_of_all(self, job: _WatchedJob, ranks: Sequence[RankSnapshot], waited: float) -> float | None:
        """The same for all nodes; None if another node judges: then this one repeats what that one says."""
        if job.nodes is None:
            return waited
        of_all = job.nodes.turn(ranks, waited)
        for text, acts in job.nodes.heard():
            tell(text)
            self._note(text)
            if acts:
                self.ends_run = self._action == "stop"
                self._act(job.ranks.snapshots())
        return of_all

    def _words(self, job: _WatchedJob, notice: Notice) -> str:
        """What is to be said of this job: which one, if there have been several."""
        text = str(notice).replace("\n", "\n  ")
        if len(self._jobs) == 1:
            return text
        where = job.ranks.job.meeting
        pids = [str(pid) for pid in self._ranks.processes(job.ranks.job)]
        of = f"process{'es' if len(pids) > 1 else ''} {enumeration(pids)}"
        return f"the job whose ranks meet at {where} ({of}): {text}" if where else f"the job of {of}: {text}"

    def _tell(self, job: _WatchedJob, text: str, *, acts: bool = False) -> None:
        """Says it here, and on the other nodes."""
        tell(text)
        self._note(text)
        if job.nodes is not None:
            job.nodes.say(text, acts)

    def _note(self, text: str) -> None:
        """Keeps it for the report."""
        path = self._record / HANGS
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%H:%M:%S')} {' '.join(text.split())}\n")
        except OSError as error:
            tell(f"can't write {path}: {error.strerror}")

    def _judge(self, job: _WatchedJob, waited: float) -> None:
        ranks: list[RankSnapshot] = []
        if waited >= job.detector.sure_s:
            ranks = (job.nodes or job.ranks).snapshots()
            if not ranks or self._ends(job, ranks):
                return
        notice = job.detector.judge(time.monotonic(), ranks, waited)
        if notice is None:
            return
        acts = notice.diagnosis is not None and notice.diagnosis.stuck
        if acts:
            self.ends_run = self._action == "stop"  # the other nodes' ranks may end before this one's
        self._tell(job, self._words(job, notice), acts=acts and self._action != "wait")
        if acts:
            self._act(ranks)

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


def _connected(job: Job) -> Store:
    """The part of the job's store in which nodes exchange what they see."""
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined, unused-ignore]
        job.host, job.port, is_master=False, timeout=_CONNECT, wait_for_workers=False
    )
    part: Store = dist.PrefixStore(f"{_PREFIX}/{job.attempt}{job.meeting}", store)  # type: ignore[attr-defined, unused-ignore]
    return part
