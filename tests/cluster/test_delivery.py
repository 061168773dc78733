"""The way of cells to the ranks and back: in turn with ipyparallel's requests, in order, over broken connections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from ddp_lab import CellError
from tests.cluster.conftest import Lab
from tests.waiting import wait_until

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


def test_cells_and_requests_take_turns(lab: Lab, view: Any, tmp_path: Path) -> None:
    """A cell that is sent while one of ipyparallel runs, or awaits, begins when that has ended; and the other way
    round."""
    view.execute("import asyncio\nawait asyncio.sleep(0)", block=True)
    lab.run("order = []\nimport os, time")
    begun = [tmp_path / f"begun {rank}" for rank in (0, 1)]
    waits = view.execute(
        f"open({str(tmp_path)!r} + f'/begun {{rank}}', 'w').close()\n"
        "for _ in range(20): await asyncio.sleep(0.02)\norder.append('px')",
        block=False,
    )
    wait_until(lambda: all(path.exists() for path in begun), "ipyparallel's cell")
    lab.run("order.append('cell')")
    waits.get()
    gate = tmp_path / "gate"
    run = lab.run(f"while not os.path.exists({str(gate)!r}): time.sleep(0.005)\norder.append('second')", wait=False)
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


def test_large_values_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and arguments of more than one frame, where no memory is shared."""
    monkeypatch.setenv("DDP_LAB_SHARED_MEMORY", "0")
    values = numpy.arange(10_000_000.0)  # 80 MB
    with Lab(2) as lab:
        lab.push({"values": values})
        assert numpy.array_equal(lab.pull("values", ranks=[1])[1], values)


def test_a_broken_connection_loses_no_cell(lab: Lab) -> None:
    """Connections that break while a cell runs, and between cells, are made again: each cell ends with its value."""
    for number in range(3):
        assert lab.values(_BREAK + f"rank + {number}") == {0: number, 1: number + 1}
        assert lab.values(_BREAK + "broken") == {0: 2, 1: 2}
        assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_cell_that_was_lost_is_sent_again(lab: Lab, view: Any) -> None:
    """A cell that is lost with a connection is sent again, and runs once."""
    lab.run("count = 0\nfrom ddp_lab.engine.rank import _rank\ndelivery = _rank.telemetry._handlers['cell']")
    drop = (
        "lost = False\ndef lose_one(message):\n    global lost\n    lost = True\n"
        "    _rank.telemetry._handlers['cell'] = delivery\n"
        "if rank == 1: _rank.telemetry._handlers['cell'] = lose_one"
    )
    lab.run(drop)
    run = lab.run("count += 1; count", wait=False)
    wait_until(lambda: view.client[1].pull("lost", block=True), "the loss")
    assert not run.done
    view.client[1].execute(_BREAK, block=True)
    assert run.wait().values == {0: 1, 1: 1}
