"""The sockets of a `Wire`: on ports that the system picks, or in a folder; encrypted, and open to only one key."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import zmq
from zmq.utils import z85

DATA_QUEUE = 128  # messages of one rank queued here (75 MB at most), before that rank's own queue fills
_HANDSHAKE_MS = 3_000  # until a silent connection is closed, so that no stranger can use up this process's descriptors
MAX_MESSAGE = 64 << 20  # bytes; ranks send far smaller batches


class WireSockets:
    """PULL for data, ROUTER for control, the gate that libzmq asks about each connection, and a pipe that wakes.

    One thread uses the sockets, and closes them; any thread may `wake` it.

    Args:
        address: as `Wire`.
        keys: as `Wire`.

    Attributes:
        endpoint: addresses and keys for the ranks, JSON-able.
        refused: connections turned away because they did not hold the ranks' key.
        keys: the keys of these sockets: secret.
        waker: file descriptor that is readable after `wake`.
    """

    def __init__(self, address: str, keys: Mapping[str, str] | None = None) -> None:
        self.refused = 0
        self._context = zmq.Context(io_threads=1)
        self.waker, self._wake_write = os.pipe()
        os.set_blocking(self.waker, False)
        os.set_blocking(self._wake_write, False)
        self.keys = dict(keys) if keys is not None else _new_keys()
        server_secret = self.keys["server_secret"].encode()
        self._admitted = z85.decode(self.keys["client_public"])
        # Before the others bind: from then on libzmq asks it about every connection of this context.
        self.gate = self._context.socket(zmq.REP)
        self.gate.linger = 0
        self.gate.bind("inproc://zeromq.zap.01")
        self.data = self._listen(zmq.PULL, server_secret)
        self.data.set_hwm(DATA_QUEUE)
        self.control = self._listen(zmq.ROUTER, server_secret)
        self.control.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.control.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint = {
            "data": self._bind(self.data, address, "data"),
            "control": self._bind(self.control, address, "control"),
            **{name: key for name, key in self.keys.items() if name != "server_secret"},
        }

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], address: str, name: str) -> str:
        if "/" not in address:
            return f"tcp://{address}:{socket.bind_to_random_port(f'tcp://{address}')}"
        path = Path(address, name)
        socket.bind(f"ipc://{path}")
        path.chmod(0o600)
        return f"ipc://{path}"

    def _listen(self, kind: int, secret: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.curve_server = True
        socket.curve_secretkey = secret
        socket.zap_domain = b"ddp_lab"
        return socket

    def admit(self) -> None:
        """Answers libzmq's question about one connection (ZAP, rfc.zeromq.org/spec/27)."""
        question = self.gate.recv_multipart()
        admitted = question[5:] == [b"CURVE", self._admitted]
        if not admitted:
            self.refused += 1
        status = [b"200", b"OK"] if admitted else [b"400", b"unknown key"]
        version, number = question[:2]
        self.gate.send_multipart([version, number, *status, b"", b""])

    def wake(self) -> None:
        """Makes `waker` readable. Any thread."""
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nothing listens
            os.write(self._wake_write, b"x")

    def clear_waker(self) -> None:
        """Drains `waker`."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.waker, 4096):
                pass

    def close(self, linger: float = 0.0) -> None:
        """Closes the sockets, on the thread that uses them; messages to ranks have `linger` seconds to be sent."""
        self.control.linger = int(1e3 * linger)
        for socket in (self.data, self.control, self.gate):
            socket.close()

    def release(self) -> None:
        """Ends the rest, after `close`."""
        self._context.term()
        os.close(self._wake_write)
        os.close(self.waker)


def _new_keys() -> dict[str, str]:
    made = {}
    for side in ("server", "client"):
        public, secret = zmq.curve_keypair()
        made[f"{side}_public"], made[f"{side}_secret"] = public.decode("ascii"), secret.decode("ascii")
    return made
