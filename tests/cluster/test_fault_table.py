"""Each process of a cluster, at each moment, hit by each fault: what the user sees of it, and that all goes on.

`make soak` goes through the whole table and prints it (``pytest -s``); ``DDP_LAB_FAULTS='controller,idle'`` chooses the
cells whose name holds these words.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_lab import CellError, ClusterError, machine
from tests import leftovers
from tests.cluster.conftest import Lab
from tests.cluster.hanging import Announced
from tests.waiting import DEADLINE_S, wait_until

GATE = "import os, time\nwhile not os.path.exists({gate!r}): {work}\nrank"
WORK = {"in a cell": "time.sleep(0.01)", "background cell": "time.sleep(0.01)", "in a collective": ""}
COLLECTIVE = "t = torch.zeros(1)\n" + GATE.replace("{work}", "dist.all_reduce(t)").replace(
    "while not os.path.exists({gate!r}):",
    "while not t.item():\n    t = torch.full((1,), float(os.path.exists({gate!r})));",
)
MOMENTS = ("starting", "idle", "in a cell", "in a collective", "background cell", "detached", "stopping")
PROCESSES = ("controller", "heart monitor", "fork server", "rank 1", "keeper")
FAULTS = ("SIGKILL", "SIGSTOP", "descriptors", "memory")
KILLED = r"was killed by SIGKILL \(signal 9\)"
SAID_OF_KILLED = {
    "controller": rf"the controller {KILLED}",
    "heart monitor": rf"the controller's heart monitor {KILLED}",
    "fork server": rf"the fork server {KILLED}",
    "rank 1": rf"rank 1.* {KILLED}",
    "keeper": r"the cluster's supervisor \(process \d+\) ended",
}
# Of a process that can't do without: libzmq ends it.
NO_MORE = {
    "descriptors": r"it ran out of file descriptors \(restart .* with a higher limit, e\.g\. after `ulimit -n 4096`\)",
    "memory": r"it ran out of memory \(end processes that .* limit, e\.g\. after `ulimit -v unlimited`\)",
}
STARVED = {"memory": r"rank 1 failed: MemoryError", "descriptors": r"rank 1 failed: .*Too many open files"}
TAKES_RANKS_ALONG = ("fork server", "keeper")
TABLE: list[str] = []


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    process: str
    moment: str
    fault: str

    def __str__(self) -> str:
        return f"{self.process}, {self.moment}, {self.fault}"

    @property
    def detach(self) -> bool:
        return self.process == "keeper" or self.moment == "detached"


CASES = [
    case
    for process in PROCESSES
    for moment in MOMENTS
    for fault in FAULTS
    if all(
        word in str(case := Case(process, moment, fault)) for word in os.environ.get("DDP_LAB_FAULTS", "").split(",")
    )
]


@pytest.fixture(autouse=True, scope="module")
def table(entries: Path) -> Iterator[None]:
    """The table is shown at the end."""
    yield
    print("\n".join(["", *TABLE]))


def pid_of(lab: Lab, process: str) -> int:
    """A process of a cluster; 0 while there is none."""
    pids = lab.pids()
    if process != "heart monitor":
        return pids.get(process, 0)
    parent = pids.get("controller", 0)
    try:
        return next((child.pid for child in psutil.Process(parent).children()), 0) if parent else 0
    except psutil.NoSuchProcess:
        return 0


def files_of(pid: int) -> set[int]:
    """The numbers of the files that a process has open."""
    return {int(number) for number in os.listdir(f"/proc/{pid}/fd")}


def strike(pid: int, fault: str) -> None:
    """Lets something happen to a process: from now on it is dead, stopped, or gets no file or page more than it has."""
    if fault == "SIGKILL":
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not leftovers.alive(pid), "its end")
    elif fault == "SIGSTOP":
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: machine.stopped(pid), "its stop")
    elif fault == "descriptors":
        taken = files_of(pid)
        free = next(number for number in itertools.count() if number not in taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
    else:
        taken = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (taken, resource.prlimit(pid, resource.RLIMIT_AS)[1]))


def do_as_told(case: Case, said: str, pid: int) -> None:
    """Runs the command that a sentence names for a process, unless that is gone."""
    commands = re.findall(rf"`((?:kill -CONT|prlimit --pid) {pid}\b[^`]*)`", said)
    assert commands or re.search(NO_MORE.get(case.fault, "nothing"), said), said
    for command in dict.fromkeys(commands):
        subprocess.run(command.split(), check=True)


class Watched:
    """A cell that is waited for on a thread of its own, and all that is said of it."""

    def __init__(self, lab: Lab, code: str, wait: bool) -> None:
        self.board = Announced()
        self.values: dict[int, Any] | None = None
        self.error: BaseException | None = None
        self._run = None if wait else lab.run(code, wait=False, board=self.board)
        self.thread = threading.Thread(target=self._work, args=(lab, code))
        self.thread.start()

    def _work(self, lab: Lab, code: str) -> None:
        try:
            result = lab.run(code, board=self.board) if self._run is None else self._run.wait()
            self.values = dict(result.values)
        except (CellError, ClusterError) as error:
            self.error = error

    def said(self) -> str:
        """What the user has seen."""
        told = [f"rank 1: {text}" if ranks == [1] else text for ranks, text in self.board.said]
        return "\n".join([*told, *([str(self.error)] if self.error else [])])


def until_said(case: Case, look: Callable[[], str], pattern: str) -> str:
    """Waits for words and notes how long they took; returns all that was said then."""
    seen = [""]

    def found() -> bool:
        seen[0] = look()
        return re.search(pattern, seen[0], re.DOTALL) is not None

    begin = time.monotonic()
    wait_until(found, lambda: f"{case}: {pattern}; said: {seen[0]!r}")
    seconds = time.monotonic() - begin
    TABLE.append(f"{case!s:45} {seconds:5.1f} s  {re.search(pattern, seen[0], re.DOTALL)[0]}")  # type: ignore[index]
    return seen[0]


def works(lab: Lab) -> bool:
    """Whether ranks meet in a collective; within the time that a restart may take."""
    return lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def expected(case: Case, pid: int) -> str:
    """What the user has to see: who, what has happened, and but for a process that is gone what to do."""
    shown = {"keeper": "supervisor process"}.get(case.process, case.process)
    name = shown if shown.startswith("rank") else f"the (cluster's |controller's )?{shown}"
    return {
        "SIGKILL": SAID_OF_KILLED[case.process],
        "SIGSTOP": rf"{name} is stopped \(SIGSTOP\): `kill -CONT {pid}` resumes it",
        "descriptors": rf"{name} has reached its limit of \d+ open files: "
        rf"`prlimit --pid {pid} --nofile=\d+:` raises it|{NO_MORE['descriptors']}",
        "memory": rf"{name} has reached its memory limit \([\d,]+ MiB of address space\): "
        rf"`prlimit --pid {pid} --as=\w+:` raises it|{NO_MORE['memory']}",
    }[case.fault]


def hit_while_starting(case: Case) -> None:
    """The start ends with the reason; of a process that can't go on it says so, and goes on when that does. One that
    can't begin without what it lacks ends the start with the end of its log and what helps."""
    lab, struck, told = Lab(2, detach=case.detach), list[int](), list[str]()
    times = list[float]()

    def progress(fraction: float, text: str) -> None:
        pid = pid_of(lab, case.process) if text.startswith("starting engines") or struck else 0
        if pid and not struck:
            struck.append(pid)
            times.append(time.monotonic())
            strike(pid, case.fault)
        elif struck and not told and case.fault != "SIGKILL" and re.search(expected(case, struck[0]), text):
            told.append(text)
            times.append(time.monotonic())
            do_as_told(case, text, struck[0])

    ended = ""
    try:
        lab.start(progress)
    except ClusterError as error:
        ended = str(error)
        times.append(time.monotonic())
    assert struck
    if ended:
        assert case.fault != "SIGSTOP", ended
        assert re.search(expected(case, struck[0]), ended, re.DOTALL), ended
        assert not lab.running
        lab.start()
    else:
        assert case.fault != "SIGKILL"
    words = " … ".join([*told, *ended.splitlines()[:1]]) or "it did without"
    TABLE.append(f"{case!s:45} {times[-1] - times[0]:5.1f} s  {words}")
    assert works(lab)
    lab.stop()


def hit_while_stopping(case: Case) -> None:
    """A stop ends all, whatever happened to a process just before."""
    lab = Lab(2, detach=case.detach).start()
    pids = lab.pids()
    pid = pid_of(lab, case.process)
    if case.fault == "SIGKILL":
        os.kill(pid, signal.SIGKILL)
    else:
        strike(pid, case.fault)
    begin = time.monotonic()
    lab.stop()
    wait_until(lambda: not [one for one in pids.values() if leftovers.alive(one)], "the end of all")
    TABLE.append(f"{case!s:45} {time.monotonic() - begin:5.1f} s  all gone")


@contextlib.contextmanager
def away() -> Iterator[Lab]:
    """A detached cluster, which is stopped at the end."""
    try:
        yield Lab(2, detach=True, name="away").start()
    finally:
        with contextlib.suppress(ClusterError):  # it has ended
            Lab.attach("away", take_over=True).stop()


def hit_while_detached(case: Case, lab: Lab) -> None:
    """Who attaches finds the ranks as they were, or is told why not and what helps."""
    lab.run("kept = rank")
    pid = pid_of(lab, case.process)
    lab.detach()
    # A rank closes some files when its client has gone; what it has then is what it can do with.
    wait_until(lambda: files_of(pid) == (time.sleep(0.3) or files_of(pid)), "files that stay")
    strike(pid, case.fault)
    if case.process == "keeper" and case.fault == "SIGKILL":
        with pytest.raises(ClusterError, match="no detached cluster is named 'away'"):
            Lab.attach("away")
        TABLE.append(f"{case!s:45}          no detached cluster is named 'away'")
        return
    begin, said = time.monotonic(), ""
    try:
        found = Lab.attach("away")
    except ClusterError as error:  # what it needs to attach can't go on
        said = str(error)
        assert re.search(expected(case, pid), said), said
        assert case.process in ("keeper", "controller", "heart monitor"), said
        TABLE.append(f"{case!s:45} {time.monotonic() - begin:5.1f} s  {said}")
        do_as_told(case, said, pid)
        found = Lab.attach("away")
    try:
        if case.fault != "SIGKILL" and not said:
            said = until_said(case, lambda: str(found.doctor()), expected(case, pid))
            do_as_told(case, said, pid)
        elif case.fault == "SIGKILL" and case.process != "rank 1":
            until_said(case, lambda: words_of_next(found), expected(case, pid))  # type: ignore[arg-type]
        if case.process in TAKES_RANKS_ALONG and case.fault == "SIGKILL":
            found.restart()
        assert works(found)  # type: ignore[arg-type]
    finally:
        found.stop()


def words_of_next(lab: Lab) -> str:
    """What the next cell says, and the doctor."""
    watched = Watched(lab, "rank", wait=True)
    watched.thread.join(DEADLINE_S)
    return f"{watched.said()}\n{lab.doctor()}"


def hit_while_up(case: Case, gate: Path) -> None:
    """A running cell, or the next one, says what happened; then all goes on, or does after a restart."""
    with Lab(2, detach=case.detach, name="up" if case.detach else None) as lab:
        try:
            pid, cell = pid_of(lab, case.process), None
            if case.moment != "idle":
                code = COLLECTIVE if case.moment == "in a collective" else GATE.replace("{work}", WORK[case.moment])
                cell = Watched(lab, code.replace("{gate!r}", repr(str(gate))), wait=case.moment != "background cell")
                wait_until(lambda: {one.state for one in lab.status()} == {"running"}, "the cell")
            strike(pid, case.fault)
            if case.fault == "SIGKILL" and cell is None:
                look = lambda: words_of_next(lab)  # noqa: E731
            elif cell is None:
                look = lambda: str(lab.doctor())  # noqa: E731
            else:
                look = cell.said
            said = until_said(case, look, expected(case, pid))
            if case.fault in ("descriptors", "memory") and cell is None and not case.process.startswith("rank"):
                lab.push({"much": list(range(1000))})
            if case.fault != "SIGKILL":
                do_as_told(case, said, pid)
            gate.touch()
            if cell is not None:
                cell.thread.join(DEADLINE_S)
                assert not cell.thread.is_alive(), f"{case}: the cell hangs"
                died = case.fault == "SIGKILL" or not leftovers.alive(pid)
                lost = died and (case.process in TAKES_RANKS_ALONG or case.process == "rank 1")
                # What runs on a rank while it gets none may fail of it, and says so.
                starved = case.process == "rank 1" and re.search(STARVED.get(case.fault, "^$"), str(cell.error))
                assert starved or (cell.error is not None) == lost, cell.error
            if case.process in TAKES_RANKS_ALONG and case.fault == "SIGKILL":
                begin = time.monotonic()
                lab.restart()
                TABLE.append(f"{'':45} {time.monotonic() - begin:5.1f} s  restart")
            assert works(lab)
        finally:
            gate.touch()
            lab.stop()


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_user_sees(case: Case, tmp_path: Path) -> None:
    """A sentence names the process and what happened to it, no call hangs, and the cluster works again."""
    if case.moment == "starting":
        hit_while_starting(case)
    elif case.moment == "stopping":
        hit_while_stopping(case)
    elif case.moment == "detached":
        with away() as lab:
            hit_while_detached(case, lab)
    else:
        hit_while_up(case, tmp_path / "gate")


def fill(path: Path) -> None:
    """Takes all that is free on a disk."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk that is small")
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no room for a cluster's files a start says so; one that runs goes on: cells, much output, push and pull, a
    killed rank, a killed controller."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    filler = tmp_path / "filler"
    try:
        with Lab(2) as lab:
            fill(filler)
            assert works(lab)
            result = lab.run("for _ in range(20_000): print('x' * 80)")
            assert {len(result.text(rank)) for rank in (0, 1)} == {20_000 * 81}
            lab.push({"much": bytes(8 << 20)})
            assert {len(one) for one in lab.pull("much").values()} == {8 << 20}
            os.kill(lab.pids()["controller"], signal.SIGKILL)
            wait_until(lambda: works(lab), "a new controller")
            os.kill(lab.pids()["rank 1"], signal.SIGKILL)
            wait_until(lambda: "rank 1" not in lab.pids(), "the rank's end")
            assert works(lab)
        fill(filler)
        with pytest.raises((ClusterError, OSError), match="No space left on device"):
            Lab(2).start()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
