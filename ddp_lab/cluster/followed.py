"""`ddp_lab.follow(address)`: the live timeline and dashboard of a job that `ddp-lab run` runs."""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from ..documentation import with_help
from ..errors import ClusterError
from ..printable import printable
from ..protocol import events, journal
from ..protocol.journal import Decoder, End, Opening
from ..timeline.recorded.merge import check_ranks
from ..timeline.timeline import Timeline

if TYPE_CHECKING:
    from ..dashboard.dashboard import Dashboard


INTERVAL = 0.05  # seconds between two requests while there is nothing new
PATIENCE = 5.0  # seconds to wait for an answer

_Have = dict[str, tuple[int, int]]


class _Connection:
    """The port of `ddp-lab run --serve`; used by one thread."""

    def __init__(self, address: str, token: str) -> None:
        try:
            keys = base64.urlsafe_b64decode(token)
        except (ValueError, binascii.Error):
            keys = b""
        if len(keys) != 64:
            raise ValueError("not a token of `ddp-lab run --serve`: copy it from attach.json in the run's folder")
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
            said = f"no answer from {self._address}: the job may have ended, or the token belongs to another job"
            raise ConnectionError(with_help(said, "job-does-not-answer"))
        head, *data = self._socket.recv_multipart()
        return _pieces(head, data)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _pieces(head: bytes, data: Sequence[bytes]) -> list[journal.Piece]:
    """The port's answer.

    Raises:
        ConnectionError: the port reports an error.
        ValueError: the answer can't be read.
    """
    try:
        answer = json.loads(head)
        if "error" in answer:
            raise ConnectionError(printable(str(answer["error"])))
        made = [
            journal.Piece(str(one["name"]), int(one["life"]), int(one["offset"]), part)
            for one, part in zip(answer["pieces"], data, strict=True)
        ]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"the job's port sent an unreadable answer: {type(error).__name__}: {error}") from error
    return made


class FollowedJob:
    """A job that is followed while it runs, as `follow` returns it. A context manager.

    Attributes:
        timeline: the events that its ranks have recorded, from the beginning; grows until `close`.
    """

    def __init__(self, news: Callable[[_Have], list[journal.Piece]], let_go: Callable[[], None] | None = None) -> None:
        # news: returns bytes of the journals that were not read yet; let_go: called when following ends.
        self.timeline = Timeline()
        self._news, self._let_go = news, let_go or (lambda: None)
        self._files: dict[str, tuple[int, Decoder]] = {}  # name -> life
        self._error: Exception | None = None
        self._closing = threading.Event()
        try:
            self._take(news({}))  # an error of the connection is raised here
        except BaseException:
            self._let_go()
            raise
        self._thread = threading.Thread(target=self._follow, name="ddp_lab-followed", daemon=True)
        self._thread.start()

    def __enter__(self) -> FollowedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def following(self) -> bool:
        """Whether more may arrive; false after `close`, or when the connection has ended."""
        return self._thread.is_alive()

    def check(self) -> None:
        """Raises `ClusterError` if the connection has ended."""
        if self._error is not None:
            raise ClusterError(f"the job is no longer followed: {self._error}") from self._error

    def notices(self) -> list[str]:
        """Sentences on damaged or missing parts of the journals."""
        return [notice for _, decoder in self._files.values() for notice in decoder.notices()]

    def dashboard(self) -> Dashboard:
        """The live dashboard of the job; without controls, because it does not touch the ranks."""
        from ..dashboard import dashboard

        return dashboard.of_recording(self.timeline)

    def close(self) -> None:
        """Ends the connection; the timeline stays as it is, and the job continues."""
        self._closing.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._closing.is_set():
                have = {name: (life, decoder.offset) for name, (life, decoder) in self._files.items()}
                if not self._take(self._news(have)):
                    self._closing.wait(INTERVAL)
        except Exception as error:  # noqa: BLE001 - the thread's top: stored and raised by check()
            self._error = error
        finally:
            self._let_go()

    def _take(self, pieces: list[journal.Piece]) -> bool:
        """Appends what arrived to the timeline; returns whether anything did."""
        for piece in pieces:
            life, decoder = self._files.get(piece.name, (None, None))
            if decoder is None or life != piece.life:  # the file was rewritten, shorter
                decoder = Decoder(Path(piece.name))
                self._files[piece.name] = piece.life, decoder
            if piece.offset != decoder.offset:
                name = printable(piece.name)
                raise ValueError(f"{name} was sent from byte {piece.offset}, expected from byte {decoder.offset}")
            for said in decoder.feed(piece.data):
                self._append(decoder, said)
        return bool(pieces)

    def _append(self, decoder: Decoder, said: Opening | End | events.Batch | dict[str, Any]) -> None:
        if isinstance(said, events.Batch):
            self.timeline.extend(said)
            return
        opening = decoder.opening
        assert opening is not None  # the first message of a journal
        if isinstance(said, dict):
            self.timeline.describe(opening.rank, {**said, "session": opening.session})
            return
        if isinstance(said, Opening):
            check_ranks([one.opening for _, one in self._files.values() if one.opening is not None])
        end = said if isinstance(said, End) else opening.end
        status = {"state": "running" if end is None else end.how, "session": opening.session, "pid": opening.pid}
        self.timeline.set_status(opening.rank, status)


def follow(address: str, token: str | None = None) -> FollowedJob:
    """Follows a job of `ddp-lab run` while it trains: its timeline and dashboard, live, from a notebook.

    The ranks are not touched. Events recorded before are included. `ddp_lab.attach` is the same function.

    Args:
        address: the folder of the run, if this process can read it, as on the same host; or ``"host:port"`` of a
            job that was started with ``--serve``.
        token: for ``"host:port"``, the token in the file ``attach.json`` of the run's folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the token is invalid or missing, or a journal can't be read.
        ConnectionError: nothing that knows the token answers there.

    Example:
        >>> job = ddp_lab.follow("ddp-lab-20260102-030405")
        >>> job.dashboard()
        >>> job.close()
    """
    folder = Path(address)
    if folder.is_dir():
        return FollowedJob(partial(journal.news, folder))
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise FileNotFoundError(f"{address} is neither the folder of a run nor HOST:PORT")
    if token is None:
        raise ValueError(f"follow({address!r}, token=...): the token is in the file attach.json of the run's folder")
    connection = _Connection(address, token)
    return FollowedJob(connection.news, connection.close)
