"""The process from which this client's clusters are forked: who shares it, when it ends, what its end means."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_lab import CellError, ClusterError, lesson_files
from ddp_lab.cluster.processes import zygote
from ddp_lab.machine import visible_gpus
from tests import leftovers
from tests.cluster.conftest import Lab
from tests.cluster.pages import Notebook
from tests.waiting import wait_until


@pytest.fixture
def fresh() -> Iterator[None]:
    """A zygote that other tests neither have used nor will use."""
    zygote.end()
    yield
    zygote.end()


def _ends(pid: int | None) -> None:
    assert pid is not None
    wait_until(lambda: not leftovers.alive(pid), "the end of the zygote")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_clusters_share_one(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`%load_ext` starts it; clusters of any size are forked from it, with the variables of now. If it is killed, so
    are their ranks, which say why; `restart` has another one. That ends after a while without clusters; the next
    cluster has another one."""
    monkeypatch.delenv("DDP_LAB_EARLY")
    zygote.begin()
    begun = zygote.pid()
    zygote.begin()
    monkeypatch.setenv("LINES", "77")
    with Lab(1) as one, Lab(2) as two:
        for lab in (one, two):
            assert _parent(lab.pids()["fork server"]) == begun == zygote.pid()
            assert set(lab.values("import os; os.environ['LINES']").values()) == {"77"}
            assert lab.sum_of_ones() == dict.fromkeys(range(lab.world_size), float(lab.world_size))
        assert _parent(two.pids()["controller"]) == begun
        assert begun is not None
        os.kill(begun, signal.SIGKILL)
        with pytest.raises(CellError, match=r"the zygote of the fork server was killed by SIGKILL \(signal 9\)"):
            two.run("import time; time.sleep(600)")
        monkeypatch.setattr(zygote, "_UNUSED_SECONDS", 0.1)
        two.restart()
        two.use()
        unused = zygote.pid()
        assert unused != begun
        assert two.sum_of_ones() == {0: 2.0, 1: 2.0}
        assert two.values("import time; time.sleep(0.3)") == {0: None, 1: None}
    _ends(unused)
    with Lab(1) as lab:
        assert lab.values("1") == {0: 1}


@pytest.mark.soak
def test_another_takes_its_place(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is not asked for a while, it imports what the first optimizer of each rank would: not beside a GPU.

    A cluster with other variables gets another zygote, and so does one that is started after a package was replaced;
    the former ends with the last cluster that came from it.
    """
    loaded = "import sys; 'torch._dynamo' in sys.modules"
    with Lab(1) as lab:
        assert lab.values(loaded) == {0: False}, "a cluster that is wanted at once does not wait for it"

        def prepared() -> bool:
            lab.run("import time; time.sleep(1.5)")
            with Lab(1) as later:
                return bool(later.values(loaded)[0])

        if not visible_gpus(os.environ):
            wait_until(prepared, "its imports")
        former = zygote.pid()
        with Lab(1, env={"SOME": "thing"}) as other:
            assert other.values("import os; os.environ['SOME']") == {0: "thing"}
            second = zygote.pid()
            assert _parent(other.pids()["fork server"]) == second != former
            monkeypatch.setattr("importlib.metadata.version", lambda package: "0")
            with Lab(1, env={"SOME": "thing"}) as later:
                assert _parent(later.pids()["fork server"]) == zygote.pid()
                assert zygote.pid() not in (former, second)
        assert lab.values("import os; os.environ.get('SOME')") == {0: None}
    _ends(former)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)])
def test_one_that_does_not_fork(fresh: None, number: int) -> None:
    """A start that it can't answer says so; what was started is ended."""

    def disturb(fraction: float, text: str) -> None:
        if (pid := zygote.pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    said = "zygote of the fork server was killed" if number == signal.SIGKILL else "zygote is stopped"
    with pytest.raises(ClusterError, match=said):
        Lab(1).start(disturb)
    _ends(zygote.pid())


_BEGUN = """
import mine, psutil, time
from ddp_lab.cluster.processes import zygote
while zygote.pid() is None:
    time.sleep(0.01)
print(zygote.pid())
"""


def test_a_kernel_that_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel "Python 3 (ddp_lab)" does, before its first cell. It imports nothing from the notebook's folder."""
    (tmp_path / "ipykernel.py").write_text("raise RuntimeError")
    (tmp_path / "mine.py").write_text("found = True")
    monkeypatch.setenv("JUPYTER_PATH", lesson_files.lab_environment()["JUPYTER_PATH"])
    monkeypatch.delenv("DDP_LAB_EARLY")
    with contextlib.closing(Notebook("ddp_lab", tmp_path)) as notebook:
        begun = notebook.run(_BEGUN)
        started = notebook.run("%load_ext ddp_lab\n%cluster start -n 1")
        assert started.status == "ok", started.error
        assert notebook.run("print(psutil.Process(lab.pids()['fork server']).ppid())").text == begun.text
        backend = "import os; print(os.environ['MPLBACKEND'])"  # a variable that ipykernel sets
        assert notebook.run(backend).text.strip() in notebook.run(f"%%distributed\n{backend}").text
        notebook.run("%cluster stop")


_SHARING = """
from ddp_lab import Cluster
import os, psutil, sys
with Cluster(1) as lab:
    server = psutil.Process(lab.pids()["fork server"])
    print(server.parent().pid, server.parent().ppid(), psutil.Process(lab.pids()["controller"]).ppid(), flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
"""


def test_one_that_another_process_offers(tmp_path: Path) -> None:
    """Clients have theirs forked from it, if they have its variables; each ends with its client, however that ends."""
    offered = zygote.offer(tmp_path, {"SOME": "thing"})
    try:
        for some, shares in (("thing", True), ("other", False)):
            client = subprocess.Popen(
                [sys.executable, "-c", _SHARING],
                env={**os.environ, zygote.OFFERED: str(tmp_path), "SOME": some},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            with client:
                assert client.stdout is not None
                own, parent, of_controller = map(int, client.stdout.readline().split())
                assert parent == (offered.pid if shares else client.pid)
                assert (of_controller == own) == shares
            _ends(own)
    finally:
        offered.kill()
        offered.wait()


def test_jupyterlab_offers_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ddp-lab lab` starts it beside JupyterLab, with which it ends; its folder is removed."""
    monkeypatch.delenv("DDP_LAB_EARLY")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "ddp_lab", "lab", str(tmp_path), "--no-browser", "--allow-root", "--port=0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        [listens] = wait_until(lambda: list(tmp_path.glob("ddp_lab-*/zygote")), "the zygote")
        assert listens.parent.name.startswith(f"ddp_lab-{server.pid}-")
    finally:
        server.kill()
        server.wait()
    wait_until(lambda: not listens.parent.exists(), "the end of its folder")


def test_none_is_started(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DDP_LAB_EARLY=0, and, without an error, where no process can be started."""
    zygote.begin()
    assert zygote.pid() is None
    monkeypatch.delenv("DDP_LAB_EARLY")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    zygote.begin()
    assert zygote.pid() is None
