"""Hangs and mistakes that people make, provoked on real ranks: the doctor has to say the right sentence of each."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_lab import ClusterError
from tests.cluster.conftest import Lab
from tests.cluster.hanging import APART, HANGS, MODEL, Announced, diagnosed, impatient, running, settled, told_apart
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two ranks whose mistakes hang; "shm" reports many of them by itself."""
    with Lab(2, backend="gloo") as cluster:
        yield cluster


@pytest.mark.parametrize("name", HANGS)
def test_the_sentence(lab: Lab, name: str) -> None:
    """The doctor names the reason, and interrupting leaves ranks that work."""
    report = diagnosed(lab, name)
    assert report.diagnosis.remedy
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_part_of_the_ranks(lab: Lab) -> None:
    """A cell that was given to one rank alone, but needs all, is told so, with the user's own frames."""
    nested = "def deep(n):\n    dist.all_reduce(torch.ones(1)) if n == 0 else deep(n - 1)\n"
    with running(lab, nested + "deep(1)", ranks=[0]):
        report = settled(lab, "subset")
    assert "which rank 1 must enter too" in report.diagnosis.sentence
    found = re.search(r"\n  rank 0 waits in .*\n    in flight: .*\n((?: {6}.*\n)+)  rank 1 is not running", str(report))
    assert found is not None, str(report)
    frames = [line.strip() for line in found[1].splitlines()]
    ends = ["3 in <module>: deep(1)", "2 in deep: deep(n - 1)", "2 in deep: dist.all_reduce(torch.ones(1))"]
    assert [frame.partition(" line ")[2] for frame in frames] == ends


def test_nothing_runs(lab: Lab) -> None:
    """Between cells there is nothing to say, and nobody is stuck."""
    report = lab.doctor()
    assert (report.diagnosis.kind, report.diagnosis.stuck) == ("idle", False)
    assert "rank 1 is not running a cell" in str(report)


def test_a_stopped_rank(lab: Lab) -> None:
    """A rank that was stopped by a signal is reported with the command that continues it; an interrupt does not end it,
    and what comes next waits for it."""
    pid = lab.pids()["rank 1"]
    with running(lab, "import time; dist.barrier() if rank == 0 else time.sleep(600)"):
        os.kill(pid, signal.SIGSTOP)
        try:
            report = settled(lab, "stopped")
            assert report.diagnosis.sentence.startswith("rank 1 is stopped (SIGSTOP). rank 0 waits in barrier")
            assert report.diagnosis.remedy == f"`kill -CONT {pid}` resumes it; nothing is lost."
            assert f"rank 1 is stopped (SIGSTOP): `kill -CONT {pid}` resumes it" in str(report)
            lab.session.members.end_silent([1])
            with pytest.raises(ClusterError, match=rf"rank 1 is stopped \(SIGSTOP\): `kill -CONT {pid}`"):
                lab.rejoin()
        finally:
            os.kill(pid, signal.SIGCONT)
    assert lab.pids()["rank 1"] == pid
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_paused_backward(lab: Lab) -> None:
    """A breakpoint is no hang: it is named with what to do."""
    lab.run(MODEL + "model(x).sum().backward()")
    lab.breakpoints("bucket_ready")
    cell = lab.run("model(x).sum().backward()", wait=False)
    report = settled(lab, "paused")
    lab.resume()
    cell.wait()
    assert "bucket ready: bucket 0" in report.diagnosis.sentence
    assert "lab.resume()" in report.diagnosis.remedy


def test_a_cell_without_progress_says_so_once(lab: Lab) -> None:
    """While ranks wait for each other longer than the watch time the cell is told why, once; outputs are progress."""
    with impatient(lab) as board:
        with running(lab, HANGS["sleep"][0], board=board):
            wait_until(lambda: board.said, "the word")
            settled(lab, "busy")
        ((ranks, text),) = board.said
        assert ranks == [0, 1]
        assert text.startswith("no progress for ")
        assert "rank 1 is in `time.sleep(600)`" in text
        talking = Announced()
        code = "import time\nfor i in range(20):\n    time.sleep(0.1); print(i)\n"
        code += "    dist.barrier() if rank == 0 and i == 19 else None\nif rank: dist.barrier()"
        lab.run(code, board=talking)
        assert talking.said == []


def test_a_wait_for_a_rank_that_has_ended(lab: Lab) -> None:
    """A rank that waits for one whose cell is over is reported, not that they are out of step."""
    with impatient(lab) as board, running(lab, "if rank == 0: dist.all_reduce(torch.ones(1))", board=board):
        wait_until(lambda: board.said, "the word")
    text = board.said[0][1]
    assert text.startswith("no progress for ")
    assert "rank 1 has finished the cell (it had entered no collective in this cell) without entering all_r" in text
    assert re.search(r" of 4 B \(float32\) at .* line 1, in which rank 0 waits for it\.", text), text


@pytest.mark.parametrize("name", APART)
def test_ranks_that_run_apart(lab: Lab, name: str) -> None:
    """Ranks that make different calls are reported while all of them run on and print; works that never end go away."""
    told_apart(lab, name)
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


CATCH_UP = """
import time
for i in range(12):
    works = []
    for j in range(40):
        if rank == i % 2: time.sleep(0.004)
        works.append(dist.all_reduce(torch.ones(4), async_op=True))
    for work in works: work.wait()
"""


def test_ranks_that_are_ahead_in_turn(lab: Lab) -> None:
    """By collectives that they do not wait for: they catch up, and nothing is said."""
    lab.run(CATCH_UP)
    begin = time.monotonic()
    lab.run(CATCH_UP)
    with impatient(lab, (time.monotonic() - begin) / 3) as board:  # of four of its twelve turns
        lab.run(CATCH_UP, board=board)
    assert board.said == []


def test_a_cell_in_which_nobody_waits(lab: Lab) -> None:
    """Nothing is said of it, however long it takes."""
    with impatient(lab, 0.3) as board:
        lab.run("import time; time.sleep(2)", board=board)
    assert board.said == []


def test_what_is_in_flight(lab: Lab) -> None:
    """Launched collectives that have not ended are told with the oldest and its age, by doctor, status and health."""
    code = "import time\nwork = [dist.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(3)]\n"
    with running(lab, code.replace("= [", "= rank == 0 and [") + "time.sleep(600)"):
        wait_until(lambda: lab.doctor().diagnosis.kind == "ahead", "the diagnosis")
        report = lab.doctor()
        health, status = lab.health(), lab.status()
    assert "rank 1 has not entered it" in report.diagnosis.sentence
    assert re.search(r"in flight: 3, oldest all_reduce #\d+ of 1 MiB for [\d.]+ s", str(report))
    for told in (health[0].in_flight, status[0].in_flight):
        assert re.fullmatch(r"3, oldest all_reduce #\d+ of 1 MiB for [\d.]+ s", told)
    assert (health[1].in_flight, status[1].in_flight) == ("", "")


def test_a_rank_that_holds_the_interpreter(lab: Lab, tmp_path: Path) -> None:
    """A call into C that keeps Python's lock answers nobody: the rank is said to be silent, and who waits for it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = (
        f"import ctypes, os\nif rank == 1: os.close(ctypes.PyDLL(None).open({os.fsencode(pipe)!r}, 0))\ndist.barrier()"
    )
    cell = lab.run(code, wait=False)
    try:
        report = settled(lab, "silent")
    finally:
        pipe.write_bytes(b"")  # opened for writing, too, it is open
    assert report.diagnosis.stuck
    assert "rank 1 is unresponsive" in report.diagnosis.sentence
    assert "rank 0 waits for it" in report.diagnosis.sentence
    cell.wait()
