"""The Flight Recorder of NCCL (not nccl2), asked without Python.

[Note: looks at a GPU's collectives]
A look at NCCL's recorder asks CUDA whether kernels have ended. That can block while the GPU hangs, which must not
happen with the interpreter's lock held: nobody could interrupt the rank any more ([Note: a GPU that hangs]). So it goes
through torch's own server for such questions, whose threads are C++: a Unix socket in a folder that only this user may
enter. It is not waited for longer than `_SECONDS`, and once it was late, no other question is asked for `_PAUSE_S`.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

__all__ = ["GpuFlights"]

_HANDLER = "dump_nccl_trace_json"
_SECONDS = 0.3
_PAUSE_S = 5.0
_FOUND = 200  # HTTP's


class GpuFlights:
    """Asks one process's recorder; the server starts with the first question.

    Args:
        folder: where a folder with the socket is made, which only this user may enter.
        handler: of torch's control plane.
        seconds: for which it is waited for.
    """

    def __init__(self, folder: Path, handler: str = _HANDLER, seconds: float = _SECONDS) -> None:
        self._path = folder / f"recorder-{os.getpid()}" / "socket"
        self._handler, self._seconds = handler, seconds
        self._server: Any = None
        self._not_before = 0.0

    def dump(self, active: bool = False) -> dict[str, Any]:
        """The recorder's dump; empty where there is no such recorder, or no answer in time.

        Args:
            active: only what has not ended.
        """
        if self._handler not in c10d._get_handler_names():  # type: ignore[attr-defined, unused-ignore]
            return {}
        if time.monotonic() < self._not_before:
            return {}
        if self._server is None:
            self._path.parent.mkdir(mode=0o700)
            self._server = c10d._WorkerServer(str(self._path))  # type: ignore[attr-defined, unused-ignore]
        try:
            answer = self._ask("?onlyactive=true" if active else "")
        except OSError:  # late, or it did not even connect
            self._not_before = time.monotonic() + _PAUSE_S
            return {}
        made: dict[str, Any] = json.loads(answer) if answer else {}
        return made

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server = None
            shutil.rmtree(self._path.parent)

    def _ask(self, options: str) -> bytes:
        connection = _UnixConnection(self._path, self._seconds)
        try:
            connection.request("POST", f"/handler/{self._handler}{options}")
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        return answer if response.status == _FOUND else b""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path, self._seconds = path, seconds

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self._seconds)
        self.sock.connect(str(self._path))
