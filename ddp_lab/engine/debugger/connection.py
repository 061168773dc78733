"""The debug adapter protocol over a socket: requests, each with its own response, and events.

pydevd answers some requests on the thread that they are about, so responses can arrive in another order than requests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Connection"]

_LENGTH = b"Content-Length:"


class Connection:
    """One connection to pydevd; owned by the event loop of the thread that makes it.

    Args:
        on_event: called with each event.
    """

    def __init__(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, connected: socket.socket) -> None:
        """Takes over a connected socket."""
        reader, self._writer = await asyncio.open_connection(sock=connected)
        self._reading = asyncio.create_task(self._read(reader))

    async def send_dap_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request and returns its response.

        Raises:
            ConnectionError: the debugger has ended.
        """
        if self._writer is None:
            raise ConnectionError("the debugger is not running")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        data = json.dumps({**request, "seq": number}, default=repr).encode()
        self._writer.write(b"%s %d\r\n\r\n%s" % (_LENGTH, len(data), data))
        response = await answer
        return {**response, "request_seq": request.get("seq", number)}

    def get_host_port(self) -> tuple[str, str]:
        """For ipykernel's debugger: there is no address."""
        return "", "0"

    async def close(self) -> None:
        """Ends the connection and all requests that wait."""
        writer, self._writer = self._writer, None
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if writer is not None:
            writer.close()
        self._give_up()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.startswith(_LENGTH))
                message = json.loads(await reader.readexactly(int(length.removeprefix(_LENGTH))))
                if message["type"] == "response":
                    waiting = self._waiting.pop(int(message["request_seq"]), None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                elif message["type"] == "event":
                    self._on_event(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._give_up()

    def _give_up(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the debugger has ended"))
