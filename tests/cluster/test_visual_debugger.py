"""JupyterLab's debugger on ranks, without the browser: its requests over a real kernel's control channel."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.front_end import FrontEnd
from tests.cluster.pages import Notebook, notebook_with_cluster
from tests.waiting import wait_until

REPLACES_PROCESSES = True  # ipykernel's debugger has a process that ends with the kernel

CELL = """%%distributed
x = torch.full((2,), 10.0 * rank)
def doubled(value):
    twice = value * 2
    return twice
y = doubled(x)
dist.all_reduce(y)
print("sum", y.tolist())"""


BACKGROUND = """%%distributed --no-wait --name stopped
y = torch.ones(1) * rank
dist.all_reduce(y)"""


FACTS = """%%distributed
import psutil
from ddp_lab.parallel.core.process_groups import timeout_of
listening = [one.laddr.port for one in psutil.Process().net_connections() if one.status == "LISTEN"]
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
print("held", timeout_of(backend).total_seconds() > 86_400, "ports", sorted(listening))"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """A kernel with a cluster of two ranks."""
    with notebook_with_cluster() as (kernel, _):
        yield kernel


@pytest.fixture
def front(notebook: Notebook) -> Iterator[FrontEnd]:
    """A front end whose debugger is on, pointed at rank 1."""
    front = FrontEnd(notebook.manager)
    try:
        shown = notebook.run("%cluster debug 1")
        assert shown.text.startswith("the debugger is at rank 1"), (shown.text, shown.error)
        front.turn_on()
        yield front
        front.turn_off()
        assert "the notebook's own cells" in notebook.run("%cluster debug off").text
    finally:
        front.close()


def _stopped(notebook: Notebook, front: FrontEnd, code: str, line: int) -> tuple[str, int, dict[str, Any]]:
    """Runs a cell that stops at a breakpoint in this line: its request, the thread and the innermost frame."""
    front.break_at(code, line)
    cell = notebook.begin(code)
    thread, frames = front.stopped()
    return cell, thread, frames[0]


def _stops(notebook: Notebook, front: FrontEnd, code: str, line: int) -> dict[str, Any]:
    """Runs a cell that stops in this line and continues to its end; returns the innermost frame."""
    cell = notebook.begin(code)
    thread, frames = front.stopped()
    assert frames[0]["line"] == line
    front.body("continue", threadId=thread)
    assert notebook.finish(cell).status == "ok"
    return frames[0]


def test_a_rank_stops_is_inspected_and_stepped(notebook: Notebook, front: FrontEnd) -> None:
    """Rank 1 stops at the notebook's line, shows its own values, steps in, over and out, while rank 0 waits for it."""
    path = front.break_at(CELL, 6)
    cell = notebook.begin(CELL)
    thread, frames = front.stopped()
    assert (frames[0]["source"]["path"], frames[0]["line"], frames[0]["name"]) == (path, 6, "<module>")
    values = front.variables(frames[0])
    assert (values["x"], values["rank"]) == ("tensor([10., 10.])", "1")
    assert front.evaluate("x.sum().item()", frames[0]) == "20.0"
    front.body("stepIn", threadId=thread)
    thread, frames = front.stopped()
    assert [(one["name"], one["line"]) for one in frames[:2]] == [("doubled", 4), ("<module>", 6)]
    front.body("next", threadId=thread)
    thread, frames = front.stopped()
    assert (frames[0]["line"], front.variables(frames[0])["twice"]) == (5, "tensor([20., 20.])")
    front.body("stepOut", threadId=thread)
    thread, frames = front.stopped()
    assert (frames[0]["name"], frames[0]["line"]) == ("<module>", 6)
    front.body("next", threadId=thread)  # from one statement of the cell to the next
    thread, frames = front.stopped()
    assert [(one["name"], one["line"]) for one in frames] == [("<module>", 7)]
    front.body("continue", threadId=thread)
    shown = notebook.finish(cell)
    assert "sum [20.0, 20.0]" in shown.text, (shown.text, shown.error)


def test_variables_are_the_ranks_between_cells(notebook: Notebook, front: FrontEnd) -> None:
    """What the variables panel shows while nothing is stopped are the rank's globals."""
    notebook.run("%%distributed\nown = rank + 100")
    found = {one["name"]: one["value"] for one in front.body("inspectVariables")["variables"]}
    assert found["own"] == "101"
    rich = front.body("richInspectVariables", variableName="own")
    assert rich["data"]["text/plain"] == "101"


def test_no_port_and_no_timeout(notebook: Notebook, front: FrontEnd) -> None:
    """While the debugger is on, no rank listens on another port, and no group's timeout expires within a day."""
    on = notebook.run(FACTS).text
    front.turn_off()
    notebook.run("%cluster debug off")
    off = notebook.run(FACTS).text
    assert on.replace("held True", "held False") == off
    assert "held True" in on
    notebook.run("%cluster debug 1")


def test_several_breakpoints_and_switching(notebook: Notebook, front: FrontEnd) -> None:
    """Breakpoints set for one rank are the next one's too; each stop names its rank."""
    front.break_at(CELL, 2, 8)
    for rank in (0, 1):
        notebook.run(f"%cluster debug {rank}")
        cell = notebook.begin(CELL)
        for line in (2, 8):
            thread, frames = front.stopped()
            assert frames[0]["line"] == line
            assert front.evaluate("rank", frames[0]) == str(rank)
            front.body("continue", threadId=thread)
        assert notebook.finish(cell).status == "ok"


def test_turned_off_while_stopped(notebook: Notebook, front: FrontEnd) -> None:
    """Turning the debugger off lets the cell end on all ranks; the next cell stops nowhere."""
    cell, _, _ = _stopped(notebook, front, CELL, 6)
    front.turn_off()
    front.event("continued")
    assert "sum [20.0, 20.0]" in notebook.finish(cell).text
    assert notebook.run(CELL).status == "ok"
    assert notebook.run("%%distributed\nimport sys\nprint(sys.gettrace())").text.strip().endswith("None")


def test_an_interrupt_ends_a_stopped_cell(notebook: Notebook, front: FrontEnd) -> None:
    """The interrupt button ends the cell on all ranks; the debugger stays on and stops the next cell."""
    cell, _, _ = _stopped(notebook, front, CELL, 6)
    notebook.manager.interrupt_kernel()
    shown = notebook.finish(cell)
    assert shown.error[0] == "KeyboardInterrupt", (shown.text, shown.error)
    front.event("continued")
    _stops(notebook, front, CELL, 6)


def test_the_doctor_says_who_is_stopped(notebook: Notebook, front: FrontEnd) -> None:
    """The doctor names the rank and its line; a rank that waits for it raises no alarm, and its timeouts are held."""
    _, thread, _ = _stopped(notebook, front, BACKGROUND, 2)
    assert notebook.run("print(lab.doctor())").text.startswith("rank 1 is stopped in the debugger at stopped [")
    waits = lambda: "line 2. rank 0 waits in all_reduce" in notebook.run("print(lab.doctor())").text  # noqa: E731
    wait_until(waits, "rank 0 waits")
    front.body("continue", threadId=thread)
    shown = notebook.run("print(lab.results['stopped'].wait(), lab.last_result)")
    assert "no progress" not in shown.text, shown.text
    assert not shown.error[0], shown.error


def test_a_rank_that_fails_while_stopped(notebook: Notebook, front: FrontEnd) -> None:
    """A stopped rank whose process ends: the cell fails, nothing is stopped, and its new process is debugged again."""
    cell, _, frame = _stopped(notebook, front, CELL, 6)
    os.kill(int(front.evaluate("__import__('os').getpid()", frame)), signal.SIGKILL)
    front.event("continued")
    shown = notebook.finish(cell)
    assert "rank 1" in shown.error[1], (shown.text, shown.error)
    assert notebook.run("%cluster rejoin").status == "ok"
    wait_until(lambda: front.ask("debugInfo")["body"]["isStarted"], "the new process is debugged")
    _stops(notebook, front, CELL, 6)


def test_plain_cells_are_debugged_as_before(notebook: Notebook) -> None:
    """While no rank is chosen, the debugger is the notebook's own."""
    front = FrontEnd(notebook.manager)
    try:
        front.turn_on()
        path = front.break_at("a = 1\nb = a + 1", 2)
        assert _stops(notebook, front, "a = 1\nb = a + 1", 2)["source"]["path"] == path
        front.turn_off()
    finally:
        front.close()


def test_what_is_not_there(notebook: Notebook) -> None:
    """A rank that does not exist, or a word that is none, is refused in one sentence."""
    assert "there is no rank 7: the cluster has ranks 0–1" in notebook.run("%cluster debug 7").error[1]
    assert "'x' is not a rank" in notebook.run("%cluster debug x").text


def test_a_cluster_is_stopped_and_started_under_the_debugger(notebook: Notebook, front: FrontEnd) -> None:
    """`%cluster stop` while a rank is stopped in a background cell ends all, and the debugger is the notebook's. Turned
    on there, it can be pointed at a rank of a cluster that is started meanwhile, and back."""
    _stopped(notebook, front, BACKGROUND, 2)
    assert notebook.run("%cluster stop").status == "ok"
    front.event("continued")
    front.turn_off()
    front.turn_on()
    plain = "c = 1\nd = c + 1"
    assert notebook.run("%cluster start -n 2").status == "ok"
    assert "the notebook's own cells" in notebook.run("%cluster debug").text
    front.break_at(plain, 2)
    front.body("dumpCell", code=CELL)
    assert notebook.run("%cluster debug 1").status == "ok"
    front.break_at(CELL, 6)
    _stops(notebook, front, CELL, 6)
    assert notebook.run("%cluster debug off").status == "ok"
    wait_until(lambda: front.ask("debugInfo")["body"]["breakpoints"], "the notebook is debugged again")
    _stops(notebook, front, plain, 2)
    notebook.run("%cluster debug 1")


@pytest.mark.soak
def test_a_kernel_that_is_lost(notebook: Notebook) -> None:
    """The kernel of a detached cluster is killed while a rank is stopped: the rank continues, and its cell ends."""
    first, name = Notebook(), f"debugged-{os.getpid()}-{time.time_ns()}"
    try:
        first.run("%load_ext ddp_lab")
        kernel = int(first.run("import os; os.getpid()").text)
        assert first.run(f"%cluster start -n 1 --backend gloo --detach --name {name}").status == "ok"
        first.run("%cluster debug 0")
        front = FrontEnd(first.manager)
        front.turn_on()
        _stopped(first, front, BACKGROUND, 2)
        front.close()
        os.kill(kernel, signal.SIGKILL)
    finally:
        first.close()
    try:
        assert notebook.run(f"%cluster attach {name}").status == "ok"
        wait_until(lambda: "0.0" in notebook.run("%%distributed\ny.item()").text, "the end of the stopped cell")
        assert "rank 0" in notebook.run("%cluster debug 0").text
    finally:
        notebook.run("%cluster stop")
