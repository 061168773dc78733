"""Loads the compiled extensions that were built for the installed torch, or reports why there are none.

`ddp_lab/_extensions` has a folder for each minor release of torch with a build: a clone has one of them, a wheel all
supported ones. Releases of one minor, and builds for CPU and CUDA, load the same file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from types import ModuleType

from .documentation import with_help
from .errors import ExtensionError

_FOLDER = Path(__file__).parent / "_extensions"
_lock = threading.Lock()  # an extension can't be initialised twice in a process
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\+[\w.]+)?")  # not a nightly build


def built_for(folder: Path | None = None) -> list[str]:
    """The versions of torch for which a folder (this package's own) has extensions, oldest first."""
    folder = folder or _FOLDER
    found = [path.read_text().strip() for path in folder.glob("torch*/built_for.txt")]
    return sorted(found, key=lambda version: [int(number) for number in re.findall(r"\d+", version)[:3]])


def path_of(name: str, version: str, folder: Path | None = None) -> Path | None:
    """The file of the extension `name` that loads here with this `version` of torch; None if there is none."""
    built = _folder_of(version, folder or _FOLDER)
    path = built / f"{name}{EXTENSION_SUFFIXES[0]}" if built else None
    return path if path and path.is_file() else None


def _folder_of(version: str, folder: Path) -> Path | None:
    """Where the files for this `version` of torch are, for whichever Python and processor."""
    release = _RELEASE.fullmatch(version)
    for built in built_for(folder):
        of_release = _RELEASE.fullmatch(built)
        if built == version or (release and of_release and release[1] == of_release[1]):
            return folder / f"torch{'.'.join(built.split('.')[:2])}"
    return None


def load(name: str = "_C") -> ModuleType:
    """Returns an extension (`ddp_lab._C`, unless another one is given) for the installed torch.

    Raises:
        ExtensionError: there is none for this torch (the message lists those there are), or it can't be loaded; with
            a fix.
    """
    import torch

    qualified = f"{__package__}.{name}"
    with _lock:
        return sys.modules.get(qualified) or _load(name, qualified, torch.__version__)


def _load(name: str, qualified: str, version: str) -> ModuleType:
    path = path_of(name, version)
    if path is None:
        raise ExtensionError(_why_not(version))
    spec = importlib.util.spec_from_file_location(qualified, path, loader=ExtensionFileLoader(qualified, str(path)))
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        said = f"ddp_lab's extension can't be loaded ({error}): {_rebuild()}"
        raise ExtensionError(with_help(said, "extension-not-loaded")) from error
    sys.modules[qualified] = module
    return module


def _why_not(version: str) -> str:
    versions = built_for()
    if not versions:
        return with_help(f"ddp_lab's extension has not been built: {_rebuild()}", "extension-not-built")
    if _folder_of(version, _FOLDER):
        here = f"Python {'.'.join(map(str, sys.version_info[:2]))} on {platform.machine()}"
        said = f"ddp_lab's extension was built for another Python or processor than this one, {here}: {_rebuild()}"
        return with_help(said, "extension-of-another-processor")
    *others, last = [built.split("+")[0] for built in versions]
    named = f"{', '.join(others)} and {last}" if others else last
    return with_help(
        f"ddp_lab's extension was built for torch {named}, but torch {version} is installed: install torch=={last}, or "
        f"{_rebuild()}",
        "extension-of-another-torch",
    )


def _rebuild() -> str:
    if (Path(__file__).parents[1] / "csrc").is_dir():
        return "rebuild it with `make` in the source tree"
    compiler = "" if shutil.which("g++") else "install a compiler (Debian: apt install g++ python3-dev), then "
    archive = f"ddp_lab-{importlib.metadata.version('ddp_lab')}.tar.gz"
    return f"{compiler}rebuild it from its source distribution: `pip install --no-build-isolation --no-deps {archive}`"
