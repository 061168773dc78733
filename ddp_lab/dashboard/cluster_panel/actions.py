"""The buttons of the cluster's panel: interrupt, rejoin, restart, export.

[Note: between two cells]
An interrupt is a message to the ranks, and may be sent at any time from any thread. Rejoin and restart replace process
groups or processes: they must not happen while the notebook's main thread sends a cell to the ranks or waits for one.
So the main thread itself runs them in its event loop, between two cells. If a cell blocks it, the request is dropped
rather than run later, unexpectedly: the panel shows what to do first.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import DdpLabError
from ...formatting import label_of
from ...output.display import kernel_shell

if TYPE_CHECKING:
    from ...control.ranks import Ranks

__all__ = ["ClusterActions", "between_cells"]

_PATIENCE_SECONDS = 0.5  # enough for the main thread, unless it runs a cell
_SAID_SECONDS, _ERROR_SECONDS = 20.0, 60.0  # how long a result or an error is shown
_HEALTH_SECONDS = 2.0  # a responsive rank answers sooner, even on a busy machine
_BUSY = "The notebook is running a cell. Interrupt it (Interrupt, or ■ in the notebook) or wait for its end, then {}."


def between_cells(action: Callable[[], None], patience: float = _PATIENCE_SECONDS) -> bool:
    """Has the notebook's main thread call `action` between two cells; without a kernel, calls it at once.

    Returns:
        Whether it was called, or is being called; False: a cell blocked the thread for `patience` seconds, and it will
        not be called.
    """
    kernel = getattr(kernel_shell(), "kernel", None)
    loop = getattr(kernel, "io_loop", None)
    if loop is None or threading.current_thread() is threading.main_thread():
        action()
        return True
    turn = _Turn(action)
    loop.add_callback(turn.take)
    return turn.wait(patience)


class _Turn:
    """A call that either begins before a timeout or never."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._given_up = False

    def take(self) -> None:
        with self._lock:
            if self._given_up:
                return
            self._begun.set()
        self._action()

    def wait(self, seconds: float) -> bool:
        if not self._begun.wait(seconds):
            with self._lock:
                self._given_up = not self._begun.is_set()
        return not self._given_up


class ClusterActions:
    """Runs the browser's requests, and reports their results. One thread at a time.

    Args:
        cluster: the cluster to act on.
    """

    def __init__(self, cluster: Ranks) -> None:
        self._cluster = cluster
        self._heard: list[str] = []
        self._said, self._error, self._confirm = "", "", ""
        self._asked_at = 0.0
        self._doing = ""  # "rejoin" or "restart" while it is in progress
        self._progress: tuple[float, str] = (0.0, "")

    @property
    def changing(self) -> bool:
        """Whether ranks are being rejoined or restarted: they can't take requests."""
        return bool(self._doing)

    def shown(self) -> dict[str, Any]:
        """What the browser shows: the texts ``said``, ``error`` and ``confirm`` (a question), and the progress."""
        seconds = time.monotonic() - self._asked_at
        if seconds > _SAID_SECONDS or not self._cluster.running:
            self._said = ""
        if seconds > _ERROR_SECONDS and self._cluster.running:  # else the error may be why it is not running
            self._error = ""
        fraction, text = self._progress
        return {
            "heard": list(self._heard),
            "said": self._said,
            "error": self._error,
            "confirm": self._confirm,
            "doing": self._doing,
            "fraction": round(fraction, 2),
            "stage": text,
        }

    def obey(self, command: dict[str, Any]) -> None:
        """Runs ``{"do": "interrupt" | "rejoin" | "restart" | "cancel" | "export", "ranks": ..., "sure": ...}``."""
        self._heard = [*self._heard[-9:], str(command.get("id"))]
        self._said = self._error = self._confirm = ""
        self._asked_at = time.monotonic()
        do = command.get("do")
        try:
            if self.changing:
                raise DdpLabError(f"A {self._doing} is already in progress. Wait for it to finish.")
            if not self._cluster.running and do != "cancel":
                raise DdpLabError("The cluster is not running.")
            if do == "interrupt":
                self._interrupt(command.get("ranks"))
            elif do == "rejoin":
                self._rejoin()
            elif do == "restart" and command.get("sure"):
                self._replace("restart", lambda: self._cluster.restart(self._show_progress), "variables are lost")
            elif do == "restart":
                self._ask_restart()
            elif do == "export":
                self._export()
        except (DdpLabError, ValueError) as error:
            self._error = str(error)

    def _interrupt(self, ranks: list[int] | None) -> None:
        busy = self._cluster.busy_ranks()
        asked = busy if ranks is None else busy & set(ranks)
        if not asked:
            who = "No rank is" if ranks is None else f"{label_of(ranks).capitalize()} is not"
            self._say(f"{who} running a cell: nothing to interrupt.")
            return
        self._cluster.interrupt(ranks)
        others = "; ranks that wait for it are unblocked" if asked != busy else ""
        self._say(f"Interrupt sent to {label_of(asked)}{others}.")

    def _rejoin(self) -> None:
        busy = self._cluster.busy_ranks()
        if busy:
            raise DdpLabError(
                f"{label_of(busy).capitalize()} {_run(busy)} a cell. Interrupt it or wait for its end, then rejoin."
            )
        silent = [one.record.rank for one in self._cluster.health(_HEALTH_SECONDS) if one.record.state == "silent"]
        if silent:
            raise DdpLabError(f"{label_of(silent).capitalize()} can't rejoin: no response. Wait, or restart the ranks.")
        self._replace("rejoin", lambda: self._cluster.rejoin(), "variables kept")

    def _export(self) -> None:
        """Runs `%cluster export` between two cells, with the notebook's name for the script."""
        shell = kernel_shell()
        if shell is None or shell.find_line_magic("cluster") is None:
            raise DdpLabError(
                "The notebook has not noted its cells. Run `%load_ext ddp_lab`, then the cells, then export."
            )
        script = Path(os.environ.get("JPY_SESSION_NAME") or "exported").with_suffix(".py").name
        if not between_cells(lambda: self._write(shell, script)):
            raise DdpLabError(_BUSY.format("export"))

    def _write(self, shell: Any, script: str) -> None:
        """Runs on the main thread."""
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                shell.run_line_magic("cluster", f"export {shlex.quote(script)}")
            said = printed.getvalue().partition(";")[0]
            self._say(f"{said[:1].upper()}{said[1:]}.")
        except Exception as error:  # noqa: BLE001 - the top of a call of the event loop: shown in the panel
            self._error = str(error)

    def _ask_restart(self) -> None:
        if not between_cells(lambda: None):
            raise DdpLabError(_BUSY.format("restart"))
        busy = self._cluster.busy_ranks()
        cell = f" The cell on {label_of(busy)} is stopped." if busy else ""
        self._confirm = (
            f"Restart {label_of(range(self._cluster.world_size))}? New processes start; all variables on the ranks "
            f"are lost.{cell}"
        )

    def _replace(self, doing: str, action: Callable[[], object], kept: str) -> None:
        """Rejoins or restarts between two cells; see [Note: between two cells]."""
        self._doing, self._progress = doing, (0.0, "")
        begun = False
        try:
            begun = between_cells(lambda: self._work(doing, action, kept))
        finally:
            if not begun:
                self._doing = ""
        if not begun:
            raise DdpLabError(_BUSY.format(doing))

    def _work(self, doing: str, action: Callable[[], object], kept: str) -> None:
        """Runs on the main thread."""
        begin = time.monotonic()
        try:
            action()
            done = {"rejoin": "rejoined", "restart": "restarted"}[doing]
            ranks = label_of(range(self._cluster.world_size)).capitalize()
            self._say(f"{ranks} {done} in {time.monotonic() - begin:.1f} s; {kept}.")
        except Exception as error:  # noqa: BLE001 - the top of a call of the event loop: shown in the panel
            known = isinstance(error, DdpLabError | ValueError)
            self._error = str(error) if known else f"{type(error).__name__}: {error}"
        finally:
            self._doing = ""

    def _show_progress(self, fraction: float, text: str) -> None:
        self._progress = (fraction, text)

    def _say(self, text: str) -> None:
        self._said, self._asked_at = text, time.monotonic()


def _run(ranks: set[int]) -> str:
    return "is running" if len(ranks) == 1 else "are running"
