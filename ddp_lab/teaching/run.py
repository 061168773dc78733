"""Runs a student's notebook in a kernel of its own; nothing that it does ends the caller."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DdpLabError
from .copies import copy_support

_ANSWERS_WITHIN = 20  # seconds in which an interrupted cell must end
_TOO_LONG = "TooLong"


@dataclass(frozen=True)
class Limits:
    """How long a notebook may run, in seconds.

    Attributes:
        cell: a cell that takes longer is interrupted; the notebook continues.
        notebook: the whole notebook; it ends there.
    """

    cell: float = 120.0
    notebook: float = 1200.0


@dataclass
class Run:
    """What came of running a notebook; the outputs are in its cells.

    Attributes:
        ran: indices of the cells that ran.
        stopped: index of a cell -> why it was interrupted.
        problem: why the notebook ended early; "" if it did not.
    """

    ran: set[int] = field(default_factory=set)
    stopped: dict[int, str] = field(default_factory=dict)
    problem: str = ""


def need_nbclient() -> None:
    """Imports nbclient and nbformat, which run notebooks.

    Raises:
        DdpLabError: nbclient or nbformat is not installed.
    """
    from ..output import quick_nbformat

    quick_nbformat.install()
    try:
        import nbclient  # noqa: F401
        import nbformat  # noqa: F401
    except ImportError as error:
        raise DdpLabError(f"{error.name} is not installed: run `pip install 'ddp_lab[notebooks]'`") from error


def run(notebook: Any, last: int, limits: Limits) -> Run:
    """Runs the code cells in order, beside the lessons' own checks and recordings; an error does not end it.

    Args:
        notebook: of nbformat; outputs that are stored in it are removed.
        last: index of the last cell to run.
        limits: of time.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory(prefix="ddp_lab-class-", ignore_cleanup_errors=True) as private:
        folder, runtime = Path(private, "tutorials"), Path(private, "runtime")
        runtime.mkdir(mode=0o700)
        copy_support(folder)
        return _in_a_kernel(notebook, last, limits, folder, runtime)


def _in_a_kernel(notebook: Any, last: int, limits: Limits, folder: Path, runtime: Path) -> Run:
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    done, ends = Run(), time.monotonic() + limits.notebook

    def note(cell: Any, cell_index: int, execute_reply: Any) -> None:
        if execute_reply["content"].get("ename") == _TOO_LONG:
            done.stopped[cell_index] = f"ran longer than {_limit(limits, ends)}"

    class Client(NotebookClient):
        def output(self, outs: Any, msg: Any, display_id: str | None, cell_index: int) -> Any:
            """Drops what is printed: nobody reads it, and a loop may print without end."""
            return None if msg["msg_type"] == "stream" else super().output(outs, msg, display_id, cell_index)

    # Sockets are files that only this user can open, not TCP ports.
    kernel = AsyncKernelManager(transport="ipc", connection_file=str(runtime / "kernel.json"))
    client = Client(
        notebook,
        kernel,
        allow_errors=True,
        timeout_func=lambda cell: max(1.0, min(limits.cell, ends - time.monotonic())),
        interrupt_on_timeout=True,
        error_on_timeout={"ename": _TOO_LONG},
        iopub_timeout=_ANSWERS_WITHIN,  # of an interrupted cell, too
        raise_on_iopub_timeout=True,
        on_cell_error=note,
        resources={"metadata": {"path": str(folder)}},
    )
    client.owns_km = True  # it ends the kernel too
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(runtime)}  # the user's detached clusters stay out of reach
    place = "while it started"
    try:
        with client.setup_kernel(env=environment):
            for index, cell in enumerate(notebook.cells[: last + 1]):
                if time.monotonic() >= ends:
                    done.problem = f"the notebook ran longer than {limits.notebook:g} s"
                    break
                place = f"in cell {index + 1}"
                client.execute_cell(cell, index)
                done.ran.add(index)
    except CellTimeoutError:
        done.problem = f"the notebook ended {place}, which ran too long and ignored an interrupt"
    except DeadKernelError:
        done.problem = f"the kernel died {place}"
    except RuntimeError as error:
        done.problem = f"the kernel failed {place}: {error}"
    return done


def _limit(limits: Limits, ends: float) -> str:
    """The limit that a cell has reached: its own, or the notebook's."""
    return f"{limits.cell:g} s" if time.monotonic() < ends else f"the {limits.notebook:g} s of the notebook"
