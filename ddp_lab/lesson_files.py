"""The notebooks and lessons: next to the package in a clone, else where its wheel installed them."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from .errors import DdpLabError

FOLDERS = ("notebooks", "tutorials")
QUICKSTART = Path("notebooks", "quickstart.ipynb")
COPIED = "ddp_lab_lessons"
VERDICT = "application/vnd.ddp_lab.verdict+json"
"""In this form a check's verdict stands beside its text: `{"exercise": 1, "right": true, "why": "…"}`."""

_PACKAGE = Path(__file__).resolve().parent
# JupyterLab refuses either if it is given twice.
_ROOT_OPTIONS = ("--ServerApp.root_dir", "--notebook-dir", "--ServerApp.notebook_dir")
_FIRST_OPTION = "--LabApp.default_url"


def home() -> Path:
    """The folder that holds notebooks and tutorials.

    Raises:
        DdpLabError: they are not installed.
    """
    installed = Path(sysconfig.get_path("data"), "share", "ddp_lab")
    for folder in (_PACKAGE.parent, installed):
        if (folder / QUICKSTART).exists():
            return folder
    raise DdpLabError(
        f"the notebooks are neither next to this package ({_PACKAGE.parent}) nor in {installed}: install ddp_lab from "
        "a clone (`make demo`) or from its wheel (`make wheel`)"
    )


def working_copy(into: Path) -> Path:
    """A folder in which the notebooks may be edited: the clone itself, else a copy below `into`.

    Existing files are kept, so that readers keep their edits.
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


def names_a_folder(options: Sequence[str]) -> bool:
    """Whether options of JupyterLab already set the folder of its file browser."""
    return any(one.partition("=")[0] in _ROOT_OPTIONS for one in options)


def lab_command(folder: Path | None, options: Sequence[str] = (), first: Path | None = None) -> list[str]:
    """The command that opens JupyterLab on a folder.

    Args:
        folder: the folder of the file browser; None if the options set it.
        options: further options of JupyterLab.
        first: the notebook to open, relative to the folder.
    """
    command = [sys.executable, "-m", "jupyterlab"]
    if folder is not None:
        command.append(f"--ServerApp.root_dir={folder}")
    if first is not None and not any(one.startswith(_FIRST_OPTION) for one in options):
        command.append(f"{_FIRST_OPTION}=/lab/tree/{quote(first.as_posix())}")
    return [*command, *options]


def lab_environment() -> dict[str, str]:
    """The environment in which JupyterLab's launcher shows the lessons and the kernel *Python 3 (ddp_lab)*.

    In a clone the package holds both, in `labextensions` and `kernels`. A wheel installs them where every JupyterLab of
    its environment searches.
    """
    places = (str(_PACKAGE), os.environ.get("JUPYTER_PATH"))
    return {**os.environ, "JUPYTER_PATH": os.pathsep.join(filter(None, places))}
