"""The container files can be read by their tools, agree with each other and with the package, and name real things."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from traitlets.config import Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "containers"
INSTALL = CONTAINERS / "install.sh"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
IMAGE = f"ddp-lab:{PROJECT['project']['version']}"
_STEP = re.compile(r"containers/install\.sh (\w+) (\S+)")


def read(name: str) -> str:
    """What stands in a file of `containers`."""
    return (CONTAINERS / name).read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, continued lines joined."""
    lines = [line for line in read("Dockerfile").splitlines() if line.strip() and not line.startswith("#")]
    found = [line.partition(" ") for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()]
    return [(name, rest) for name, _, rest in found]


def named(instruction: str) -> list[str]:
    """The arguments of each instruction of this name."""
    return [rest for name, rest in instructions() if name == instruction]


def steps() -> list[str]:
    """The steps that install.sh explains, and no others."""
    listed = subprocess.run(["bash", INSTALL], capture_output=True, text=True, check=False)
    assert listed.returncode == 2
    return re.findall(r"^  install\.sh (\w+) FOLDER  ", listed.stderr, re.MULTILINE)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings of the JupyterHub."""
    settings = Config()
    monkeypatch.setenv("CLASS_PASSWORD", "one for the class")
    runpy.run_path(str(CONTAINERS / "jupyterhub_config.py"), {"get_config": lambda: settings})
    return settings


def test_versions_are_those_of_the_package() -> None:
    """All name one Python, which the package supports, and the torch of `make`, for which wheels are built.

    The image and the page on JupyterHub name the same JupyterHub.
    """
    [python] = re.findall(r"^PYTHON=(.+)", "\n".join(named("ARG")), re.MULTILINE)
    environment = yaml.safe_load(read("environment.yml"))
    devcontainer = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert f"python={python}" in environment["dependencies"]
    assert devcontainer["image"] == f"python:{python}-bookworm"
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert [int(part) for part in python.split(".")] >= [int(part) for part in oldest.split(".")]
    [torch] = re.findall(r"^TORCH=\$\{TORCH:-(.+)\}$", read("install.sh"), re.MULTILINE)
    assert torch in PROJECT["tool"]["ddp_lab"]["torch"]
    assert f"TORCH ?= torch=={torch}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    setuptools = next(one for one in PROJECT["build-system"]["requires"] if one.startswith("setuptools"))
    assert f"'{setuptools}'" in read("install.sh")
    [hub] = re.findall(r"'(jupyterhub==\S+)'", read("install.sh"))
    assert f"'{hub}'" in (ROOT / "tutorials/site/how_to/jupyterhub.md").read_text(encoding="utf-8")


def test_the_dockerfile_calls_the_steps_that_are_tested() -> None:
    """It runs every step of install.sh once, in order, and otherwise only makes the user that it ends with."""
    known = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "EXPOSE", "HEALTHCHECK", "CMD"}
    assert {name for name, _ in instructions()} <= known
    runs = [_STEP.findall(run) for run in named("RUN")]
    assert [found[0] for found in runs if found] == [
        ("wheel", "/wheels"),
        ("install", "/wheels"),
        ("lessons", "/home/learner"),
    ]
    assert [step for found in runs for step, _ in found] == steps()
    [alone] = [run for run, found in zip(named("RUN"), runs, strict=True) if not found]
    user = alone.split()[-1]
    assert alone.startswith("useradd ")
    assert named("USER") == [user]
    assert named("WORKDIR") == [f"/home/{user}"]


def test_images_are_for_any_processor() -> None:
    """No file of an image names a processor: it is built for the one of the machine that builds it."""
    files = [path for folder in ("containers", ".binder", ".devcontainer") for path in (ROOT / folder).iterdir()]
    assert [path for path in files if re.search(r"x86|amd64|aarch64|arm64", path.read_text(encoding="utf-8"))] == []


def test_the_image_can_be_checked() -> None:
    """The health check is Python, asks the port that is exposed, and the command is the package's own."""
    [check] = named("HEALTHCHECK")
    code = re.search(r'CMD python -c "(.+)"$', check)
    compile(code[1], "HEALTHCHECK", "exec")
    [port] = named("EXPOSE")
    assert f"'http://127.0.0.1:{port}'" in code[1]
    [command] = (json.loads(one) for one in named("CMD"))
    assert command[0] in PROJECT["project"]["scripts"]
    assert command[1] == "lab"


def test_compose_builds_and_limits_the_image() -> None:
    """It builds this Dockerfile in this clone under the image's name, on a port of this machine alone."""
    composed = yaml.safe_load(read("compose.yaml"))
    [lab] = composed["services"].values()
    assert lab["image"] == IMAGE
    assert (CONTAINERS / lab["build"]["context"]).resolve() == ROOT
    assert (ROOT / lab["build"]["dockerfile"]).resolve() == CONTAINERS / "Dockerfile"
    assert lab["ports"] == [f"127.0.0.1:{named('EXPOSE')[0]}:{named('EXPOSE')[0]}"]
    assert lab["volumes"] == [f"{volume}:{named('WORKDIR')[0]}" for volume in composed["volumes"]]
    assert read("Dockerfile").count(IMAGE) == 2


def test_a_student_gets_what_compose_gives(hub: Any) -> None:
    """The hub starts this image with the same limits, with a home folder that is kept, and stops idle servers."""
    [lab] = yaml.safe_load(read("compose.yaml"))["services"].values()
    spawner = hub.DockerSpawner
    assert spawner.image == IMAGE
    assert spawner.mem_limit.lower() == lab["mem_limit"]
    assert spawner.extra_host_config == {name: lab[name] for name in ("shm_size", "pids_limit", "init")}
    assert list(spawner.volumes.values()) == named("WORKDIR")
    assert spawner.notebook_dir == f"{named('WORKDIR')[0]}/ddp_lab_lessons"
    [service], [role] = hub.JupyterHub.services, hub.JupyterHub.load_roles
    assert role["services"] == [service["name"]]
    assert service["command"][0] == sys.executable
    assert hub.SharedPasswordAuthenticator.user_password == "one for the class"


def test_binder_takes_the_same_steps() -> None:
    """Its environment is the one for conda; then it compiles and installs this clone. The dev container runs `make`,
    and its editor uses the Python that `make` installs into."""
    binder = ROOT / ".binder"
    assert (binder / "environment.yml").resolve() == CONTAINERS / "environment.yml"
    assert os.access(binder / "postBuild", os.X_OK)
    assert _STEP.findall((binder / "postBuild").read_text(encoding="utf-8")) == [("wheel", "dist"), ("install", "dist")]
    assert _STEP.findall(read("environment.yml")) == [("wheel", "dist"), ("install", "dist")]
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert found["postCreateCommand"] == "make"
    settings = found["customizations"]["vscode"]["settings"]
    assert settings["python.defaultInterpreterPath"] == "${workspaceFolder}/.venv/bin/python"


@pytest.mark.parametrize("script", [INSTALL, ROOT / ".binder" / "postBuild"], ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    """Bash can read the script, and it ends with its first error."""
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert "\nset -euo pipefail\n" in script.read_text(encoding="utf-8")
