"""The notebooks and lessons: beside the package in a clone, else where its wheel installed them."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from .errors import DdpLabError

__all__ = ["COPIED", "FOLDERS", "QUICKSTART", "home", "lab_command", "working_copy"]

FOLDERS = ("notebooks", "tutorials")
QUICKSTART = Path("notebooks", "quickstart.ipynb")
COPIED = "ddp_lab_lessons"

_PACKAGE = Path(__file__).resolve().parent
_LAB_EXTENSIONS = _PACKAGE / "labextensions"  # in a clone; a wheel installs it where every JupyterLab looks


def home() -> Path:
    """The folder that holds notebooks and tutorials.

    Raises:
        DdpLabError: they are not here.
    """
    installed = Path(sysconfig.get_path("data"), "share", "ddp_lab")
    for folder in (_PACKAGE.parent, installed):
        if (folder / QUICKSTART).exists():
            return folder
    raise DdpLabError(
        f"the notebooks are neither beside this package ({_PACKAGE.parent}) nor in {installed}: install ddp_lab from "
        "a clone (`make demo`) or from its wheel (`make wheel`)"
    )


def working_copy(into: Path) -> Path:
    """A folder in which the notebooks may be changed: the clone itself, else a copy below `into`.

    What is there already is left as it is: readers keep what they wrote.
    """
    source = home()
    if source == _PACKAGE.parent:
        return source
    copied = into / COPIED
    for folder in FOLDERS:
        for file in sorted((source / folder).rglob("*")):
            target = copied / file.relative_to(source)
            if file.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
    return copied


def lab_command(folder: Path, options: Sequence[str] = ()) -> list[str]:
    """The command that opens JupyterLab on a folder, with the lessons in its launcher.

    Args:
        folder: what the file browser shows.
        options: further ones of JupyterLab.
    """
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}"]
    if _LAB_EXTENSIONS.is_dir():
        command.append(f"--LabApp.extra_labextensions_path={_LAB_EXTENSIONS}")
    return [*command, *options]
