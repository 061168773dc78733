"""Where output is shown: updatable displays of a Jupyter kernel, the lines of a terminal, views of cells that run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["BlockDisplay", "FollowedCell", "KernelDisplay", "RunView", "kernel_shell", "write_line"]


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
