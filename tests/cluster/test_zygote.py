"""The process from which this client's clusters are forked: who shares it, when it ends, what its end means."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import CellError, ClusterError, lesson_files
from ddp_lab.cluster.processes import zygote
from tests import leftovers
from tests.cluster.conftest import Lab
from tests.cluster.pages import Notebook
from tests.waiting import wait_until

_LOAD = """
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance().run_line_magic("load_ext", "ddp_lab")
from ddp_lab.cluster.processes import zygote
print(zygote.pid())
"""


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
    """`%load_ext` starts it; however many ranks, one after the other and at once; they get the variables of now."""
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
    assert leftovers.alive(begun)


def test_other_variables_take_its_place(fresh: None) -> None:
    """A cluster with other variables gets another zygote; the former ends with the last cluster that came from it."""
    with Lab(1) as lab:
        former = zygote.pid()
        with Lab(1, env={"SOME": "thing"}) as other:
            assert other.values("import os; os.environ['SOME']") == {0: "thing"}
            assert _parent(other.pids()["fork server"]) == zygote.pid() != former
        assert lab.values("import os; os.environ.get('SOME')") == {0: None}
    _ends(former)


def test_its_end_is_told(fresh: None) -> None:
    """If it is killed, so are its clusters' ranks, which say why; `restart` has another one."""
    with Lab(2) as lab:
        killed = zygote.pid()
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(CellError, match=r"the zygote of the fork server was killed by SIGKILL \(signal 9\)"):
            lab.run("dist.barrier()")
        lab.restart()
        lab.use()
        assert zygote.pid() != killed
        assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_an_import_that_fails(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a cluster shows its traceback; with the cause gone, the next one works."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(ClusterError, match="no torch today"):
            Lab(1).start()
    with Lab(1) as lab:
        assert lab.values("1") == {0: 1}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
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


def test_unused_it_ends(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while without clusters; the next cluster has another one."""
    monkeypatch.setattr(zygote, "_UNUSED_SECONDS", 0.1)
    with Lab(1) as lab:
        used = zygote.pid()
        assert lab.values("import time; time.sleep(0.3)") == {0: None}
    _ends(used)
    with Lab(1) as lab:
        assert lab.values("1") == {0: 1}


def test_a_kernel_that_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel "Python 3 (ddp_lab)" does, before its first cell. It imports nothing from the notebook's folder."""
    (tmp_path / "ipykernel.py").write_text("raise RuntimeError")
    (tmp_path / "mine.py").write_text("found = True")
    monkeypatch.setenv("JUPYTER_PATH", lesson_files.lab_environment()["JUPYTER_PATH"])
    monkeypatch.delenv("DDP_LAB_EARLY")
    with contextlib.closing(Notebook("ddp_lab", tmp_path)) as notebook:
        children = notebook.run("import mine, psutil; print([child.pid for child in psutil.Process().children()])")
        started = notebook.run("%load_ext ddp_lab\n%cluster start -n 1")
        assert started.status == "ok", started.error
        parent = notebook.run("print([psutil.Process(lab.pids()['fork server']).ppid()])")
        assert parent.text == children.text
        backend = "import os; print(os.environ['MPLBACKEND'])"  # a variable that ipykernel sets
        assert notebook.run(backend).text.strip() in notebook.run(f"%%distributed\n{backend}").text
        notebook.run("%cluster stop")


def test_it_ends_with_who_loaded_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """`%load_ext` starts it; it ends with the process, however that ends."""
    monkeypatch.delenv("DDP_LAB_EARLY")
    for end in ("", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"):
        code = f"{_LOAD}import sys; sys.stdout.flush()\n{end}"
        done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        _ends(int(done.stdout))


def test_none_is_started(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DDP_LAB_EARLY=0, and, without an error, where no process can be started."""
    zygote.begin()
    assert zygote.pid() is None
    monkeypatch.delenv("DDP_LAB_EARLY")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    zygote.begin()
    assert zygote.pid() is None
