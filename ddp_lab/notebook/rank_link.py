"""The debugger of one rank, as the notebook's side of it: requests over the wire, replies and events back."""

from __future__ import annotations

import asyncio
import functools
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError

if TYPE_CHECKING:
    from ..cluster.cluster import Cluster

__all__ = ["CLOSE_SECONDS", "OPEN_SECONDS", "RankLink"]

OPEN_SECONDS = 10.0
CLOSE_SECONDS = 5.0
_REPLY_SECONDS = 60.0  # evaluating what a user types may take long


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
        self._session.cells.listen(name, self._take)
        connections = self._session.wire.connections().get(self.rank, 0)
        answers = await self._request([self.rank], OPEN_SECONDS, do="open", name=name, prefix=self._prefix)
        answer = answers.get(self.rank, {"error": "it does not respond"})
        if problem := answer.get("problem") or answer.get("error"):
            self._session.cells.forget(name)
            raise ClusterError(f"rank {self.rank} can't be debugged: {problem}")
        self._name, self._connections = name, connections

    async def hold(self, on: bool) -> None:
        """Keeps the process groups' timeouts of all ranks from expiring, or no longer."""
        if self.cluster.running:
            await self._request(None, CLOSE_SECONDS, do="hold", on=on)

    async def close(self) -> None:
        """Ends it; a stopped rank continues."""
        if self._name and self.cluster.running and self.rank not in self._session.members.lost():
            await self._request([self.rank], CLOSE_SECONDS, do="close", name=self._name)
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
        answers = await self._request([self.rank], CLOSE_SECONDS, do="is_open", name=self._name)
        self._connections = connections
        return bool(answers.get(self.rank, {}).get("open"))

    def give_up(self) -> None:
        """Answers what still waits, and tells the front end that nothing is stopped."""
        if self._name:
            self._session.cells.forget(self._name)
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
        message = {"op": "debug", "do": "ask", "name": self._name, "number": number, "request": request}
        self._session.wire.send([self.rank], message)
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

    async def _request(self, ranks: Sequence[int] | None, seconds: float, **what: Any) -> dict[int, dict[str, Any]]:
        ask = functools.partial(self._session.wire.request, ranks, "debug", seconds, **what)
        return await self._loop.run_in_executor(None, ask)

    def _take(self, rank: int, kind: str, frames: Sequence[bytes]) -> None:
        """On the wire's thread."""
        content = json.loads(frames[0])
        self._loop.call_soon_threadsafe(self._arrived, kind, content)

    def _arrived(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "debug_reply":
            waiting = self._waiting.get(content["number"])
            if waiting is not None and not waiting.done():
                waiting.set_result(content["reply"])
            return
        if content["event"] == "stopped":
            self._stopped.add(content["body"]["threadId"])
        elif content["event"] == "continued":
            self._stopped.clear()
        self._publish(content)
