"""`ddp-lab run --serve`: the journals of this host's ranks, while they grow, for `ddp_lab.follow`.

[Note: attaching to a run]
The process that runs torch's agent listens on one port. A client asks, 20 times a second, for the parts of the journals
that it does not have; the answer is made from the files alone. So the ranks are not involved, a slow or failed client
costs them nothing, a late client gets everything recorded before, and one port is enough for a tunnel. The connection
is CurveZMQ's: the token contains the server's public key and the only client key that is accepted. It is in a file that
only the user can read.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from ..protocol import journal

__all__ = ["JournalServer"]

INVITATION = "attach.json"

_log = logging.getLogger(__name__)


class JournalServer:
    """Answers holders of the token, on a thread, until `close`.

    Args:
        folder: of the journals; the address and the token are written to a file in it.
        address: ``"host:port"``, or only a host: then the system picks the port.

    Raises:
        zmq.ZMQError: it can't listen at the address.
        OSError: the folder is not writable.

    Attributes:
        address: ``"host:port"`` on which it listens.
        invitation: the file.
        unanswered: number of invalid requests.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        self._folder = folder
        self.unanswered = 0
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._admitted = z85.decode(client_public)
        self._context = zmq.Context(io_threads=1)
        # Before the other binds: from then on libzmq asks it about every connection of this context.
        self._gate = self._context.socket(zmq.REP)
        self._gate.linger = 0
        self._gate.bind("inproc://zeromq.zap.01")
        self._door = self._context.socket(zmq.ROUTER)
        self._door.linger = 0
        self._door.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
        self._door.curve_server = True
        self._door.curve_secretkey = server_secret
        self._door.zap_domain = b"ddp_lab"
        token = base64.urlsafe_b64encode(z85.decode(server_public) + z85.decode(client_secret)).decode()
        try:
            self.address = self._listen(address)
            self.invitation = self._invite(token)
        except (zmq.ZMQError, OSError):
            self._context.destroy()
            raise
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="ddp_lab-serve", daemon=True)
        self._thread.start()

    def _listen(self, address: str) -> str:
        host, _, port = address.rpartition(":") if ":" in address else (address, "", "")
        self._door.bind(f"tcp://{host}:{port or '*'}")
        bound = self._door.getsockopt_string(zmq.LAST_ENDPOINT)
        return f"{host}:{bound.rpartition(':')[2]}"

    def _invite(self, token: str) -> Path:
        path = self._folder / INVITATION
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump({"address": self.address, "token": token}, file)
        return path

    def close(self) -> None:
        """Ends the thread, closes the port and removes the invitation."""
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
        with contextlib.suppress(OSError):  # the folder is no longer writable; the token is useless now
            self.invitation.unlink(missing_ok=True)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._wake_read, self._gate, self._door):
            poller.register(source, zmq.POLLIN)
        try:
            while self._wake_read not in (ready := dict(poller.poll())):
                if self._gate in ready:
                    self._admit()
                if self._door in ready:
                    self._answer()
        except Exception as error:
            _log.error("no client can attach any more: %s", error, exc_info=error)
            raise
        finally:
            self._gate.close()
            self._door.close()

    def _admit(self) -> None:
        question = self._gate.recv_multipart()
        admitted = question[5:] == [b"CURVE", self._admitted]
        status = [b"200", b"OK"] if admitted else [b"400", b"unknown key"]
        self._gate.send_multipart([*question[:2], *status, b"", b""])

    def _answer(self) -> None:
        peer, *question = self._door.recv_multipart()
        try:
            asked = json.loads(question[0])["have"]
            have = {name: (int(life), min(int(offset), 1 << 62)) for name, (life, offset) in asked.items()}
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as error:
            if not self.unanswered:
                _log.warning("invalid request (further ones are only counted): %s", error)
            self.unanswered += 1
            return
        pieces = []
        head: dict[str, Any] = {}
        try:
            pieces = journal.news(self._folder, have)
            head["pieces"] = [{"name": one.name, "life": one.life, "offset": one.offset} for one in pieces]
        except (OSError, ValueError) as error:
            head["error"] = f"the run's journals can't be read: {error}"
        reply = [peer, json.dumps(head).encode(), *(one.data for one in pieces)]
        try:
            self._door.send_multipart(reply, zmq.NOBLOCK)
        except zmq.Again:  # it does not read, and will ask again
            return
