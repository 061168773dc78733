"""The recorders of this process: which one records the collectives of which backend, and how each is queried.

[Note: which recorder notes what]
"shm" has a log of its own. Gloo writes into torch's Flight Recorder by itself, and so does NCCL up to torch 2.14, and
later with ``TORCH_DIST_USE_NCCL2=0``: each into an instance of its own. From torch 2.15 on every other backend (nccl2,
which is what "nccl" then builds, "mpi", a third party's) has an instance of its own name; torch attaches a hook
that writes into it to each group (`distributed_c10d._maybe_attach_flight_recorder`). Before 2.15, nothing records them.

The right instance is determined by the own name of a group's backend, not by the requested one: "nccl" may have built
nccl2, and "shm" may have become Gloo. Entries have the same form in all of them.

The hook keeps no CUDA events: a dump of its entries queries no GPU, and needs none of the care of [Note: looks at a
GPU's collectives]. The backend reports to it that a collective has ended: nccl2 within a second or so (`end_s`). For
one that never reports, entries count as ended when they are launched, so that none of them is ever in flight.

[Note: looks at a GPU's collectives]
A dump of NCCL's recorder asks CUDA whether kernels have ended. That can block while the GPU hangs, and must not hold
the GIL then: the rank could no longer be interrupted ([Note: a GPU that hangs]). So it uses torch's own server for such
queries, whose threads are C++, through a Unix socket in a private folder of this user. It waits at most `_SECONDS`, and
after a late answer it sends no other query for `_PAUSE_S`.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib
import json
import os
import pickle
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import _dump_fr_trace as _dump  # type: ignore[attr-defined, unused-ignore]

from ... import native

_HANDLER = "dump_nccl_trace_json"
_SECONDS = 0.3
_PAUSE_S = 5.0
_FOUND = 200  # HTTP's
_END_S = 0.05
_END_BY_HOOK_S = 1.5  # nccl2's thread looks once a second
_C = native.load()
_BY_NAME = "backend:" in (_dump.__doc__ or "")  # torch 2.15: an instance for each backend

Dump = Mapping[str, Any]


def dump_of(backend: str, active: bool, nccl: GpuFlights | None) -> Dump:
    """What a backend's recorder holds, without frames; empty if nothing notes its collectives.

    Args:
        backend: its own name.
        active: of NCCL only what has not ended.
        nccl: asks NCCL; None: it is not asked.
    """
    if backend == "nccl":
        return {} if nccl is None else nccl.dump(active)
    ask = _asker(backend)
    return {} if ask is None else ask(False)


def end_s(backend: str) -> float:
    """Seconds until the end of a collective is noted."""
    return _END_S if backend in ("gloo", "nccl", "shm") else _END_BY_HOOK_S


def _asker(backend: str) -> Callable[[bool], Dump] | None:
    """What dumps a backend's collectives, with their frames or without; None if nothing that we may ask notes them."""
    if backend == "shm":
        ours: Callable[[bool], Dump] = _C.flights
        return ours
    if backend == "gloo":
        return lambda frames: pickle.loads(_dump(includeStackTraces=frames))
    if backend != "nccl" and _BY_NAME:
        return lambda frames: pickle.loads(_dump(includeStackTraces=frames, backend=backend))
    return None


@functools.lru_cache(maxsize=4)
def frames(backend: str, record: int) -> list[tuple[str, int]]:
    """File and line of each frame of the call that made a record, innermost first; none of NCCL's. The first time
    takes some tenths of a second, in which no Python code of this process runs.
    """
    ask = _asker(backend)
    if ask is None:
        return []
    with _without_inductor():
        found = [one for one in ask(True)["entries"] if one["record_id"] == record]
    return [(str(frame["filename"]), int(frame["line"])) for one in found for frame in one["frames"]]


class _NoInductor:
    """Stands for `torch._inductor`: this thread finds nothing in it, other threads the module, which they load."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            raise AttributeError(name)
        return getattr(importlib.import_module("torch._inductor"), name)


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """Torch looks up frames of compiled code, too, and loads its compiler to ask it: for seconds, in which this rank
    would not answer. As long as it is not loaded there is no such code."""
    if "torch._inductor" in sys.modules:
        yield
        return
    stand_in = _NoInductor()
    vars(torch)["_inductor"] = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is stand_in:  # another thread may have loaded it
            del vars(torch)["_inductor"]


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
        """The recorder's dump; empty if there is no such recorder, or no answer in time.

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
