"""`ddp-lab check-install`: what works, what does not, and what it says to do."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.cli import check_install

_COMMAND = (sys.executable, "-m", "ddp_lab", "check-install", "--json")


def _of(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(one for one in found if one["name"] == name)


@pytest.mark.soak
def test_this_installation_works() -> None:
    """Here everything works, a gradient averaged by two real ranks included: exit code 0, and JSON alone on stdout."""
    done = subprocess.run(_COMMAND, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (0, True), found
    names = {"Python", "packages", "torch", "extension", "JupyterLab", "tools", "/dev/shm", "loopback", "open files"}
    assert {one["name"] for one in found["checks"]} >= {*names, "cluster"}
    assert "2 ranks started" in _of(found["checks"], "cluster")["found"]
    assert _of(found["checks"], "JupyterLab")["state"] == "ok"


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch that does not load, and hardly any file that may be opened: lines of their own, each with what to do.

    What needs torch fails with it, all else is not touched, and the exit code is 1. Told to write JSON into a file, it
    prints the lines, too.
    """
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "found.json"
    done = subprocess.run(
        (*_COMMAND, str(path)),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
    )
    found = json.loads(path.read_text())
    assert (done.returncode, found["ok"]) == (1, False)
    assert done.stdout.splitlines()[-1] == "failed: torch, extension, open files, cluster"
    failed = {one["name"] for one in found["checks"] if one["state"] == check_install.FAILED}
    assert failed == {"torch", "extension", "open files", "cluster"}
    assert "libcudart.so.12" in _of(found["checks"], "torch")["found"]
    assert "pip install torch" in _of(found["checks"], "torch")["remedy"]
    assert "200" in _of(found["checks"], "open files")["found"]
    assert "ulimit -n" in _of(found["checks"], "open files")["remedy"]
    for one in found["checks"]:
        assert str(check_install.Check(**one)) in done.stdout


@pytest.mark.soak
def test_what_is_here() -> None:
    """Each check of what a process can see says that it is here, with its version."""
    made = [check_install.python(), check_install.packages(), check_install.torch(), check_install.extension()]
    made += [check_install.jupyterlab(), check_install.loopback()]
    assert {one.state for one in made} == {"ok"}, made
    version = importlib.metadata.version
    words = [platform.python_version(), f"numpy {version('numpy')}", version("torch"), version("torch").split("+")[0]]
    for one, word in zip(made, [*words, version("jupyterlab"), "127.0.0.1"], strict=True):
        assert word in one.found
        assert str(one).splitlines() == [f"ok       {one.name:14} {one.found}"]


def test_an_old_python_and_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are told before anything else is tried."""
    monkeypatch.setattr(check_install, "_OLDEST_PYTHON", (*sys.version_info[:2], 99))
    assert "Python 3.10 or later" in check_install.python().remedy
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "win32")
    found = check_install.python()
    assert (found.state, "WSL 2" in found.remedy) == ("failed", True)


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This package, and one that it needs; what an extra asks for is not missed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = check_install.packages()
    assert (found.state, found.found) == ("failed", "ddp_lab is not installed here")
    needs = ["Requires-Dist: needed-here>=1,<2", 'Requires-Dist: extra-one>=1; extra == "test"']
    (tmp_path / "ddp_lab-1.dist-info").mkdir()
    (tmp_path / "ddp_lab-1.dist-info" / "METADATA").write_text("\n".join(["Name: ddp_lab", "Version: 1", *needs]))
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / ".")])  # what is there is remembered by path
    found = check_install.packages()
    assert (found.found, found.remedy) == ("missing: needed-here", "Run `pip install needed-here`.")


def test_a_torch_without_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch that was built without torch.distributed is none that this works with."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "from types import SimpleNamespace as Space\n__version__, version = '9.9', Space(cuda='12.0')\n"
        "cuda = Space(is_available=lambda: False, device_count=lambda: 0)\n"
    )
    (tmp_path / "torch" / "distributed.py").write_text("def is_available(): return False\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check_install.torch()
    assert (found.state, found.found) == ("failed", "9.9, built for CUDA 12.0; backends none")
    assert "with torch.distributed and Gloo" in found.remedy


def test_no_jupyterlab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scripts need none: a warning, with what brings it."""
    (tmp_path / "jupyterlab.py").write_text("raise ModuleNotFoundError(\"No module named 'jupyterlab'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check_install.jupyterlab()
    assert (found.state, found.found) == ("warning", "not installed: ModuleNotFoundError: No module named 'jupyterlab'")
    assert "pip install 'ddp_lab[notebooks]'" in found.remedy


def test_a_process_that_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that crashes without a word, and one that does not end, are told as such."""
    assert check_install._ask("import os; os.kill(os.getpid(), 9)") == (None, "the process exited with code -9")
    monkeypatch.setattr(check_install, "_SECONDS", 0.5)
    assert check_install._ask("import time; time.sleep(600)") == (None, "no answer within 0 s")


def test_few_files() -> None:
    """A limit with which small clusters work is a warning."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        found = check_install.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (found.state, "512" in found.found, "ulimit -n 4096" in found.remedy) == ("warning", True, True)


def test_a_cluster_that_falls_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where memory can't be shared a gradient is averaged all the same: a warning that says why. What ranks print stays
    out of the answer."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(check_install, "_GRADIENT", f"{check_install._GRADIENT}print('said by', rank)")
    found = check_install.cluster()
    assert found.state == "warning"
    assert re.match(r"2 ranks started in [\d.]+ s and averaged a gradient; but .*no memfd_create", found.found)
    said = capsys.readouterr()
    assert (said.out, "said by" in said.err) == ("", True)


def test_a_widget_extension_that_the_server_does_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With anywidget switched off in the server's configuration, the line names it."""
    (tmp_path / "labconfig").mkdir()
    (tmp_path / "labconfig" / "page_config.json").write_text('{"disabledExtensions": {"anywidget": true}}')
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    found = check_install.jupyterlab()
    assert found.state == "failed"
    assert "does not see anywidget" in found.found
    assert "labextension list" in found.remedy


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no program is found, a clone is told what compiles and tests it, and that using it needs neither."""
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check_install.tools()
    assert (found.state, found.found) == ("warning", "g++ not found, Chromium not found")
    assert found.remedy.startswith(
        "Needed only to build and test: g++ compiles the extension (Debian: apt install g++)"
    )
