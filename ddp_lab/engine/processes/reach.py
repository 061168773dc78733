"""A fork server's tests of the network before ranks start: by which address and interface hosts reach it.

Host names are not reliable: a name may resolve to loopback, to an address of another network, or not at all. So the
system is asked which address it would send from (`route`), and connections to listeners are tried (`meet`, `reach`).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from ... import machine


class Meeting:
    """Answers a client's questions about the network; the socket it may hold is closed by the next `meet`."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to a command, None if it is not such a question.

        ``route``: ``address`` and ``interface`` from which this host reaches ``to``. ``meet``: the ``port`` of a socket
        that listens on ``address`` (None: the former one is closed). ``reach``: whether (``targets``: pairs of address
        and port) can be connected to within ``seconds``. A failure is returned as ``error``.
        """
        kinds = {"route": self._route, "meet": self._meet, "reach": self._reach}
        if command["op"] not in kinds:
            return None
        try:
            return kinds[command["op"]](command)
        except OSError as error:
            return {"error": error.strerror or str(error)}

    def _route(self, command: Mapping[str, Any]) -> dict[str, Any]:
        address = machine.local_address(command["to"])
        return {"address": address, "interface": machine.interface_of(address)}

    def _meet(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if command["address"] is None:
            return {}
        self._listener = socket.create_server((command["address"], 0))
        return {"port": self._listener.getsockname()[1]}

    def _reach(self, command: Mapping[str, Any]) -> dict[str, Any]:
        for address, port in command["targets"]:
            try:
                with contextlib.closing(socket.create_connection((address, port), command["seconds"])):
                    pass
            except OSError as error:
                return {"error": error.strerror or str(error), "target": [address, port]}
        return {}
