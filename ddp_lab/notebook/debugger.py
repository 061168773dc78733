"""JupyterLab's visual debugger, pointed at a rank: `%cluster debug 1`.

[Note: a debugger for a rank]
JupyterLab sends its debugger's requests to the notebook's kernel, on the control channel. We wrap the kernel's
`do_debug_request`: while a rank is chosen, requests go to that rank, and its events come back, over the wire. All else
is the rank's (`ddp_lab.engine.debugger`); plain cells are debugged as before while no rank is chosen. What the front
end has set (breakpoints, the text of cells) is remembered and sent to the next one that it is pointed at. Names of
cells begin with this kernel's own prefix on every rank, so that the front end need not ask again.

The event loop of the kernel's control thread owns all state of `DebuggerRelay`. The main thread and the wire's thread
only schedule work there.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import TimeoutError as NotInTime
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError
from ..formatting import label_of
from .rank_link import CLOSE_SECONDS, OPEN_SECONDS, RankLink

if TYPE_CHECKING:
    from ..cluster.cluster import Cluster

__all__ = ["chosen", "debug", "leave", "load", "unload"]

_LOOK_SECONDS = 0.2
_KEPT = ("initialize", "attach", "setExceptionBreakpoints")
_BY_FILE = {"dumpCell": "code", "setBreakpoints": "source"}
_TERMINAL = "the visual debugger needs a notebook in JupyterLab; in a terminal, call breakpoint() in the cell"
_NO_DEBUGPY = "the notebook's kernel has no debugger: `pip install debugpy` for its Python, then restart the kernel"
_BUSY = "the debugger is busy: run `%cluster debug` again when it is not starting"

_Own = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
_relay: DebuggerRelay | None = None


def load(shell: Any) -> None:
    """Makes the debugger of the shell's kernel ready for ranks, if it has one."""
    global _relay
    unload(shell)
    kernel = getattr(shell, "kernel", None)
    if getattr(kernel, "debugger", None) is not None and getattr(kernel, "control_thread", None) is not None:
        _relay = DebuggerRelay(kernel)


def unload(shell: Any) -> None:
    """Undoes that; a rank that is stopped continues."""
    global _relay
    if _relay is not None:
        leave()
        vars(shell.kernel).pop("do_debug_request", None)
    _relay = None


def debug(cluster: Cluster, rank: int | None) -> None:
    """Points the notebook's debugger at a rank, or with None at the notebook again.

    Raises:
        ClusterError: there is no such rank, or no debugger; the message says what to do.
    """
    from ..output.display import kernel_shell

    if rank is not None and not 0 <= rank < cluster.world_size:
        raise ClusterError(f"there is no rank {rank}: the cluster has {label_of(range(cluster.world_size))}")
    if _relay is None:
        raise ClusterError(_TERMINAL if kernel_shell() is None else _NO_DEBUGPY)
    _relay.call(_relay.point_at(None if rank is None else _relay.link(cluster, rank)))


def chosen() -> int | None:
    """The rank at which the debugger is pointed, None if at the notebook."""
    return _relay.rank if _relay is not None else None


def leave(cluster: Cluster | None = None) -> None:
    """Points the debugger at the notebook again if it is at a rank (of this cluster), which continues."""
    if _relay is not None and _relay.is_at(cluster):
        _relay.call(_relay.point_at(None))


class FrontEnd:
    """What the front end has asked for since it turned the debugger on."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str], dict[str, Any]] = {}

    def note(self, request: Mapping[str, Any]) -> None:
        """Keeps the requests that the next one who is debugged must get too."""
        command, given = request["command"], request.get("arguments") or {}
        if command in _KEPT:
            self._requests[command, ""] = copy.deepcopy(dict(request))
        elif command in _BY_FILE:
            self._requests[command, json.dumps(given.get(_BY_FILE[command]))] = copy.deepcopy(dict(request))

    def requests(self) -> list[dict[str, Any]]:
        """These, in an order in which they can be sent again."""
        order = ("initialize", "attach", "dumpCell", "setBreakpoints", "setExceptionBreakpoints")
        kept = sorted(self._requests.items(), key=lambda item: order.index(item[0][0]))
        done = {"type": "request", "seq": 0, "command": "configurationDone", "arguments": {}}
        return copy.deepcopy([*(request for _, request in kept), done])


class DebuggerRelay:
    """Sends the front end's requests to the kernel's own debugger or to a rank's.

    Args:
        kernel: of this notebook.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._own: _Own = kernel.do_debug_request
        self.loop: asyncio.AbstractEventLoop = kernel.control_thread.io_loop.asyncio_loop
        self._lock = asyncio.Lock()  # one change of the target at a time
        self._front: FrontEnd | None = None  # None: its debugger is off
        self._link: RankLink | None = None
        self._watch: asyncio.Task[None] | None = None
        self._later: asyncio.Task[None] | None = None  # what is about to be repeated to the kernel's own debugger
        kernel.do_debug_request = self.answer

    @property
    def rank(self) -> int | None:
        """The chosen rank."""
        link = self._link
        return None if link is None else link.rank

    def is_at(self, cluster: Cluster | None) -> bool:
        """Whether it is at a rank; of this cluster if one is given."""
        link = self._link
        return link is not None and cluster in (None, link.cluster)

    def call(self, work: Any) -> None:
        """Runs this on the control thread, and waits for it. For the main thread."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            future.result(OPEN_SECONDS + CLOSE_SECONDS)
        except NotInTime:
            future.cancel()
            raise ClusterError(_BUSY) from None

    def link(self, cluster: Cluster, rank: int) -> RankLink:
        """A link to a rank, not open yet."""
        return RankLink(cluster, rank, self.loop, self.publish, self.prefix())

    # On the control thread

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """In the place of the kernel's `do_debug_request`."""
        if (later := self._later) is not None:  # else both would turn the kernel's debugger on
            await asyncio.wait([later])
        command = request["command"]
        if command == "initialize":
            self._front = FrontEnd()
        if self._front is not None:
            self._front.note(request)
        async with self._lock:
            link = self._link
        reply = await (self._own(request) if link is None else link.ask(request))
        if command == "disconnect" or (command == "initialize" and not reply.get("success", True)):
            self._front = None
        return reply

    async def point_at(self, link: RankLink | None) -> None:
        """Changes the target; if the front end's debugger is on, the next one gets all that it has asked for."""
        async with self._lock:
            if link is not None:
                await link.open()
            if self._later is not None:
                self._later.cancel()
            former, self._link = self._link, link
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None
            if former is not None:
                await former.close()
                if link is None or link.cluster is not former.cluster:
                    await former.hold(False)
            elif self._front is not None:
                await self._own({"type": "request", "seq": 0, "command": "disconnect", "arguments": {}})
            if link is not None:
                await link.hold(True)
                self._watch = asyncio.create_task(self._look(link))
                await self._repeat(link.ask)
        if link is None and self._front is not None:
            # Not waited for: the kernel's debugger needs the main thread to start, which may wait for this.
            self._later = asyncio.create_task(self._repeat_to_the_notebook())

    async def _repeat_to_the_notebook(self) -> None:
        await asyncio.sleep(_LOOK_SECONDS)
        # Once begun it is finished, whatever the debugger is pointed at meanwhile.
        await asyncio.shield(self._repeat(self._own))

    async def _repeat(self, ask: _Own) -> None:
        for request in self._front.requests() if self._front is not None else ():
            await ask(request)

    async def _look(self, link: RankLink) -> None:
        """Notices that a rank has no process any more, or another one, or no cluster."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if not link.cluster.running:
                self._watch = None  # which is this task
                await self.point_at(None)
                return
            if link.ended() and not await link.is_open():
                link.give_up()
                try:
                    await link.open()
                except ClusterError:  # it has no process yet
                    continue
                await self._repeat(link.ask)

    def publish(self, event: dict[str, Any]) -> None:
        """Shows the front end an event."""
        self._kernel._publish_debug_event(event)

    def prefix(self) -> str:
        """With which this kernel's names of cells begin."""
        from ipykernel.compiler import get_tmp_directory

        return f"{get_tmp_directory()}{os.sep}"  # type: ignore[no-untyped-call]
