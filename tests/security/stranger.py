"""Run as root: becomes another user, tries what a user of the same machine can try, and says what came of it.

Reads one JSON object from standard input; writes one, attempt -> what it got, "refused: ..." where nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

NOBODY = 65534


def attempts(given: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """What to try, by name."""
    made: dict[str, Callable[[], object]] = {}
    for path in map(Path, given["folders"]):
        made[f"list {path}"] = lambda path=path: os.listdir(path)
    for path in map(Path, given["files"]):
        made[f"read {path}"] = lambda path=path: path.read_bytes()[:20].decode("latin1")
        made[f"append to {path}"] = lambda path=path: path.open("ab").close()
    for pid in given["pids"]:
        for name in ("environ", "maps", "mem"):
            made[f"open /proc/{pid}/{name}"] = lambda pid=pid, name=name: open(f"/proc/{pid}/{name}", "rb").close()
        made[f"list /proc/{pid}/fd"] = lambda pid=pid: os.listdir(f"/proc/{pid}/fd")
        made[f"signal {pid}"] = lambda pid=pid: os.kill(pid, 0)
    return made


def send_to_the_wire(endpoint: str) -> str:
    """Sends a status to the wire as somebody who has no key; whether it could be handed over shows in the cluster."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 200
        push.connect(endpoint)
        push.send_multipart([b"j", b'{"type": "status", "rank": 0, "status": {"state": "stolen"}}'])
    return "sent"


def reach_port(port: int) -> str:
    """Opens a TCP connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return "connected"


def load_names() -> None:
    """Has Python read what it needs to look up an address, which the other user may not be able to."""
    socket.getaddrinfo("127.0.0.1", 0)


def reach_socket(path: str) -> str:
    """Opens a connection to a Unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        return "connected"


def main() -> None:
    """Gives up root, tries, reports."""
    given = json.load(sys.stdin)
    load_names()
    if given["become"]:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    tries = attempts(given)
    if given["wire"]:
        tries["wire"] = lambda: send_to_the_wire(given["wire"])
    for port in given["ports"]:
        tries[f"port {port}"] = lambda port=port: reach_port(port)
    for path in given["sockets"]:
        tries[f"socket {path}"] = lambda path=path: reach_socket(path)
    told = {}
    for name, attempt in tries.items():
        try:
            told[name] = f"got: {attempt()!r}"[:100]
        except (OSError, RuntimeError) as error:
            told[name] = f"refused: {type(error).__name__}: {error}"[:100]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
