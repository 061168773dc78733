"""PEP 517 backend: setuptools', plus the very torch that is installed as a requirement of an isolated build.

`torch>=2.11` in `build-system.requires` would let an isolated build compile against the newest torch while
another one is installed; such an extension does not load. The isolated interpreter does not see the outer
site-packages on its path, but knows where they are.
"""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools

DEFAULT_TORCH = "2.13.0"

build_sdist = _setuptools.build_sdist
build_wheel = _setuptools.build_wheel
build_editable = _setuptools.build_editable
prepare_metadata_for_build_wheel = _setuptools.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _setuptools.prepare_metadata_for_build_editable


def torch_requirement() -> str:
    """Returns `torch==X.Y.Z`: the one in `$TORCH`, else the installed one, else the default."""
    if os.environ.get("TORCH"):
        return os.environ["TORCH"]
    for scheme_path in ("platlib", "purelib"):
        version_file = Path(sysconfig.get_path(scheme_path), "torch", "version.py")
        if version_file.is_file():
            match = re.search(r"^__version__ = ['\"]([^'\"+]+)", version_file.read_text(), re.MULTILINE)
            if match:
                return f"torch=={match.group(1)}"
    return f"torch=={DEFAULT_TORCH}"


def _requirements(config_settings: Any = None) -> list[str]:
    """Returns what setup.py imports beside `build-system.requires`; it is asked before setup.py can run."""
    return [torch_requirement()]


get_requires_for_build_sdist = get_requires_for_build_wheel = get_requires_for_build_editable = _requirements
