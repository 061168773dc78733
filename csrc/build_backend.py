"""PEP 517 backend: setuptools', plus a torch as a requirement where none is installed.

An isolated interpreter does not see the outer site-packages on its path, but knows where they are: setup.py finds
torch there, and builds for it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools
from setuptools.compat.py310 import tomllib

build_sdist = _setuptools.build_sdist
build_wheel = _setuptools.build_wheel
build_editable = _setuptools.build_editable
prepare_metadata_for_build_wheel = _setuptools.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _setuptools.prepare_metadata_for_build_editable


# What is missing, and what to do, by `sys.platform`. The Makefile prints the same.
ELSEWHERE = {
    "darwin": "missing Linux, which Docker has on macOS; in a clone:\n"
    "  docker compose --file containers/compose.yaml up",
    "win32": "missing Linux, which WSL 2 has on Windows (`wsl --install Debian`); in a clone there:\n"
    "  sudo apt install -y g++ make python3-dev python3-venv && make demo",
}


def torch_requirements(config_settings: Any = None) -> list[str]:
    """What is to be installed to build for: nothing if there is a torch; else what `$TORCH` or the package asks for."""
    if sys.platform in ELSEWHERE:  # before torch is fetched, which macOS may not have
        sys.exit(ELSEWHERE[sys.platform])
    if os.environ.get("TORCH"):
        return [os.environ["TORCH"]]
    if os.environ.get("DDP_LAB_TORCH") or Path(sysconfig.get_path("platlib"), "torch", "version.py").is_file():
        return []
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [one for one in project["dependencies"] if one.startswith("torch")]


get_requires_for_build_wheel = get_requires_for_build_editable = torch_requirements
