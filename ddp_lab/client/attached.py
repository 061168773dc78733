"""`ddp_lab.attach(address)`: the live timeline and dashboard of a job that `ddp-lab run` runs."""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import zmq
from zmq.utils import z85

from .. import events, journal
from ..errors import ClusterError
from .timeline import Timeline

if TYPE_CHECKING:
    from ..widgets.dashboard import Dashboard

__all__ = ["Attached", "attach"]

INTERVAL = 0.05  # seconds between two questions while nothing new comes
PATIENCE = 5.0  # seconds that an answer may take

_Have = dict[str, tuple[int, int]]


class _Source(Protocol):
    def news(self, have: _Have) -> list[journal.Piece]:
        """What there is beyond `have`."""

    def close(self) -> None:
        """Lets it go."""


class _Folder:
    """Journals on a disk that this process can read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def news(self, have: _Have) -> list[journal.Piece]:
        return journal.news(self._folder, have)

    def close(self) -> None:
        pass


class _Connection:
    """The port of `ddp-lab run --serve`; used by one thread."""

    def __init__(self, address: str, token: str) -> None:
        try:
            keys = base64.urlsafe_b64decode(token)
        except (ValueError, binascii.Error):
            keys = b""
        if len(keys) != 64:
            raise ValueError("this is no token of `ddp-lab run --serve`: it is in the file attach.json of its folder")
        self._address = address
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        secret = z85.encode(keys[32:])
        self._socket.curve_serverkey = z85.encode(keys[:32])
        self._socket.curve_secretkey = secret
        self._socket.curve_publickey = zmq.curve_public(secret)
        self._socket.connect(f"tcp://{address.removeprefix('tcp://')}")

    def news(self, have: _Have) -> list[journal.Piece]:
        self._socket.send(json.dumps({"have": have}).encode())
        if not self._socket.poll(int(PATIENCE * 1e3)):
            raise ConnectionError(
                f"nobody answers at {self._address}: has the job ended, or is the token that of another one?"
            )
        head, *data = self._socket.recv_multipart()
        pieces = json.loads(head)["pieces"]
        return [journal.Piece(**piece, data=part) for piece, part in zip(pieces, data, strict=True)]

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Attached:
    """A job that is followed while it runs: what `attach` returns. A context manager.

    Attributes:
        timeline: what its ranks have recorded, from the beginning; grows until `close`.
    """

    def __init__(self, source: _Source) -> None:
        self.timeline = Timeline()
        self._source = source
        self._have: _Have = {}
        self._rest: dict[str, bytes] = {}
        self._whose: dict[str, tuple[int, int]] = {}  # file -> rank, session
        self._error: Exception | None = None
        self._closing = threading.Event()
        try:
            self._take(source.news({}))  # an error of the connection is raised here
        except BaseException:
            source.close()
            raise
        self._thread = threading.Thread(target=self._follow, name="ddp_lab-attached", daemon=True)
        self._thread.start()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def following(self) -> bool:
        """Whether more may come; no longer after `close`, or when the connection has ended."""
        return self._thread.is_alive()

    def check(self) -> None:
        """Raises `ClusterError` if the connection has ended."""
        if self._error is not None:
            raise ClusterError(f"the job is no longer followed: {self._error}") from self._error

    def dashboard(self) -> Dashboard:
        """The live dashboard of the job; it has no controls, for it does not touch the ranks."""
        from ..widgets import dashboard

        return dashboard.of_recording(self.timeline)

    def close(self) -> None:
        """Ends the connection; the timeline stays as it is. The job goes on."""
        self._closing.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._closing.is_set():
                if not self._take(self._source.news(self._have)):
                    self._closing.wait(INTERVAL)
        except Exception as error:  # noqa: BLE001 - the thread's top: stored and raised by check()
            self._error = error
        finally:
            self._source.close()

    def _take(self, pieces: list[journal.Piece]) -> bool:
        """Appends what came to the timeline; returns whether anything did."""
        for piece in pieces:
            life, offset = self._have.get(piece.name, (piece.life, piece.offset))
            if (life, offset) != (piece.life, piece.offset):  # the file was written anew, shorter
                self._rest.pop(piece.name, None)
            data = self._rest.pop(piece.name, b"") + piece.data
            found, taken = journal.split(data)
            self._rest[piece.name] = data[taken:]
            self._have[piece.name] = (piece.life, piece.offset + len(piece.data))
            for frames in found:
                self._append(piece.name, frames)
        return bool(pieces)

    def _append(self, name: str, frames: list[bytes]) -> None:
        if frames[0] != journal.JSON_FRAME:
            self.timeline.extend(events.decode(frames))
            return
        message: Mapping[str, Any] = json.loads(frames[1])
        if message["type"] == "journal":
            self._whose[name] = (message["rank"], message["session"])
        rank, session = self._whose[name]
        if message["type"] == "describe":
            for description in message["descriptions"]:
                self.timeline.describe(rank, {**description, "session": session})
        else:
            state = "running" if message["type"] == "journal" else message["how"]
            pid = {"pid": message["pid"]} if "pid" in message else {}
            self.timeline.set_status(rank, {"state": state, "session": session, **pid})


def attach(address: str, token: str | None = None) -> Attached:
    """Follows a job of `ddp-lab run` while it trains: its timeline and dashboard, live, from a notebook.

    The ranks are not touched. What was recorded before is there, too.

    Args:
        address: the folder of the run, where this process can read it (on the same host that is all); or
            ``"host:port"`` of a job that was started with ``--serve``.
        token: with ``"host:port"``, the token that is in the file ``attach.json`` of the run's folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the token is none, or missing.
        ConnectionError: nobody who knows the token answers there.

    Example:
        >>> job = ddp_lab.attach("ddp-lab-20260102-030405")
        >>> job.dashboard()
        >>> job.close()
    """
    folder = Path(address)
    if folder.is_dir():
        return Attached(_Folder(folder))
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise FileNotFoundError(f"{address} is neither the folder of a run nor HOST:PORT")
    if token is None:
        raise ValueError(f"attach({address!r}, token=...): the token is in the file attach.json of the run's folder")
    return Attached(_Connection(address, token))
