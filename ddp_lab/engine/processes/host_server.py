"""The fork server of another host: `ddp_lab.engine.processes.fork_server` at the end of an ssh connection.

`python -m ddp_lab.engine.processes.host_server` reports at once what is installed and what the host has (event `hello`,
see `ddp_lab.machine.facts`), then waits for one line:

    {"op": "begin", "environment": {...}, "lease": 120.0, "former": {"pid": 12, "started": "..."} or null}

From then on it is a fork server. Its logs are in a private folder of this user; when a rank ends, the end of its
log is sent with the event. Keys arrive through the connection and are never written.

[Note: a host on its own]
A host can lose its client without notice, in a network outage. The ranks must not wait there forever, nor hold a GPU.
So the client sends `ping` regularly, and a server that has heard nothing for ``lease`` seconds ends its ranks and
itself. The client gives up the host after a fourth of that time, so that it never counts ended ranks as alive. If the
network works again sooner than that, a new server first ends its ``former`` one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import machine
from . import fork_server


def main() -> None:
    """Serves one client until its end of the connection closes, or the lease expires."""
    commands, events = fork_server.take_channel()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the connection's end is noticed, and ranks are asked to end first
    os.write(events, json.dumps({"event": "hello", **machine.facts()}).encode() + b"\n")
    with open(commands, "rb", buffering=0, closefd=False) as unbuffered:  # the input that follows must not be read
        line = unbuffered.readline()
    if not line.endswith(b"\n"):  # the client disconnected before it sent a command
        return
    begin = json.loads(line)
    _end_former(begin["former"])
    os.environ.update(begin["environment"])
    folder = Path(tempfile.mkdtemp(prefix=f"ddp_lab-{os.getpid()}-"))  # mode 0700
    (folder / "profile").mkdir(mode=0o700)
    server = fork_server.ForkServer(str(folder), commands, events, logs=folder, lease=begin["lease"])
    fork_server.serve(server, os.getppid(), failed=lambda: shutil.rmtree(folder))


def _end_former(former: Mapping[str, Any] | None) -> None:
    """Kills the server whose ranks are to be replaced, and thereby its ranks, if it still runs on this host."""
    if former is None or machine.started(former["pid"]) != former["started"]:
        return
    os.kill(former["pid"], signal.SIGKILL)
    for folder in Path(tempfile.gettempdir()).glob(f"ddp_lab-{former['pid']}-*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if folder.lstat().st_uid == os.getuid():  # any user can make a link of that name
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
