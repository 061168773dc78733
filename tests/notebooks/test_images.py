"""The steps of the container images, without Docker: compiled in a fresh environment, installed in a container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.notebooks import running
from tests.notebooks.restricted import PYTHON, Container, container, why_not
from tests.unit.test_containers import CONTAINERS, named

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

# Starts JupyterLab, waits until it is healthy, runs a lesson, and prints the most that all processes used together.
FOOTPRINT = """
import json, os, socket, subprocess, sys, time
from pathlib import Path

health, lesson = sys.argv[1:]
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
health = [sys.executable, "-c", health.replace("8888", str(port))]
environment = {**os.environ, "HOME": os.getcwd()}  # an image's home can be written
assert subprocess.run(health, stderr=subprocess.DEVNULL).returncode != 0, "healthy before the start"
command = ["ddp-lab", "lab", "--no-browser", "--allow-root", f"--port={port}", "--ServerApp.port_retries=0"]
server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
while subprocess.run(health, stderr=subprocess.DEVNULL).returncode != 0:
    assert server.poll() is None, "JupyterLab ended"
runner = subprocess.Popen(["jupyter-execute", "--timeout=600", lesson], env=environment)
most = {"mib": 0, "processes": 0, "threads": 0, "shm_mib": 0}
while runner.poll() is None:
    pss, processes, threads = 0, 0, 0
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) in (os.getpid(), runner.pid):
            continue
        try:
            rollup = (folder / "smaps_rollup").read_text()
            threads += len(os.listdir(folder / "task"))
        except OSError:  # it has ended
            continue
        pss += next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
        processes += 1
    shm = os.statvfs("/dev/shm")
    used = (shm.f_blocks - shm.f_bfree) * shm.f_frsize
    for name, value in (("mib", pss >> 10), ("processes", processes), ("threads", threads), ("shm_mib", used >> 20)):
        most[name] = max(most[name], value)
    time.sleep(0.2)
server.terminate()
server.wait()
assert runner.returncode == 0
print(json.dumps(most))
"""

# Every setting is one of its class; the settings of containers are some that Docker knows; the scopes exist.
HUB = """
import sys
from docker.types import HostConfig
from dockerspawner import DockerSpawner
from jupyterhub.app import JupyterHub
from jupyterhub.auth import Authenticator
from jupyterhub.authenticators.shared import SharedPasswordAuthenticator
from jupyterhub.scopes import scope_definitions
from traitlets.config import PyFileConfigLoader

settings = PyFileConfigLoader(sys.argv[1]).load_config()
classes = {one.__name__: one for one in (JupyterHub, DockerSpawner, Authenticator, SharedPasswordAuthenticator)}
for name, section in settings.items():
    unknown = set(section) - set(classes[name].class_trait_names(config=True))
    assert not unknown, (name, unknown)
hub = JupyterHub(config=settings)
assert (hub.spawner_class, hub.authenticator_class) == (DockerSpawner, SharedPasswordAuthenticator)
assert HostConfig(version="1.43", **settings.DockerSpawner.extra_host_config)["PidsLimit"] > 0
[role] = settings.JupyterHub.load_roles
assert set(role["scopes"]) <= set(scope_definitions)
print("known to", *classes)
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """What the Dockerfile makes of this clone; torch comes from pip's extra index, if one is configured."""
    folder = tmp_path_factory.mktemp("image")
    listed = subprocess.run(["git", "ls-files"], cwd=running.PROJECT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        copied = folder / "source" / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(running.PROJECT / name, copied)
    pip = [sys.executable, "-m", "pip", "config", "get", "global.extra-index-url"]
    index = subprocess.run(pip, capture_output=True, text=True, check=False).stdout.strip()
    with pytest.MonkeyPatch.context() as patch, container(folder / "container") as made:
        if index:
            patch.setenv("PIP_EXTRA_INDEX_URL", index)
        wheels = made.work / "wheels"
        compile_wheel(folder, wheels)
        shutil.copytree(CONTAINERS, made.work / "containers")
        made.call("bash", "containers/install.sh", "install", "wheels")
        made.call("bash", "containers/install.sh", "lessons", ".")
        yield made


def compile_wheel(folder: Path, wheels: Path) -> None:
    """The Dockerfile's first stage: a Python with a compiler, and nothing installed."""
    venv.create(folder / "build", with_pip=True)
    environment = {**os.environ, "PATH": f"{folder / 'build' / 'bin'}:{os.environ['PATH']}"}
    step = ["bash", folder / "source" / "containers" / "install.sh", "wheel", wheels]
    done = subprocess.run(step, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_installed_works(image: Container) -> None:
    """Ranks average a gradient, JupyterLab shows widgets, and JupyterHub's server is there."""
    checks = json.loads(image.call("/srv/venv/bin/ddp-lab", "check-install", "--json"))
    assert checks["ok"], checks
    assert image.call("/srv/venv/bin/jupyterhub-singleuser", "--version").startswith("6.")


def test_a_lesson_needs_less_than_the_limits(image: Container) -> None:
    """JupyterLab becomes healthy; with it and two ranks, lesson 5 stays below half of what compose.yaml gives."""
    code = named("HEALTHCHECK")[0].partition('python -c "')[2].removesuffix('"')
    (image.work / "footprint.py").write_text(FOOTPRINT)
    lesson = next(path.name for path in running.LESSONS if path.name.startswith("05_"))
    printed = image.call(PYTHON, "footprint.py", code, f"ddp_lab_lessons/tutorials/{lesson}")
    most = json.loads(printed.splitlines()[-1])
    print(most)
    [lab] = yaml.safe_load((CONTAINERS / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    assert most["mib"] < int(lab["mem_limit"].removesuffix("g")) << 9
    assert most["threads"] < lab["pids_limit"] / 2
    assert most["shm_mib"] < int(lab["shm_size"].removesuffix("g")) << 9


def test_the_hub_knows_its_settings(tmp_path: Path) -> None:
    """JupyterHub, DockerSpawner and the idle culler of today know every name in jupyterhub_config.py."""
    venv.create(tmp_path / "hub", with_pip=True)
    python = tmp_path / "hub" / "bin" / "python"
    packages = ["jupyterhub==6.*", "dockerspawner", "jupyterhub-idle-culler"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    environment = {**os.environ, "CLASS_PASSWORD": "one for the class"}
    command = [python, "-c", HUB, CONTAINERS / "jupyterhub_config.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "known to JupyterHub" in done.stdout, done.stderr
    options = subprocess.run([python, "-m", "jupyterhub_idle_culler", "--help"], capture_output=True, text=True)
    assert "--timeout=" in options.stdout
