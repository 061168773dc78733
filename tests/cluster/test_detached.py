"""A detached cluster outlives its client, is found again by name, serves one client at a time, ends when idle."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import CellError, ClusterError, machine
from ddp_lab.cluster.cluster import running_clusters
from ddp_lab.dashboard.cluster_panel import ClusterPanel
from ddp_lab.notebook import commands
from ddp_lab.output.board import SilentBoard
from ddp_lab.protocol import registry
from tests import leftovers
from tests.cluster.conftest import Lab
from tests.cluster.hanging import held
from tests.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.usefixtures("entries")
REPLACES_PROCESSES = True

CHECK = "t = torch.ones(1); dist.all_reduce(t); kept, t.item()"
WAIT_FOR_EVER = "import time\nprint('begun', rank)\nwhile True: time.sleep(0.01)"


def client(code: str) -> subprocess.Popen[str]:
    """Another client: a Python process that runs `code` and whose output is read a line at a time."""
    head = "import os, time\nfrom ddp_lab import Cluster, ClusterError\nfrom ddp_lab.output.board import SilentBoard\n"
    return subprocess.Popen(
        [sys.executable, "-u", "-c", head + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def abandoned(entries: Path) -> Iterator[Callable[[], Lab]]:
    """The way to get at two ranks whose first client was killed in the middle of a cell of both."""
    code = f"""
        lab = Cluster(2, detach=True, name='train').start()
        lab.run("kept = 40; model = ddp_lab.DistributedDataParallel(torch.nn.Linear(2, 2))", board=SilentBoard())
        lab.run("for _ in range(3): model(torch.ones(1, 2)).sum().backward()", board=SilentBoard())
        run = lab.run({WAIT_FOR_EVER!r}, wait=False, board=SilentBoard(), label='orphan')
        while any('begun' not in run.text(rank) for rank in (0, 1)): time.sleep(0.01)
        print('begun')
        time.sleep(600)
        """
    with client(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGKILL)
    try:
        yield lambda: Lab.attach("train")  # type: ignore[return-value]
    finally:
        if [one for one in Lab.detached() if one.name == "train"]:
            Lab.attach("train", take_over=True).stop()


def test_found_again_after_the_client_was_killed(abandoned: Callable[[], Lab]) -> None:
    """Its cell still runs, says what it printed and can be interrupted; variables, groups and models are kept."""
    wait_until(lambda: Lab.detached()[0].attached is None, "the end of the first client")
    assert 3500 < (Lab.detached()[0].left_seconds or 0) <= 3600
    with abandoned() as lab:
        _interrupts_the_orphan(lab)
        assert lab.values(CHECK) == {0: (40, 2.0), 1: (40, 2.0)}
        wait_until(
            lambda: lab.timeline.reducers() and lab.timeline.reducers()[0].last_step == 2,
            "events of the first client",
        )
        lab.run("model(torch.ones(1, 2)).sum().backward(); kept = 41")
        assert lab.timeline.reducers()[0].last_step == 3
    assert not lab.running


def _interrupts_the_orphan(lab: Lab) -> None:
    [left] = lab.missed_cells
    assert (left.label, left.ranks, left.running, left.errors) == ("orphan", (0, 1), (0, 1), {})
    assert left.text == {0: "begun 0\n", 1: "begun 1\n"}
    assert str(left).startswith("orphan is still running on ranks 0–1, for ")
    assert {record.state for record in lab.status()} == {"running"}
    with pytest.raises(ClusterError, match=r"rank \d is still running a cell"):
        lab.run("1")
    lab.interrupt()
    wait_until(lambda: not lab.busy_ranks(), "the end of the cell")


def test_what_ended_meanwhile_is_reported(abandoned: Callable[[], Lab], tmp_path: Path) -> None:
    """A cell that fails while nobody is attached is reported with its error; a rank that died is replaced."""
    gate = tmp_path / "gate"
    hold = f"{held(gate)}\nprint('last words')\n1 / rank"
    with abandoned() as lab:
        run = lab.run(hold, wait=False, label="held")
        pid = lab.pids()["rank 1"]
        wait_until(lambda: {record.state for record in lab.status()} == {"running"}, "the cell")
    with pytest.raises(CellError, match="kept running without this process"):
        run.wait()
    gate.touch()
    with abandoned() as lab:
        wait_until(lambda: not lab.missed_cells[0].running, "the end of the cell")
        [left] = lab.missed_cells
        assert (left.label, left.ranks, left.text) == ("held", (0, 1), {0: "last words\n", 1: "last words\n"})
        assert left.errors == {0: "ZeroDivisionError: division by zero"}
    with abandoned() as lab:
        assert lab.missed_cells == ()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: Lab.detached()[0].ranks == (1, 2), "the end of rank 1")
    with abandoned() as lab:
        assert lab.status()[1].state == "lost"
        code = "t = torch.ones(1); dist.all_reduce(t); t.item(), 'kept' in globals()"
        assert lab.values(code) == {0: (2.0, True), 1: (2.0, False)}


def test_nonsense_ends_nobody(abandoned: Callable[[], Lab]) -> None:
    """Lines that are no messages, from whom is attached and from others, are dropped by the keeper."""
    lines = [b"[]", b"7", b"{", b"null", b"[" * 100_000, b"\xff\x00"]
    lines += [b'{"op": []}', b'{"op": "fork"}', b'{"op": "note"}']
    lines += [b'{"op": "fork", "connection": {}, "ranks": [7]}', b'{"op": "signal", "rank": "x"}', b'{"op": "so"}']
    with abandoned() as lab:
        keeper = lab.session.processes.keeper
        assert keeper is not None
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(keeper.run_dir / "keeper"))
            for connection in (stranger, keeper._socket):
                connection.sendall(b"\n".join([*lines, b""]))
            stranger.sendall(b'{"op": "look"}\n')
            assert json.loads(stranger.recv(1 << 16))["event"] == "seen"
        assert lab.values("rank") == {0: 0, 1: 1}
        assert (keeper.run_dir / "keeper.log").read_text().count("\n") <= 3


def test_one_client_at_a_time(abandoned: Callable[[], Lab]) -> None:
    """A second client gets an error that names the first; taking over ends the first one's wait and leaves its cell."""
    second = """
        try:
            Cluster.attach('train')
        except ClusterError as error:
            print(error)
        lab = Cluster.attach('train', take_over=True)
        print([cell.running for cell in lab.missed_cells])
        lab.interrupt()
        lab.detach()
        """
    with abandoned() as lab:
        run = lab.run(WAIT_FOR_EVER, wait=False, label="first")
        wait_until(lambda: all("begun" in run.text(rank) for rank in (0, 1)), "the cell")
        with client(second) as process:
            said, _ = process.communicate(timeout=DEADLINE_S)
        assert f"process {os.getpid()} has been attached to cluster 'train' since " in said
        assert "--take-over" in said
        assert said.splitlines()[-1] == "[(0, 1)]"
        with pytest.raises(CellError, match="taken over by process"):
            run.wait()
        assert not lab.running


def _made_idle(lab: Lab) -> Lab:
    """The cluster, whose ranks run no cell of an earlier client any more."""
    lab.interrupt()
    wait_until(lambda: not lab.busy_ranks(), "the end of the cell")
    return lab


def test_a_client_that_does_not_let_go(abandoned: Callable[[], Lab]) -> None:
    """Whoever would take over from a client that is stopped is told so, and the ranks stay with that client."""
    holder = """
        lab = Cluster.attach('train')
        print('attached')
        time.sleep(600)
        """
    with client(holder) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: machine.stopped(process.pid), "its stop")
        try:
            with pytest.raises(
                ClusterError, match=rf"taken over: process {process.pid} did not disconnect; stop that process"
            ):
                Lab.attach("train", take_over=True)
            [seen] = [one for one in Lab.detached() if one.name == "train"]
            assert seen.attached == process.pid
        finally:
            os.kill(process.pid, signal.SIGKILL)
    with abandoned() as lab:
        assert _made_idle(lab).sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_name_that_is_taken(abandoned: Callable[[], Lab]) -> None:
    """A second cluster of that name is refused with the way to the first one, and leaves no process."""
    before = set(leftovers.processes())
    with pytest.raises(
        ClusterError, match=r"a detached cluster 'train' is already running: use `%cluster attach train`"
    ):
        Lab(1, detach=True, name="train", backend="gloo").start()
    wait_until(lambda: set(leftovers.processes()) <= before, "the end of the second keeper")


def test_magics_of_a_detached_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`%cluster start --detach`, `list`, `detach`, `attach` and `stop` say what became of it and how it is found."""

    def said() -> str:
        return "".join(capsys.readouterr())

    later = "`%cluster attach mine` re-attaches, for 60 s after the last client disconnects"
    asked: dict[str, Any] = {"n": 1, "name": "mine", "backend": "gloo", "detach": True, "idle_timeout": 60}
    lab = commands.start(**asked)
    try:
        assert f"it outlives this notebook: {later}" in said()
        assert commands.start(**asked) is lab
        assert "a cluster with rank 0 is already running" in said()
        commands.list_clusters()
        assert re.search(r"→ +mine +rank 0, cpu, idle +this notebook +60 s", said())
        gate = tmp_path / "gate"
        lab.run(held(gate), wait=False, label="long", board=SilentBoard())
        wait_until(lambda: lab.status()[0].state == "running", "the cell")
        commands.on_current("leave", commands.detach)
        assert f"detached from mine: {later}" in said()
        commands.list_clusters()
        assert re.search(r"mine +1 of 1 ranks +nobody +\d+ s left", said())
        lab = commands.start(**asked)
        told = said()
        assert "attached to mine: rank 0 · cpu · gloo in " in told
        assert "long is still running on rank 0, for " in told
        assert "the next cell must wait until it ends, or interrupt it first" in told
        gate.touch()
        commands.stop_quietly()
        assert [one.attached for one in Lab.detached() if one.name == "mine"] == [None], "it is left, not ended"
        lab = commands.attach("mine")
        said()
        commands.on_current("stop", commands.stop)
        assert said() == "cluster stopped\n"
    finally:
        lab.stop()
        for one in Lab.detached():
            if one.name == "mine":
                Lab.attach("mine", take_over=True).stop()


def test_an_idle_timeout_does_not_count_before_the_first_client(tmp_path: Path) -> None:
    """One that is shorter than a start ends the cluster when its client leaves, not before it comes."""
    before = set(leftovers.processes())
    with Lab(1, detach=True, idle_timeout=0.001, backend="gloo") as lab:
        assert lab.values("rank") == {0: 0}
        lab.detach()
    wait_until(lambda: set(leftovers.processes()) <= before, "the end of the idle timeout")


def test_the_idle_timeout_ends_it(tmp_path: Path, abandoned: Callable[[], Lab]) -> None:
    """When nobody comes, every process and every file goes. Who attaches meanwhile may use another cluster, too; a
    panel says to the client who uses it, and then that it has ended."""
    before = set(leftovers.processes())
    lab = Lab(1, detach=True, idle_timeout=3, backend="gloo").start()  # long enough to attach again on a busy machine
    assert lab.name == "lab-1"
    panel = ClusterPanel(lab)
    lab.run(f"import os, atexit, pathlib; atexit.register(pathlib.Path({str(tmp_path / 'end')!r}).touch)")
    with abandoned() as other:
        lab.detach()
        again = commands.attach("lab-1")
        assert [one.name for one in running_clusters()] == ["lab-1", "train"]
        panel.refresh()
        says = "This notebook was attached to the cluster lab-1 again. Show it with `ddp_lab.current_cluster()`."
        assert panel.about["why"] == says
        assert commands.attach("train") is other
    panel.refresh()
    assert "again" in panel.about["why"]
    again.detach()
    panel.refresh()
    assert panel.about["why"] == "This notebook no longer uses the cluster lab-1 (re-attach: %cluster attach lab-1)."
    wait_until(lambda: set(leftovers.processes()) <= before, "the end of the idle timeout")
    panel.refresh()
    assert panel.about["why"].startswith("The cluster was stopped. ")
    panel.close()
    panel.layout.close()
    assert (tmp_path / "end").exists()
    assert "lab-1" not in [one.name for one in Lab.detached()]
    with pytest.raises(ClusterError, match="no detached cluster is named 'lab-1': "):
        Lab.attach("lab-1")


def test_entries_are_this_users_alone(entries: Path) -> None:
    """Folder and files are closed to others; entries of another process with the same number, or with open files, do
    not count; a folder that is open to others is refused."""
    keeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        entry = registry.add(entries, "mine", "/nowhere")
        path = entries / "mine.json"
        assert (stat.S_IMODE(entries.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)
        assert "secret" not in path.read_text()
        assert entry in registry.entries(entries)
        with pytest.raises(FileExistsError):
            registry.add(entries, "mine", "/elsewhere")
        path.chmod(0o644)
        assert entry not in registry.entries(entries)
        path.chmod(0o600)
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, "pid": keeper.pid}))  # began at another time
        assert "mine" not in [one.name for one in registry.entries(entries)]
        assert not path.exists()
        entries.chmod(0o755)
        with pytest.raises(PermissionError, match="not a private folder of this user"):
            registry.folder()
    finally:
        entries.chmod(0o700)
        keeper.communicate(b"\n")


def test_a_start_that_fails(tmp_path: Path) -> None:
    """Whoever starts a detached cluster with a torch that does not load is told so, and nothing is left of it."""
    before = set(leftovers.processes())
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    with pytest.raises(ClusterError, match="this torch is broken"):
        Lab(1, detach=True, name="broken", env={"PYTHONPATH": str(tmp_path)}).start()
    wait_until(lambda: set(leftovers.processes()) <= before, "the end of all")
    assert "broken" not in [one.name for one in Lab.detached()]


def test_a_home_that_can_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the list of detached clusters can't be made, the error names the variable that helps."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", "/proc/none")
    with pytest.raises(ClusterError, match=r"can't be created .*: set JUPYTER_RUNTIME_DIR"), Lab(2, detach=True):
        pass
    with pytest.raises(ClusterError, match="set JUPYTER_RUNTIME_DIR"):
        Lab.detached()


def test_arguments_that_make_no_sense() -> None:
    """A name that is none and an idle timeout that is none are refused."""
    with pytest.raises(ValueError, match="letters, digits"):
        Lab(2, detach=True, name="../x")
    with pytest.raises(ValueError, match="idle_timeout=0"):
        Lab(2, detach=True, idle_timeout=0)
