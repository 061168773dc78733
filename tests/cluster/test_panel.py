"""The cluster's panel on real ranks, without a browser: what it shows, what its buttons do, what it leaves."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

from ddp_lab.dashboard.cluster_panel import ClusterPanel
from ddp_lab.engine.gpu import Gpu
from tests.cluster.conftest import Lab
from tests.waiting import wait_until

_numbers = itertools.count()
WAITS = "import time\nwhile True: time.sleep(0.01)"


@contextmanager
def shown(lab: Lab) -> Iterator[ClusterPanel]:
    """The panel of a cluster, which one page shows."""
    made = lab.panel()
    assert lab.panel() is made
    made.refresh()
    ask(made, type="look", id="page", seen=True)
    try:
        yield made
    finally:
        made.close()
        if made.layout is not None:
            made.layout.close()


@pytest.fixture
def panel(lab: Lab) -> Iterator[ClusterPanel]:
    """The panel of two idle ranks."""
    with shown(lab) as made:
        yield made


def ask(panel: ClusterPanel, **message: Any) -> None:
    """Sends what the browser would."""
    panel._receive(panel, message, [])


def press(panel: ClusterPanel, do: str, **more: Any) -> dict[str, Any]:
    """Presses a button; returns what the panel says once the kernel has taken it and done it."""
    number = str(next(_numbers))
    ask(panel, type="cluster", id=number, do=do, **more)
    wait_until(lambda: number in panel.control.get("heard", ()) and not panel.control["doing"], number)
    return dict(panel.control)


def states(panel: ClusterPanel) -> list[str]:
    """The state of each rank as it is shown."""
    return [row["state"] for row in panel.ranks]


def test_a_cell_is_shown_and_interrupted(lab: Lab, panel: ClusterPanel) -> None:
    """The panel names the cell that ranks run; what needs idle ranks is refused with the remedy; its button ends it."""
    run = lab.run(WAITS, wait=False, label="my cell")
    wait_until(lambda: [row["words"] for row in panel.ranks] == ["runs my cell"] * 2, "the cell's name")
    wait_until(lambda: all(row["cpu"] is not None for row in panel.ranks), "processor shares")
    assert all(0 <= row["silent"] < 5 and row["memory"] > 1 << 20 and row["seconds"] >= 0 for row in panel.ranks)
    assert panel.about["busy"] == [0, 1]
    assert "Ranks 0–1 are running a cell. Interrupt it" in press(panel, "rejoin")["error"]
    assert "The cell on ranks 0–1 is stopped." in press(panel, "restart")["confirm"]
    assert press(panel, "cancel")["confirm"] == ""
    assert (
        press(panel, "interrupt", ranks=[1])["said"]
        == "Interrupt sent to rank 1; ranks that wait for it are unblocked."
    )
    wait_until(lambda: panel.about["busy"] == [0], "the end of rank 1's cell")
    assert "Rank 1 is not running a cell" in press(panel, "interrupt", ranks=[1])["said"]
    assert press(panel, "interrupt", ranks=None)["said"] == "Interrupt sent to rank 0."
    with pytest.raises(Exception, match="interrupted"):
        run.wait()
    rejoined = press(panel, "rejoin")
    assert "variables kept" in rejoined["said"], rejoined
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_process_that_is_paused(lab: Lab, panel: ClusterPanel) -> None:
    """A rank under SIGSTOP is told from one that is busy, grows silent, and keeps a rejoin from waiting for it."""
    pid = lab.pids()["rank 1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: states(panel) == ["idle", "stopped"], "the stop")
        wait_until(lambda: panel.ranks[1]["silent"] > 1.0, "silence")
        assert "Rank 1 can't rejoin: no response" in press(panel, "rejoin")["error"]
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: states(panel) == ["idle", "idle"] and panel.ranks[1]["silent"] < 1.0, "an answer")


def test_start_restart_and_stop() -> None:
    """A cluster that does not run has a panel that says so, without a thread; one that starts again is shown again. A
    killed rank shows its signal, also while its peer's cell goes on; a confirmed restart gives new processes."""
    lab = Lab(2)
    with shown(lab) as panel, ExitStack() as finally_:
        finally_.callback(lab.stop)
        assert "The cluster is not running" in str(panel)
        lab.start()
        ask(panel, type="look", id="page", seen=True)
        wait_until(lambda: states(panel) == ["idle", "idle"], "ranks")
        run = lab.run(WAITS, ranks=[0], wait=False)
        before = lab.pids()
        os.kill(before["rank 1"], signal.SIGKILL)
        wait_until(lambda: panel.ranks[1]["words"] == "killed by SIGKILL (signal 9)", "the death")
        said = press(panel, "restart", sure=True)
        assert "variables are lost" in said["said"], said
        wait_until(lambda: states(panel) == ["idle", "idle"], "new ranks")
        assert not set(before.values()) & {lab.pids()["rank 0"], lab.pids()["rank 1"]}
        with pytest.raises(Exception, match="rank 0 ended when the cluster was restarted"):
            run.wait()
        assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
        lab.stop()
        wait_until(lambda: not panel._refresher.running, "the end of the thread")
        assert (panel.ranks, panel.about["running"]) == ([], False)
        assert press(panel, "interrupt", ranks=None)["error"] == "The cluster is not running."


def test_its_thread_lives_as_long_as_it_is_seen(lab: Lab, panel: ClusterPanel) -> None:
    """No page, no thread and no questions; a page that comes back gets news again."""
    ask(panel, type="look", id="other", seen=True)
    ask(panel, type="look", id="page", seen=False)
    at = panel.about["at"]
    wait_until(lambda: panel.about["at"] > at, "news for the other page")
    ask(panel, type="look", id="other", seen=False)
    wait_until(lambda: not panel._refresher.running, "the end of the thread")
    at = panel.about["at"]
    ask(panel, type="look", id="page", seen=True)
    wait_until(lambda: panel.about["at"] > at, "news")


def test_a_cluster_displays_itself(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a notebook the last expression of a cell shows a table of the ranks."""
    DisplayFormatter().format(lab)
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["rank", "state", "device"]
    assert set(rule) == {"─", " "}
    assert [line.split()[:3] for line in rows] == [["0", "idle", "cpu"], ["1", "idle", "cpu"]]


def test_a_gpu_that_is_not_there() -> None:
    """A GPU that the driver does not know, or a machine without driver, has no figures."""
    assert Gpu("GPU-00000000-0000-0000-0000-000000000000").read() is None
