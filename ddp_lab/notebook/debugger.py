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
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as NotInTime
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError
from ..formatting import label_of
from ..protocol.messages import (
    CloseDebugger,
    DebuggerState,
    DebugReply,
    DebugRequest,
    GetDebugger,
    HoldDebugTimeouts,
    OpenDebugger,
    Request,
    read,
)

if TYPE_CHECKING:
    from ..cluster.cluster import Cluster
    from ..protocol.messages import Replies

__all__ = ["chosen", "debug", "leave", "load", "unload"]

_LOOK_SECONDS = 0.2
_KEPT = ("initialize", "attach", "setExceptionBreakpoints")
_BY_FILE = {"dumpCell": "code", "setBreakpoints": "source"}
_TERMINAL = "the visual debugger needs a notebook in JupyterLab; in a terminal, call breakpoint() in the cell"
_NO_DEBUGPY = "the notebook's kernel has no debugger: `pip install debugpy` for its Python, then restart the kernel"
_BUSY = "the debugger is busy: run `%cluster debug` again when it is not starting"
_OPEN_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_REPLY_SECONDS = 60.0  # evaluating what a user types may take long

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
            future.result(_OPEN_SECONDS + _CLOSE_SECONDS)
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


class RankLink:
    """The debugger of one rank, as its client; owned by the control thread.

    Args:
        cluster: the rank's.
        rank: the rank.
        loop: of the control thread.
        publish: takes its events.
        prefix: with which the front end's names of cells begin.
    """

    def __init__(
        self,
        cluster: Cluster,
        rank: int,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[dict[str, Any]], None],
        prefix: str,
    ) -> None:
        self.cluster, self.rank = cluster, rank
        self._loop, self._publish, self._prefix = loop, publish, prefix
        self._name = ""
        self._session = cluster.session
        self._connections = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._stopped: set[int] = set()

    async def open(self) -> None:
        """Begins to debug the rank; its processes run on as before until the front end asks for more.

        Raises:
            ClusterError: the rank can't be debugged; the message says why.
        """
        if self.rank in self._session.members.lost():
            raise ClusterError(f"rank {self.rank} has failed (`%cluster rejoin` starts a new process for it)")
        name = f"debug-{uuid.uuid4().hex}"
        self._session.wire.listen(name, self._take)
        connections = self._session.wire.connections().get(self.rank, 0)
        answers = await self._request([self.rank], OpenDebugger(name, self._prefix), _OPEN_SECONDS)
        silent = DebuggerState("it does not respond")
        if problem := answers.errors.get(self.rank) or answers.get(self.rank, silent).problem:
            self._session.wire.unlisten(name)
            raise ClusterError(f"rank {self.rank} can't be debugged: {problem}")
        self._name, self._connections = name, connections

    async def hold(self, on: bool) -> None:
        """Keeps the process groups' timeouts of all ranks from expiring, or no longer."""
        if self.cluster.running:
            await self._request(None, HoldDebugTimeouts(on), _CLOSE_SECONDS)

    async def close(self) -> None:
        """Ends it; a stopped rank continues."""
        if self._name and self.cluster.running and self.rank not in self._session.members.lost():
            await self._request([self.rank], CloseDebugger(self._name), _CLOSE_SECONDS)
            await asyncio.sleep(0)  # its last events are scheduled already
        self.give_up()

    def ended(self) -> bool:
        """Whether the process that was debugged is no longer the rank's."""
        if not self._name or self.rank in self._session.members.lost():
            return True
        return self._session.wire.connections().get(self.rank, 0) != self._connections

    async def is_open(self) -> bool:
        """Whether the rank still knows it: then only a connection was replaced."""
        connections = self._session.wire.connections().get(self.rank, 0)
        if not self._name or self.rank in self._session.members.lost():
            return False
        answers = await self._request([self.rank], GetDebugger(self._name), _CLOSE_SECONDS)
        self._connections = connections
        return self.rank in answers and answers[self.rank].is_open

    def give_up(self) -> None:
        """Answers what still waits, and tells the front end that nothing is stopped."""
        if self._name:
            self._session.wire.unlisten(self._name)
        self._name = ""
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_result({})
        for thread in self._stopped:
            body = {"threadId": thread, "allThreadsContinued": True}
            self._publish({"type": "event", "event": "continued", "seq": 0, "body": body})
        self._stopped.clear()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The rank's response to a request; a failure in its place if there is none."""
        if not self._name:
            return self._failure(request, f"rank {self.rank} has no process at the moment")
        self._number += 1
        number, answer = self._number, self._loop.create_future()
        self._waiting[number] = answer
        self._session.wire.send([self.rank], DebugRequest(self._name, number, request))
        await asyncio.wait([answer], timeout=_REPLY_SECONDS)
        self._waiting.pop(number, None)
        if not answer.done():
            return self._failure(request, f"rank {self.rank} did not answer within {_REPLY_SECONDS:.0f} s")
        return answer.result() or self._failure(request, f"rank {self.rank} has no process any more")

    def _failure(self, request: Mapping[str, Any], why: str) -> dict[str, Any]:
        command = request["command"]
        made = {"type": "response", "request_seq": request.get("seq", 0), "command": command}
        if command == "debugInfo":
            return {**made, "success": True, "body": self._nothing()}
        return {**made, "success": command == "disconnect", "message": why, "body": {}}

    def _nothing(self) -> dict[str, Any]:
        """A front end that has no such answer breaks."""
        from ipykernel.compiler import get_tmp_hash_seed

        seed = get_tmp_hash_seed()  # type: ignore[no-untyped-call]
        body = {"isStarted": False, "hashMethod": "Murmur2", "hashSeed": seed, "tmpFileSuffix": ".py"}
        lists: dict[str, Any] = {"breakpoints": [], "stoppedThreads": [], "exceptionPaths": []}
        return {**body, **lists, "tmpFilePrefix": self._prefix, "richRendering": True, "copyToGlobals": True}

    async def _request(
        self, ranks: Sequence[int] | None, request: Request[DebuggerState], seconds: float
    ) -> Replies[DebuggerState]:
        return await self._loop.run_in_executor(None, self._session.wire.request, ranks, request, seconds)

    def _take(self, rank: int, kind: str, frames: Sequence[bytes]) -> None:
        """On the wire's thread."""
        content = json.loads(frames[0])
        self._loop.call_soon_threadsafe(self._arrived, kind, content)

    def _arrived(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "debug_reply":
            answer = read(DebugReply, content)
            waiting = self._waiting.get(answer.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(dict(answer.reply))
            return
        if content["event"] == "stopped":
            self._stopped.add(content["body"]["threadId"])
        elif content["event"] == "continued":
            self._stopped.clear()
        self._publish(content)
