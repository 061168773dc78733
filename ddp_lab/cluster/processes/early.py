"""A cluster's first processes, started before it is wanted: the controller, and the fork server, which imports torch.

[Note: early processes]
`%load_ext ddp_lab` starts them, or already the kernel (`ddp_lab.notebook.kernel`). Importing torch is most of a start:
a cluster that is wanted seconds later is ready in tenths of a second. They have the variables of a cluster with default
arguments. A cluster takes them if it would give its own processes the same ones; else it starts others. They end with
this process, or unused after `_UNUSED_SECONDS`. With DDP_LAB_EARLY=0 in the environment there are none.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...control.interrupts import held_back
from .devices import place
from .launchers import Controller, ForkServer, make_run_dir, process_environment

_OFF = "DDP_LAB_EARLY"
_UNUSED_SECONDS = 600.0
# Set by ipykernel while it starts; nothing reads them before ranks are forked, which get them then.
_SET_BY_KERNEL = {
    *("CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "GIT_PAGER", "MPLBACKEND", "PAGER", "PYDEVD_USE_FRAME_EVAL", "TERM")
}


@dataclass(frozen=True)
class Early:
    """Processes that no cluster has taken.

    Attributes:
        run_dir: a cluster's folder.
        controller: runs.
        server: runs.
        variables: those of the fork server that count.
        timer: ends them.
    """

    run_dir: Path
    controller: Controller
    server: ForkServer
    variables: Mapping[str, str]
    timer: threading.Timer

    @property
    def ended(self) -> bool:
        """Whether one of them has ended."""
        return self.server.failed or self.controller.ended is not None


_lock = threading.Lock()
_early: Early | None = None


def begin() -> None:
    """Starts early processes, unless there are some, or there can be none; returns at once."""
    global _early
    with held_back(), _lock:
        if _early is not None or os.environ.get(_OFF) == "0":
            return
        environment = place(None, None, {}).environment
        timer = threading.Timer(_UNUSED_SECONDS, end)
        timer.name, timer.daemon = "ddp_lab-early", True
        try:
            run_dir = make_run_dir()
        except OSError:  # the start of a cluster says why
            return
        controller, server = Controller(run_dir), ForkServer(run_dir, environment)
        _early = Early(run_dir, controller, server, _variables(environment), timer)
        try:
            server.start()
            controller.start()
            timer.start()
        except (OSError, RuntimeError):  # no further process or thread: the start of a cluster says so
            _end()


def take(environment: Mapping[str, str]) -> Early | None:
    """The early processes, if a cluster with these variables can use them; else they are ended.

    Args:
        environment: the cluster's variables, as `Placement.environment`.
    """
    global _early
    with held_back(), _lock:
        early = _early
        if early is None or early.variables != _variables(environment) or early.ended:
            _end()
            return None
        _early = None
        early.timer.cancel()
        return early


def set_by_kernel(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a cluster's variables those that early processes need not have, but its ranks."""
    return {name: value for name, value in {**os.environ, **environment}.items() if name in _SET_BY_KERNEL}


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What a fork server's variables would be now, but for those that the kernel sets."""
    made = process_environment(environment)
    return {name: value for name, value in made.items() if name not in _SET_BY_KERNEL}


def end() -> None:
    """Ends the early processes, if no cluster has taken them."""
    with held_back(), _lock:
        _end()


def _end() -> None:
    global _early
    early, _early = _early, None
    if early is None:
        return
    early.timer.cancel()
    early.server.kill()
    early.controller.stop()
    shutil.rmtree(early.run_dir, ignore_errors=True)
