"""`ddp-lab check-install`: what works, what does not, and what it says to do."""

from __future__ import annotations

import json
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
    done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=280, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (0, True), found
    assert {one["name"] for one in found["checks"]} >= {
        *(
            "Python",
            "packages",
            "torch",
            "extension",
            "JupyterLab",
            "tools",
            "/dev/shm",
            "loopback",
            "open files",
            "cluster",
        )
    }
    assert "2 ranks started" in _of(found["checks"], "cluster")["found"]
    assert _of(found["checks"], "JupyterLab")["state"] == "ok"


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch that does not load, and hardly any file that may be opened: lines of their own, each with what to do.

    What needs torch fails with it, all else is not touched, and the exit code is 1.
    """
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(
        _COMMAND,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (1, False)
    failed = {one["name"] for one in found["checks"] if one["state"] == check_install.FAILED}
    assert failed == {"torch", "extension", "open files", "cluster"}
    assert "libcudart.so.12" in _of(found["checks"], "torch")["found"]
    assert "pip install torch" in _of(found["checks"], "torch")["remedy"]
    assert "200" in _of(found["checks"], "open files")["found"]
    assert "ulimit -n" in _of(found["checks"], "open files")["remedy"]


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
    assert (found.state, found.found) == ("warning", "g++ not here, Chromium not here")
    assert found.remedy.startswith("Only to build and test: g++ compiles the extension (Debian: apt install g++)")
