"""Where output is shown: displays of a Jupyter kernel, lines of a terminal, a line of progress, views of cells."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["BlockDisplay", "FollowedCell", "KernelDisplay", "ProgressLine", "RunView", "kernel_shell", "write_line"]

_WIDTH = 24
_INTERVAL_S = 0.05
_EIGHTHS = " ▏▎▍▌▋▊▉"


class BlockDisplay(Protocol):
    """Shows and replaces mime bundles by key."""

    def publish(self, key: str, data: Mapping[str, Any], metadata: Mapping[str, Any], update: bool) -> None:
        """Shows `data` under `key`, or replaces what `key` shows now."""


def kernel_shell() -> Any:
    """The IPython shell of this process if it runs in a Jupyter kernel, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


class KernelDisplay:
    """Updatable displays below the notebook cell that was running when this was made.

    Args:
        shell: the kernel's shell.
    """

    def __init__(self, shell: Any) -> None:
        self._publisher = shell.display_pub
        self._parent = getattr(shell.display_pub, "parent_header", None)

    def publish(self, key: str, data: Mapping[str, Any], metadata: Mapping[str, Any], update: bool) -> None:
        """See `BlockDisplay`; may be called from any thread, one at a time."""
        transient = {"display_id": key}
        if threading.current_thread() is threading.main_thread():
            self._publisher.publish(data=dict(data), metadata=dict(metadata), transient=transient, update=update)
            return
        # Off the main thread the publisher would file the display under whichever cell runs now.
        content = {"data": dict(data), "metadata": dict(metadata), "transient": transient}
        self._send("update_display_data" if update else "display_data", content)

    def error(self, name: str, value: str, traceback: Sequence[str]) -> None:
        """Shows an error below that cell, even after it has ended."""
        self._send("error", {"ename": name, "evalue": value, "traceback": list(traceback)})

    def _send(self, kind: str, content: Mapping[str, Any]) -> None:
        publisher = self._publisher
        publisher.session.send(publisher.pub_socket, kind, content, parent=self._parent, ident=publisher.topic)


def write_line(stream: str, text: str) -> None:
    """Writes one line to this process's stdout or stderr, whatever they are redirected to at the moment."""
    out = sys.stderr if stream == "stderr" else sys.stdout
    out.write(text + "\n")
    out.flush()


class FollowedCell(Protocol):
    """A cell that runs or has run, as far as it is displayed: see `ddp_lab.cluster.cells.run.CellRun`."""

    @property
    def label(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def headline(self) -> str: ...
    @property
    def report(self) -> str: ...
    @property
    def done(self) -> bool: ...
    @property
    def waits_for(self) -> tuple[str, ...]: ...
    def last_lines(self) -> str: ...
    def interrupt(self) -> None: ...


class RunView(Protocol):
    """Shows the progress of a background cell."""

    def show(self, run: FollowedCell) -> None:
        """Shows the run's state, from before it is sent to its end; called on the thread that follows the cell."""

    def show_again(self) -> None:
        """Shows the last state again, for front ends that missed updates between two cells."""


class ProgressLine:
    """A bar with a title and the current stage; call it from the main thread.

    Args:
        title: what is in progress.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._key = f"ddp_lab-{uuid.uuid4().hex[:12]}"
        shell = kernel_shell()
        self._display = KernelDisplay(shell) if shell is not None else None
        self._shown = False
        self._shown_s = 0.0
        self._begin_s = time.monotonic()
        self._last = ""

    def show(self, fraction: float, text: str) -> None:
        """Shows a fraction from 0 to 1 and a text, at most 20 times a second."""
        fraction = min(1.0, max(0.0, fraction))
        whole, rest = divmod(round(fraction * _WIDTH * 8), 8)
        bar = ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(_WIDTH)
        self._last = text or self._last
        now = time.monotonic()
        if self._shown and now - self._shown_s < _INTERVAL_S:
            return
        self._shown_s = now
        self._write(f"{self._title} ▕{bar}▏ {text}".rstrip(), final=False)

    def close(self, text: str) -> None:
        """Replaces the bar with a final text."""
        self._write(text, final=True)

    def fail(self) -> None:
        """Replaces the bar with the stage at which it failed."""
        seconds = time.monotonic() - self._begin_s
        self._write(f"✗ {self._title} failed after {seconds:.1f} s, while {self._last or 'starting'}", final=True)

    def _write(self, text: str, final: bool) -> None:
        if self._display is not None:
            self._display.publish(self._key, {"text/plain": text}, {}, self._shown)
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if final and text else ""))
            sys.stderr.flush()
        elif final and text:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        self._shown = True
