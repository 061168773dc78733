"""Cells that are not waited for: what they offer while they run, and what becomes of those behind them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import CellError, ClusterError
from ddp_lab.cluster.cells.run import CellRun
from ddp_lab.output.board import LineBoard
from ddp_lab.output.terminal import plain
from tests.cluster.conftest import Lab
from tests.waiting import wait_until

SUM = "t = torch.ones(1); dist.all_reduce(t); t.item()"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file for which cells wait: `gate.touch()` lets them go on."""
    return tmp_path / "gate"


def held(gate: Path) -> str:
    return f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.005)"


def test_a_running_cell_can_be_asked(lab: Lab, gate: Path) -> None:
    """Status, outputs so far and repr are there while it runs, the result once it is done."""
    run = lab.run(f"print('begun', rank)\n{held(gate)}\nrank", wait=False, label="asked")
    wait_until(
        lambda: all(run.text(rank) == f"begun {rank}\n" for rank in (0, 1)),
        'all(run.text(rank) == f"begun {rank}\\n" for rank in (0, 1))',
    )
    assert run.outputs()[1][0]["output_type"] == "stream"
    assert re.match(r"<CellRun asked at \d\d:\d\d:\d\d: ranks 0–1 running, for 0\.\d s>", repr(run))
    with pytest.raises(ClusterError, match="cell asked is still running on ranks 0–1"):
        run.result()
    assert lab.results["asked"] is run
    gate.touch()
    assert run.wait().values == {0: 0, 1: 1}
    assert run.result().text(1) == "begun 1\n1\n"
    assert re.match(r"<CellRun asked: ✓ done in \d\.\d s; values {0: 0, 1: 1}>", repr(run))
    assert lab.results["asked"] is run


def test_ranks_are_idle_once_the_cell_has_been_waited_for(lab: Lab) -> None:
    """Also right after the end of a short cell."""
    for _ in range(50):
        lab.run("1")
        assert lab.busy_ranks() == set()


def test_cells_wait_in_order(lab: Lab, gate: Path) -> None:
    """A cell behind another says for which it waits, then that it runs; results come in the order of sending."""
    shown: list[str] = []
    first = lab.run(f"order = ['first']\n{held(gate)}", wait=False, label="first")
    second = lab.run(
        "order.append('second')", wait=False, label="second", board=LineBoard(lambda _, line: shown.append(line))
    )
    third = lab.run("order", ranks=[1], wait=False, label="third")
    assert (first.waits_for, second.waits_for, third.waits_for) == ((), ("first",), ("first", "second"))
    assert set(second.status().ranks.values()) == {"queued"}
    assert "<CellRun third at " in repr(third)
    assert ": waits for first and second, " in repr(third)
    assert third.status().state == "queued"
    assert shown == ["[ranks 0–1] second waits for first …"]
    gate.touch()
    assert third.wait().values == {1: ["first", "second"]}
    assert second.wait() is not None
    assert shown[1] == "[ranks 0–1] second is running …"
    assert second.waits_for == ()


@pytest.mark.parametrize("end", ["if rank == 1: 1 / 0\ndist.barrier()", "1 / 0"])
def test_a_cell_behind_one_that_fails(lab: Lab, gate: Path, end: str) -> None:
    """It is not run and says why, on every rank; push and pull are not kept by that; the next cell works."""
    lab.run("ran = []")
    first = lab.run(f"{held(gate)}\n{end}", wait=False, label="first")
    second = lab.run(f"ran.append(2); {SUM}", wait=False, label="second")
    third = lab.run("ran.append(3)", wait=False, label="third")
    gate.touch()
    with pytest.raises(CellError, match=r"rank.* failed: ZeroDivisionError"):
        first.wait()
    for run in (second, third):
        with pytest.raises(CellError) as caught:
            run.wait()
        assert str(caught.value) == "ranks 0–1 did not run the cell: cell first, queued before it, failed"
    assert lab.pull("ran") == {0: [], 1: []}
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_cell_behind_one_that_fails_on_a_single_rank(lab: Lab, gate: Path) -> None:
    """A rank that had begun the second cell is freed, and named as one that waited."""
    first = lab.run(f"{held(gate)}\n1 / 0", ranks=[1], wait=False, label="first")
    second = lab.run(SUM, wait=False, label="second")
    wait_until(lambda: second.status().ranks[0] == "running", 'second.status().ranks[0] == "running"')
    gate.touch()
    with pytest.raises(CellError, match="rank 1 did not run the cell: cell first") as caught:
        second.wait()
    assert [(each.rank, each.secondary) for each in caught.value.failures.values()] == [(1, False), (0, True)]
    assert "rank 0 waited for rank 1 in all_reduce" in plain(caught.value.report)
    with pytest.raises(CellError):
        first.wait()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


@pytest.mark.parametrize("waiting", ["time.sleep(600)", "dist.barrier() if rank == 0 else time.sleep(600)"])
def test_a_cell_behind_one_that_is_interrupted(lab: Lab, waiting: str) -> None:
    """It is not run and says so; nothing hangs, whatever the first one waited in."""
    first = lab.run(f"import time; print('begun')\n{waiting}", wait=False, label="first")
    second = lab.run(SUM, wait=False, label="second")
    wait_until(lambda: all(first.text(rank) for rank in (0, 1)), "all(first.text(rank) for rank in (0, 1))")
    first.interrupt()
    with pytest.raises(CellError, match="ranks 0–1 were interrupted"):
        first.wait()
    with pytest.raises(CellError, match="did not run the cell: cell first, queued before it, was interrupted"):
        second.wait()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_an_interrupt_ends_no_later_cell(lab: Lab) -> None:
    """The next cell runs to its end, though the interrupt still looks for processes when it begins."""
    lab.run(
        "import psutil, time\n"
        "looked_for = psutil.Process.children\n"
        "def late(self, recursive=False):\n"
        "    time.sleep(0.3)  # as on a machine that is busy\n"
        "    return looked_for(self, recursive)\n"
        "psutil.Process.children = late"
    )
    try:
        run = lab.run("dist.recv(torch.ones(1), 1 - rank)", wait=False)
        wait_until(lambda: lab.doctor().diagnosis.stuck, "lab.doctor().diagnosis.stuck")
        run.interrupt()
        with pytest.raises(CellError, match="ranks 0–1 were interrupted"):
            run.wait()
        assert lab.run("time.sleep(1); rank").values == {0: 0, 1: 1}
    finally:
        lab.run("psutil.Process.children = looked_for")


def test_a_waiting_cell_that_is_interrupted(lab: Lab, gate: Path) -> None:
    """The cell before it ends as if nothing had happened; it itself ends with KeyboardInterrupt when its turn comes."""
    first = lab.run(f"{held(gate)}\n{SUM}", wait=False, label="first")
    second = lab.run("time.sleep(600)", wait=False, label="second")
    second.interrupt()
    gate.touch()
    assert first.wait().values == {0: 2.0, 1: 2.0}
    with pytest.raises(CellError, match="ranks 0–1 were interrupted"):
        second.wait()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_waiting_cell_that_is_given_up(lab: Lab, gate: Path) -> None:
    """It says how it ended, though the cell for which it waited has not ended yet."""
    first = lab.run(held(gate), wait=False, label="first")
    second = lab.run("1", wait=False, label="second")
    second.give_up(dict.fromkeys([0, 1], "was given up"))
    wait_until(lambda: second.done, "second.done")
    assert re.fullmatch(r"✗ lost after \d\.\d s: ranks 0–1 were given up", second.headline)
    assert not first.done
    gate.touch()
    first.wait()


def test_a_time_limit_begins_with_the_cell(lab: Lab, gate: Path) -> None:
    """The time that a cell waits for its turn does not count."""
    first = lab.run(held(gate), wait=False, label="first")
    second = lab.run("time.sleep(600)", wait=False, timeout=0.2, label="second")
    wait_until(lambda: second.status().seconds > 0.5, "second.status().seconds > 0.5")
    assert set(second.status().ranks.values()) == {"queued"}
    gate.touch()
    first.wait()
    with pytest.raises(CellError, match=r"ranks 0–1 did not end within 0\.2 s"):
        second.wait()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_results_by_name(lab: Lab) -> None:
    """The last cell of a name counts, failed ones too; an unknown name is an error that lists the known ones."""
    lab.run("1", label="twice")
    lab.run("2", label="twice")
    with pytest.raises(CellError):
        lab.run("print('so far')\nif rank == 1: 1 / 0", label="broken")
    twice, broken = lab.results["twice"], lab.results["broken"]
    assert twice.values == {0: 2, 1: 2}
    assert (list(broken.failures), broken.text(1)) == ([1], "so far\n")
    assert "✗ rank 1 failed after " in repr(broken)
    assert list(lab.results)[-2:] == ["twice", "broken"]
    with pytest.raises(KeyError, match=r"there are .*twice, broken"):
        lab.results["nobody"]


def test_a_collective_of_all_on_some_ranks(lab: Lab) -> None:
    """It is told soon why the cell can't end, and how it can; interrupted, it leaves a cluster that works."""
    shown: list[str] = []
    code = f"print('begun')\n{SUM}"
    run: CellRun = lab.run(code, ranks=[0], wait=False, board=LineBoard(lambda _, line: shown.append(line)))
    wait_until(lambda: any("no progress" in line for line in shown), 'any("no progress" in line for line in shown)')
    told = next(line for line in shown if "no progress" in line)
    assert "which rank 1 must enter too; the cell was not sent to it" in told
    assert "→ Run the cell on all ranks of the group, or pass `group=` a group of only those that run it" in told
    run.interrupt()
    with pytest.raises(CellError, match="rank 0 was interrupted"):
        run.wait()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
    lab.run("own = dist.new_group([0])")
    assert lab.values("t = torch.ones(1); dist.all_reduce(t, group=own); t.item()", ranks=[0]) == {0: 1.0}


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


def test_ends_of_cells_in_the_background() -> None:
    """A death, a replaced rank, a restart and a stop are told, and a run keeps its methods after all of them; a new
    process is announced only where it is still to come."""
    sleep = "import time; time.sleep(600)"
    with Lab(2) as lab:

        def ends(name: str, end: Callable[[], Any]) -> Headlines:
            shown = Headlines()
            run = lab.run(sleep, wait=False, label=name, view=shown)
            wait_until(
                lambda: lab.timeline.ranks() and all(rank.cell for rank in lab.timeline.ranks()),
                "lab.timeline.ranks() and all(rank.cell for rank in lab.timeline.ranks())",
            )
            assert (run.state, shown.states) == ("running", ["running"])
            end()
            wait_until(lambda: shown.states[-1] != "running", 'shown.states[-1] != "running"')
            assert run.state == shown.states[-1] == run.status().state
            assert lab.results[name] is run
            assert set(run.failures) == {0, 1}
            return shown

        killed = ends("killed", lambda: os.kill(lab.pids()["rank 1"], signal.SIGKILL))
        assert re.fullmatch(r"✗ lost after \d\.\d s: rank 1 was killed by SIGKILL \(signal 9\)", killed.last)
        assert "during cell killed" in killed.report
        assert "starts a new process for it" in killed.report
        assert re.fullmatch(r"■ interrupted after \d\.\d s", ends("interrupted", lab.interrupt).last)
        replaced = ends("replaced", lambda: lab.rejoin(replace=[0, 1]))
        assert re.fullmatch(r"✗ lost after \d\.\d s: ranks 0–1 were terminated to be replaced", replaced.last)
        restarted = ends("restarted", lab.restart)
        assert re.fullmatch(r"✗ lost after \d\.\d s: ranks 0–1 ended when the cluster was restarted", restarted.last)
        assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
        stopped = ends("stopped", lab.stop)
        assert re.fullmatch(r"✗ lost after \d\.\d s: ranks 0–1 ended when the cluster was stopped", stopped.last)
        assert not [one.report for one in (replaced, restarted, stopped) if "starts" in one.report]
        with pytest.raises(CellError, match="ended when the cluster was stopped"):
            lab.results["stopped"].wait()
    assert repr(lab).startswith("<Cluster 'cluster-")
    assert repr(lab).endswith(": stopped>")
    with pytest.raises(ClusterError, match="the cluster is not running: start it"):
        lab.run("1")
