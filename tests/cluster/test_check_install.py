"""`ddp-lab check-install`: what works, what does not, and what it says to do."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import check_install

_COMMAND = (sys.executable, "-m", "ddp_lab", "check-install", "--json")


def _of(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(one for one in found if one["name"] == name)


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


def test_too_few_files() -> None:
    """Where a process may open hardly any file, the line says so and what to do, and the exit code is 1."""
    few = subprocess.run(
        [*_COMMAND],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
    )
    found = json.loads(few.stdout)
    assert (few.returncode, found["ok"]) == (1, False)
    files = _of(found["checks"], "open files")
    assert (files["state"], "200" in files["found"]) == ("failed", True)
    assert "ulimit -n" in files["remedy"]


def test_a_torch_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch that raises when it is imported fails its own line and the extension's; the others are not touched."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said: list[check_install.Check] = []
    asked = (check_install.python, check_install.torch, check_install.extension)
    made = check_install.check_all(said.append, asked)
    assert made == said
    assert [one.state for one in made] == ["ok", "failed", "failed"]
    assert "libcudart.so.12" in str(made[1])
    assert "pip install torch" in made[1].remedy


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
