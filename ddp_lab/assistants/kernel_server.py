"""Serves this process's clusters to assistants: `%cluster mcp` and `ddp_lab.serve_mcp`.

[Note: who owns what of a server]
The server's thread owns the event loop, its connections and nothing else. Each tool call has a thread of its own, asks
the ranks over the wire, and reads timelines under their locks. The thread that starts and stops the server owns its
socket, token and entry. A cell of an assistant is sent by the tool's thread, in the order of `CellRunner`; its follower
shows it, as any cell that runs in the background.
"""

from __future__ import annotations

import atexit
import hmac
import html
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..cluster.cluster import Cluster, current_cluster
from ..errors import ClusterError
from ..formatting import label_of
from ..output.board import Board, LineBoard, OutputBoard
from ..output.display import BlockDisplay, FollowedCell, KernelDisplay, RunView, kernel_shell, write_line
from ..output.terminal import plain
from . import rendezvous
from .library import needed

if TYPE_CHECKING:
    import uvicorn

__all__ = ["KernelServer", "serve_mcp"]

_START_SECONDS = 30.0


class KernelServer:
    """Serves the current cluster of this process to assistants of this user, until `stop`. A context manager.

    Args:
        allow_run: whether assistants may run cells.

    Raises:
        DdpLabError: the `mcp` library is missing, or the socket can't be made.

    Attributes:
        allow_run: whether assistants may run cells.
    """

    def __init__(self, allow_run: bool = False) -> None:
        self.allow_run = allow_run
        self._pid = os.getpid()
        self._last: Cluster | None = None
        self._display = None if (shell := kernel_shell()) is None else KernelDisplay(shell)
        with needed():
            from .cluster_tools import CellTool

            self._cells = CellTool(self._running_cluster, self._shown)
        self._door = rendezvous.Door()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._server = self._made_server(self._door.invitation.token)
        self._thread = threading.Thread(target=self._serve, name="ddp_lab-mcp", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        try:
            if not self._ready.wait(_START_SECONDS) or self._error is not None:
                raise ClusterError(f"assistants can't be served: {self._error or 'the server does not start'}")
            self._door.open()
        except BaseException:
            self.stop()
            raise

    @property
    def serving(self) -> bool:
        """Whether assistants get answers."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stops serving; a cell that an assistant runs is interrupted. No effect if it is stopped."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.stop)
        self._cells.close()
        self._server.should_exit = True
        self._thread.join()
        self._door.close()

    def __enter__(self) -> KernelServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        may = "read and run cells" if self.allow_run else "read"
        return f"<KernelServer: {f'assistants may {may}' if self.serving else 'stopped'}>"

    def cluster(self) -> Cluster:
        """The current cluster; if none runs, the last one, whose timeline is kept.

        Raises:
            ClusterError: there was none yet.
        """
        self._last = current_cluster() or self._last
        if self._last is None:
            raise ClusterError("no cluster is running: start one in the notebook with `%cluster start`")
        return self._last

    def _running_cluster(self) -> Cluster:
        cluster = self.cluster()
        if not cluster.running:
            raise ClusterError(f"cluster {cluster.name} is stopped: start one in the notebook with `%cluster start`")
        return cluster

    def _made_server(self, token: str) -> uvicorn.Server:
        with needed():
            from .cluster_tools import ClusterTools
            from .http_transport import http_server
            from .timeline_tools import Read, TimelineTools

        def read() -> Read:
            cluster = self.cluster()
            return Read(cluster.timeline, cluster.link)

        tools: list[Callable[..., Any]] = [*ClusterTools(self.cluster).all(), *TimelineTools(read).all()]
        if self.allow_run:
            tools.append(self._cells.run_cell)
        return http_server(tools, lambda given: hmac.compare_digest(given.encode(), token.encode()), self._ready.set)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._door.listener])
        except BaseException as error:  # noqa: BLE001  the thread's top: raised where the server is started
            self._error = error
        finally:
            self._ready.set()

    def _shown(self, ranks: Sequence[int], code: str) -> tuple[Board, RunView]:
        """Below the cell that started the server, or as lines."""
        board: Board = LineBoard() if self._display is None else OutputBoard(self._display)
        return board, ShownCell(self._display, code, ranks)


_current: KernelServer | None = None


def serve_mcp(allow_run: bool = False) -> KernelServer:
    """Lets assistants of this user read this process's current cluster, over the Model Context Protocol.

    An assistant starts `ddp-lab mcp`, which finds this process. Nothing listens on a port; each request needs a token
    that is in a private file. A server that this process has already is replaced. It ends with the process.

    Args:
        allow_run: whether assistants may run cells on the ranks. The notebook shows each with its outcome.

    Raises:
        DdpLabError: the `mcp` library is missing (`pip install 'ddp_lab[mcp]'`), or the socket can't be made.

    Example:
        >>> server = ddp_lab.serve_mcp()
        >>> server.stop()
    """
    global _current
    stop_mcp()
    _current = KernelServer(allow_run)
    return _current


def stop_mcp() -> bool:
    """Ends what `serve_mcp` started; returns whether there was a server."""
    global _current
    server, _current = _current, None
    if server is None or not server.serving:
        return False
    server.stop()
    return True


class ShownCell:
    """A block below the cell that started the server, kept up to date; in a terminal, lines. See `RunView`.

    Args:
        display: shows blocks; None: lines are printed.
        code: the cell.
        ranks: where it runs.
    """

    def __init__(self, display: BlockDisplay | None, code: str, ranks: Sequence[int]) -> None:
        self._display, self._code, self._where = display, code, label_of(ranks)
        self._key = f"ddp_lab-assistant-{uuid.uuid4().hex[:12]}"
        self._lock = threading.Lock()  # the follower shows it, and the tool's thread before it is sent
        self._state = ""

    def show(self, run: FollowedCell) -> None:
        """See `RunView`."""
        with self._lock:
            first, changed = not self._state, run.state != self._state
            self._state = run.state
            if not changed:
                return
            title = f"An assistant runs {run.label} on {self._where}: {run.headline}"
            if run.done:
                title = f"An assistant ran {run.label} on {self._where}: {run.headline}"
            report = plain(run.report)
            if self._display is None:
                self._print(title, report, first)
                return
            text = "\n".join(filter(None, (title, self._code, report)))
            page = f"<p>{html.escape(title)}</p><pre>{html.escape(self._code)}</pre>"
            page += f"<pre>{html.escape(report)}</pre>" if report else ""
            self._display.publish(self._key, {"text/plain": text, "text/html": page}, {}, not first)

    def show_again(self) -> None:
        """See `RunView`: the block stays as it is."""

    def _print(self, title: str, report: str, first: bool) -> None:
        for line in [title, *(self._code.splitlines() if first else ()), *report.splitlines()]:
            write_line("stdout", line)
