"""Cells in a row: what they offer while they run, what becomes of those behind them, and of broken connections."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from ddp_lab import CellError, ClusterError
from ddp_lab.cluster.cells.run import CellRun
from ddp_lab.output.board import LineBoard
from ddp_lab.output.terminal import plain
from tests.cluster.conftest import Lab
from tests.cluster.hanging import held
from tests.waiting import wait_until

SUM = "t = torch.ones(1); dist.all_reduce(t); t.item()"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file for which cells wait: `gate.touch()` lets them go on."""
    return tmp_path / "gate"


def test_a_running_cell_can_be_asked(lab: Lab, gate: Path) -> None:
    """Status, outputs so far and repr are there while it runs, the result once it is done."""
    run = lab.run(f"print('begun', rank)\n{held(gate)}\nrank", wait=False, label="asked")
    wait_until(lambda: all(run.text(rank) == f"begun {rank}\n" for rank in (0, 1)), "the outputs so far")
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
    wait_until(lambda: second.status().ranks[0] == "running", "the second cell")
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
    wait_until(lambda: all(first.text(rank) for rank in (0, 1)), "the first cell")
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
        wait_until(lambda: lab.doctor().diagnosis.stuck, "a diagnosis")
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
    wait_until(lambda: second.done, "its end")
    assert re.fullmatch(r"✗ lost after \d\.\d s: ranks 0–1 were given up", second.headline)
    assert not first.done
    gate.touch()
    first.wait()


def test_a_time_limit_begins_with_the_cell(lab: Lab, gate: Path) -> None:
    """The time that a cell waits for its turn does not count."""
    first = lab.run(held(gate), wait=False, label="first")
    second = lab.run("time.sleep(600)", wait=False, timeout=0.2, label="second")
    wait_until(lambda: second.status().seconds > 0.5, "more than the time limit")
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
    wait_until(lambda: any("no progress" in line for line in shown), "the word")
    told = next(line for line in shown if "no progress" in line)
    assert "which rank 1 must enter too; the cell was not sent to it" in told
    assert "→ Run the cell on all ranks of the group, or pass `group=` a group of only those that run it" in told
    run.interrupt()
    with pytest.raises(CellError, match="rank 0 was interrupted"):
        run.wait()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
    lab.run("own = dist.new_group([0])")
    assert lab.values("t = torch.ones(1); dist.all_reduce(t, group=own); t.item()", ranks=[0]) == {0: 1.0}


# Breaks the rank's connections to the client, as a network does.
_BREAK = """
import os, socket
broken = 0
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        connection = socket.socket(fileno=os.dup(number))
    except OSError:  # no socket, or the folder's own descriptor
        continue
    with connection:
        peer = str(connection.getpeername()) if connection.family == socket.AF_UNIX else ""
        if peer.endswith(("/wire/data", "/wire/control")):
            connection.shutdown(socket.SHUT_RDWR)
            broken += 1
"""


@pytest.fixture(scope="module")
def view(lab: Lab) -> Any:
    """The same ranks for ipyparallel."""
    return lab.client[:]


def test_cells_and_requests_take_turns(lab: Lab, view: Any, gate: Path) -> None:
    """A cell that is sent while one of ipyparallel runs, or awaits, begins when that has ended; and the other way
    round."""
    view.execute("import asyncio\nawait asyncio.sleep(0)", block=True)
    lab.run("order = []\nimport os, time")
    begun = [gate.with_name(f"begun {rank}") for rank in (0, 1)]
    waits = view.execute(
        f"open({str(gate.parent)!r} + f'/begun {{rank}}', 'w').close()\n"
        "for _ in range(20): await asyncio.sleep(0.02)\norder.append('px')",
        block=False,
    )
    wait_until(lambda: all(path.exists() for path in begun), "ipyparallel's cell")
    lab.run("order.append('cell')")
    waits.get()
    run = lab.run(f"{held(gate)}\norder.append('second')", wait=False)
    wait_until(lambda: {one.state for one in lab.status()} == {"running"}, "the second cell")
    last = view.execute("order.append('last')", block=False)
    gate.touch()
    run.wait()
    last.get()
    assert lab.values("order") == {rank: ["px", "cell", "second", "last"] for rank in (0, 1)}


def test_everything_printed_arrives_before_the_end(lab: Lab) -> None:
    """Text of the cell, of a shell command, of a thread, and of a forked process that is waited for."""
    result = lab.run(
        "import multiprocessing, threading\n"
        "print('cell')\n"
        "!echo shell\n"
        "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()\n"
        "fork = multiprocessing.get_context('fork').Process(target=print, args=('fork', rank))\n"
        "fork.start(); fork.join()"
    )
    for rank in (0, 1):
        assert result.text(rank).split("\n") == ["cell", "shell", "thread", f"fork {rank}", ""]


def test_context_variables_stay(lab: Lab) -> None:
    """A context variable that one cell sets has its value in the next, as in a notebook."""
    lab.run("import contextvars; held = contextvars.ContextVar('held')")
    lab.run("_ = held.set(rank + 1)")
    assert lab.values("held.get()") == {0: 1, 1: 2}


def test_a_request_that_fails_around_the_cell(lab: Lab) -> None:
    """An error in the code around a cell, e.g. no memory for its report, ends the cell with that error."""
    code = (
        "from ddp_lab.engine.cells import cell as module\nreport = module._report\n"
        "def fails(*args, **kwargs):\n    module._report = report\n    raise MemoryError('none left')\n"
        "module._report = fails"
    )
    with pytest.raises(CellError) as caught:
        lab.run(code)
    assert {(one.name, one.message) for one in caught.value.failures.values()} == {("MemoryError", "none left")}
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_large_values_come_in_pieces(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and arguments of more than one frame, where no memory is shared."""
    monkeypatch.setenv("DDP_LAB_SHARED_MEMORY", "0")
    values = numpy.arange(5_000_000.0)  # 40 MB
    lab.push({"values": values})
    assert numpy.array_equal(lab.pull("values", ranks=[1])[1], values)
    lab.run("del values")


def test_a_broken_connection_loses_no_cell(lab: Lab) -> None:
    """Connections that break while a cell runs, and between cells, are made again: each cell ends with its value."""
    for number in range(3):
        assert lab.values(_BREAK + f"rank + {number}") == {0: number, 1: number + 1}
        assert lab.values(_BREAK + "broken") == {0: 2, 1: 2}
        assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_cell_that_was_lost_is_sent_again(lab: Lab, view: Any) -> None:
    """A cell that is lost with a connection is sent again, and runs once."""
    lab.run(
        "count = 0\nfrom ddp_lab.engine.rank import _rank\nfrom ddp_lab.protocol.messages import Cell\n"
        "delivery = _rank.telemetry._handlers[Cell]"
    )
    drop = (
        "lost = False\ndef lose_one(message):\n    global lost\n    lost = True\n"
        "    _rank.telemetry._handlers[Cell] = delivery\n"
        "if rank == 1: _rank.telemetry._handlers[Cell] = lose_one"
    )
    lab.run(drop)
    run = lab.run("count += 1; count", wait=False)
    wait_until(lambda: view.client[1].pull("lost", block=True), "the loss")
    assert not run.done
    view.client[1].execute(_BREAK, block=True)
    assert run.wait().values == {0: 1, 1: 1}
