"""The message queue of a controller that takes over from one that was killed.

See [Note: a controller that takes over] in `ddp_lab.engine.processes.controller`. Engines and client reconnect one by
one, and messages to a peer that is not connected yet would be dropped: so nothing is forwarded until all are connected.
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.devices import ThreadMonitoredQueue

_SECONDS = 10.0  # one whose process was suspended, or has just ended, does not reconnect


class PatientQueue(ThreadMonitoredQueue):
    """ipyparallel's queue, which waits until all former peers are connected again.

    Attributes:
        expected: number of peers that will connect.
    """

    expected = 0

    def _setup_sockets(self) -> Any:
        binds = self._in_binds, self._out_binds
        self._in_binds, self._out_binds = [], []
        ins, outs, monitored = super()._setup_sockets()  # type: ignore[no-untyped-call]
        watches = [socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) for socket in (ins, outs)]
        for socket, addresses in zip((ins, outs), binds, strict=True):
            for address in addresses:
                socket.bind(address)
        deadline, come, poller = time.monotonic() + _SECONDS, 0, zmq.Poller()
        for watch in watches:
            poller.register(watch, zmq.POLLIN)
        while come < self.expected and (left := deadline - time.monotonic()) > 0:
            for watch, _ in poller.poll(int(left * 1e3) + 1):
                watch.recv_multipart()
                come += 1
        for socket in (ins, outs):
            socket.disable_monitor()
        return ins, outs, monitored
