"""A process of a cluster that is killed is named, ends the cell on every rank, and is replaced; what lives is kept."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import CellError, ClusterError, faults
from ddp_lab.cluster.cells import run as run_module
from ddp_lab.cluster.cells.run import CellRun
from ddp_lab.output.board import LineBoard
from tests import leftovers
from tests.cluster.conftest import Lab
from tests.cluster.hanging import NO_FIXED_WAITS, WAITS_AGAIN, Announced, held, in_line, interrupt_when, kill_controller
from tests.cluster.test_live_control import MODEL, training
from tests.cluster.test_sharing import descriptors
from tests.waiting import wait_until

REPLACES_PROCESSES = True

ONES = dict.fromkeys(range(3), 3.0)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Three ranks, on Gloo."""
    with Lab(3, backend="gloo") as cluster:
        yield cluster


def test_a_killed_rank_is_an_event(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a rank's process ends the cell, without another look at the ranks, and is the reason that the others
    wait for; its record and the doctor say how it ended."""
    monkeypatch.setattr(run_module, "_LOOK_S", 600.0)
    lab.run(NO_FIXED_WAITS, ranks=[0, 2])
    run = lab.run("if rank == 1: import time; time.sleep(600)\nelse: dist.all_reduce(torch.ones(4))", wait=False)
    wait_until(in_line(lab, 0, "all_reduce("), "rank 0 in the collective")
    os.kill(lab.pids()["rank 1"], signal.SIGKILL)
    with pytest.raises(CellError, match=r"rank 1 was killed by SIGKILL \(signal 9\)") as caught:
        run.wait()
    assert next(iter(caught.value.failures)) == 1
    assert sorted(caught.value.failures) == [0, 1, 2]
    assert (lab.status()[1].state, lab.status()[1].exit_code) == ("lost", -signal.SIGKILL)
    found = lab.doctor().diagnosis
    assert found.kind == "lost"
    assert "rank 1 failed" in found.sentence
    assert "SIGKILL" in found.sentence
    assert lab.sum_of_ones() == ONES
    lab.run(WAITS_AGAIN, ranks=[0, 2])


def test_dead_ranks_get_new_processes(lab: Lab) -> None:
    """The next cell, or a rejoin, replaces dead ranks alone, says so, and builds the user's groups again. A rejoin
    also replaces a rank that ignores a time limit, which is named and not waited for."""
    lab.run("kept = rank; last = dist.new_group([1, 2])")
    pids = lab.pids()
    with pytest.raises(CellError, match="were killed by SIGSEGV"):
        lab.run("import os, time\nif rank in (0, 2): os.kill(os.getpid(), 11)\ntime.sleep(600)")
    assert lab.sum_of_ones() == ONES
    assert {name for name, pid in lab.pids().items() if pid != pids[name]} == {"rank 0", "rank 2"}
    assert lab.values("globals().get('kept')") == {0: None, 1: 1, 2: None}
    os.kill(lab.pids()["rank 2"], signal.SIGKILL)
    wait_until(lambda: "rank 2" not in lab.pids(), "the end of rank 2")
    assert lab.rejoin() == {2: "was killed by SIGKILL (signal 9)"}
    stubborn = "import time\nwhile True:\n    try: time.sleep(600)\n    except KeyboardInterrupt: pass"
    with pytest.raises(CellError) as caught:
        lab.run(stubborn, ranks=[0], timeout=0.3)
    assert str(caught.value) == "rank 0 did not end within 0.3 s"
    assert lab.busy_ranks() == {0}
    assert lab.rejoin(replace=[0]) == {0: "was terminated to be replaced"}
    assert lab.sum_of_ones() == ONES


def test_a_rank_that_ends_by_itself(lab: Lab) -> None:
    """A rank whose process ends during a cell ends it with an error that names rank and exit; its peers are freed."""
    with pytest.raises(CellError) as caught:
        # The barrier: a rank that a busy machine has not let begin would be stopped, not freed.
        lab.run("import os\ndist.barrier()\nif rank == 1: os._exit(3)\ndist.all_reduce(torch.ones(1))")
    assert str(caught.value) == "rank 1 ended with exit code 3"
    assert [each.secondary for each in caught.value.failures.values()] == [False, True, True]
    assert lab.sum_of_ones() == ONES


def test_a_crash_tells_its_line(lab: Lab) -> None:
    """What a rank wrote last, and where it crashed in C code, is in the error; the next cell says which rank is new."""
    with pytest.raises(CellError) as caught:
        lab.run("import ctypes\nif rank == 1:\n    ctypes.string_at(0)", label="crash")
    words = caught.value.report
    assert "rank 1 was killed by SIGSEGV (signal 11)" in words
    assert "Fatal Python error: Segmentation fault" in words
    assert 'File "<cell crash>", line 3' in words
    assert "interactiveshell" not in words
    lines: list[str] = []
    lab.run("1", board=LineBoard(lambda stream, line: lines.append(line)))
    assert lines[0].startswith(
        "[rank 1] a new process (the former one was killed by SIGSEGV (signal 11)); its variables are lost"
    )
    assert "`ddp_lab.copy_state_from(0)`" in lines[0]


def test_an_aborted_rank_left_what_it_entered(lab: Lab) -> None:
    """Gloo aborts a rank whose call does not fit those of the others: what each entered is compared afterwards, also
    if an earlier group had the same name on some of them only."""
    os.kill(lab.pids()["rank 0"], signal.SIGKILL)
    wait_until(lambda: "rank 0" not in lab.pids(), "the end of rank 0")
    assert lab.sum_of_ones() == ONES
    with pytest.raises(CellError, match="SIGABRT") as caught:
        lab.run("part = torch.ones(4 + 2 * rank)\n\ndist.all_reduce(part)", label="uneven")
    words = caught.value.report
    assert re.search(r"rank 0 entered all_reduce #3 of 16 B \(float32\) at uneven line 3, rank 1 all_r", words), words
    assert "rank 2 all_reduce #3 of 32 B (float32) at uneven line 3." in words
    assert "→ Tensors must have the same shape and dtype on all ranks" in words
    assert "Fatal Python error" not in words
    assert lab.sum_of_ones() == ONES


def test_a_rank_that_answers_nobody(lab: Lab) -> None:
    """A call into C code that keeps the GIL can't be interrupted: that rank's process alone is ended and replaced."""
    lab.run("import ctypes; t = torch.ones(1); kept = rank; lock = ctypes.create_string_buffer(64)")
    thread = interrupt_when(in_line(lab, 0, "all_reduce(t)"))
    with pytest.raises(KeyboardInterrupt) as caught:
        lab.run("while rank == 1: ctypes.PyDLL(None).pthread_mutex_lock(lock)\ndist.all_reduce(t)")
    thread.join()
    assert "rank 1 was unresponsive" in "\n".join(caught.value._render_traceback_())  # type: ignore[attr-defined]
    assert lab.sum_of_ones() == ONES
    assert lab.values("globals().get('kept')") == {0: 0, 1: None, 2: 2}


def test_failure_frees_groups_the_culprit_is_not_in(lab: Lab) -> None:
    """Ranks that wait in a group without the failing rank are freed too."""
    lab.run("outer = dist.new_group([0, 2]); t = torch.ones(1)")
    with pytest.raises(CellError) as caught:
        lab.run(
            "if rank == 1: raise ValueError('culprit')\n"
            "if rank == 0: dist.barrier()\n"
            "else: dist.all_reduce(t, group=outer)"
        )
    failures = caught.value.failures
    assert next(iter(failures)) == 1
    assert sorted(failures) == [0, 1, 2]
    assert lab.sum_of_ones() == ONES


def test_a_rank_that_dies_leaves_no_shared_memory(lab: Lab) -> None:
    """A rank that is killed in the middle of a pull leaves none open."""
    lab.run(
        "import os\nclass Deadly:\n    def __reduce__(self):\n        os.kill(os.getpid(), 9)\n"
        "value = [torch.ones(1 << 20), Deadly()]"
    )
    with pytest.raises((CellError, ClusterError)):
        lab.pull("value", ranks=[1])
    assert descriptors() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.soak
def test_an_injected_death(lab: Lab, tmp_path: Path) -> None:
    """It ends the cell with words about the rank that died, its mark is on the timeline, and the next model trains."""
    with training(lab, tmp_path, fails="SIGKILL"):
        lab.inject(faults.DeadRank(rank=1))
    assert (1, "this rank dies") in [(rank, name) for rank, _, name in lab.timeline.marks()]
    with pytest.raises(ClusterError, match="rank 1"):
        lab.reconfigure(bucket_cap_mb=1)
    lab.run(MODEL + "for _ in range(3): step()")


def test_a_controller_that_is_killed_costs_nothing(lab: Lab, tmp_path: Path) -> None:
    """Killed in a cell, with another one queued behind it: a sentence says who was killed, both cells end with their
    values, ranks keep processes and variables. Killed while nothing runs, and in the moment of an interrupt: push,
    pull, rejoin, doctor and interrupt work."""
    lab.run("t = torch.ones(4); kept = rank + 20")
    before = lab.values("import os; os.getpid(), kept")
    said, gate = Announced(), tmp_path / "gate"
    first = lab.run(f"{held(gate)}\ndist.all_reduce(t)\nrank + 40", wait=False, board=said)
    second = lab.run("rank + 50", wait=False)
    wait_until(lambda: {one.state for one in lab.status()} == {"running"}, "the cell")
    former = kill_controller(lab)
    wait_until(lambda: said.said, "what is said")
    restarted = "the controller was killed by SIGKILL (signal 9). The controller was restarted."
    assert said.said[0][1].startswith(restarted)
    gate.touch()
    assert first.wait().values == {0: 40, 1: 41, 2: 42}
    assert second.wait().values == {0: 50, 1: 51, 2: 52}
    assert kill_controller(lab) != former
    lab.push({"sent": 7})
    assert lab.pull("sent") == dict.fromkeys(range(3), 7)
    kill_controller(lab)
    lab.rejoin()
    assert restarted in str(lab.doctor())

    def killed() -> bool:
        return in_line(lab, 0, "all_reduce(t)")() and bool(kill_controller(lab))

    thread = interrupt_when(killed)
    with pytest.raises(KeyboardInterrupt):
        lab.run("if rank == 0: dist.all_reduce(t)\nelse:\n    import time; time.sleep(600)")
    thread.join()
    assert lab.sum_of_ones() == ONES
    assert lab.values("os.getpid(), kept") == before


def test_sigkill_of_the_fork_server(lab: Lab) -> None:
    """Ranks end with the fork server, the cell that ran says so, and restart() starts a new one."""
    pids = lab.pids()
    run = lab.run("import time; time.sleep(600)", wait=False)
    os.kill(pids["fork server"], signal.SIGKILL)
    wait_until(lambda: not any(leftovers.alive(pids[f"rank {rank}"]) for rank in range(3)), "ranks' end")
    wait_until(lambda: {record.state for record in lab.status()} == {"lost"}, "status")
    with pytest.raises(CellError, match=r"ended: the fork server was killed by SIGKILL \(signal 9\) \(`%cluster r"):
        run.wait()
    lab.restart()
    assert lab.sum_of_ones() == ONES


class Headlines:
    """What a cell in the background was said to do, each state once."""

    def __init__(self) -> None:
        self.last = ""
        self.states: list[str] = []
        self.report = ""

    def show(self, run: CellRun) -> None:
        """See `RunView`."""
        self.last, self.report = run.headline, run.report
        if self.states[-1:] != [run.state]:
            self.states.append(run.state)

    def show_again(self) -> None:
        """See `RunView`."""


def test_ends_of_cells_in_the_background(lab: Lab) -> None:
    """A death, a replaced rank, a restart and a stop are told, and a run keeps its methods after all of them; a new
    process is announced only where it is still to come. A stop ends ranks that sit in a collective, too."""

    def ends(name: str, end: Callable[[], Any]) -> Headlines:
        shown = Headlines()
        waits = "import time; dist.all_reduce(torch.ones(1)) if rank == 0 else time.sleep(600)"
        run = lab.run(waits, wait=False, label=name, view=shown)
        wait_until(lambda: lab.timeline.ranks() and all(rank.cell for rank in lab.timeline.ranks()), "the cell")
        assert (run.state, shown.states) == ("running", ["running"])
        end()
        wait_until(lambda: shown.states[-1] != "running", "its end")
        assert run.state == shown.states[-1] == run.status().state
        assert lab.results[name] is run
        assert set(run.failures) == {0, 1, 2}
        return shown

    killed = ends("killed", lambda: os.kill(lab.pids()["rank 1"], signal.SIGKILL))
    assert re.fullmatch(r"✗ lost after \d\.\d s: rank 1 was killed by SIGKILL \(signal 9\)", killed.last)
    assert "during cell killed" in killed.report
    assert "starts a new process for it" in killed.report
    assert re.fullmatch(r"■ interrupted after \d\.\d s", ends("interrupted", lab.interrupt).last)
    replaced = ends("replaced", lambda: lab.rejoin(replace=[0, 1, 2]))
    assert re.fullmatch(r"✗ lost after \d\.\d s: ranks 0–2 were terminated to be replaced", replaced.last)
    restarted = ends("restarted", lab.restart)
    assert re.fullmatch(r"✗ lost after \d\.\d s: ranks 0–2 ended when the cluster was restarted", restarted.last)
    assert lab.sum_of_ones() == ONES
    pids = lab.pids()
    stopped = ends("stopped", lab.stop)
    assert not [pid for pid in pids.values() if leftovers.alive(pid)]
    assert re.fullmatch(r"✗ lost after \d\.\d s: ranks 0–2 ended when the cluster was stopped", stopped.last)
    assert not [one.report for one in (replaced, restarted, stopped) if "starts" in one.report]
    with pytest.raises(CellError, match="ended when the cluster was stopped"):
        lab.results["stopped"].wait()
    assert repr(lab).startswith("<Cluster 'cluster-")
    assert repr(lab).endswith(": stopped>")
    with pytest.raises(ClusterError, match="the cluster is not running: start it"):
        lab.run("1")
