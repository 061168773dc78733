"""What passes messages on in a controller that takes over from one that was killed.

See [Note: a controller that takes over] in `ddp_lab.engine.processes.controller`. Engines and client connect again one
by one, and what one says to another that is not there yet would be dropped: so nothing is passed on until all are
there.
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.devices import ThreadMonitoredQueue

_SECONDS = 10.0  # one whose process was stopped, or has just ended, does not come


class PatientQueue(ThreadMonitoredQueue):
    """ipyparallel's queue, which waits until all that were there before are there again.

    Attributes:
        expected: how many will connect.
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
