"""Rank side of the wire: drains the recorder and publishes events, sends what cells say, answers control messages.

Two threads of a rank, both idle while nothing happens:

- the *flusher* drains the recorder every 20 ms (without the GIL) and sends one batch; with more than 25 ranks less
  often, so that the client receives at most 1,250 batches a second; when nothing is recorded it drains less and
  less often;
- the *control thread* sleeps on its socket until a control message arrives, and runs the message's handler.

Nothing here ever waits for the client. While the client does not read, nothing is drained: the recorder's ring is
the bounded buffer, which overwrites the oldest events, and the next batch contains the number of dropped ones. What
cells say is kept until the client reads it; while no client is connected, only the last `UNREAD_BYTES` of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from .. import recording
from ..printable import Dropped
from ..protocol import events, messages
from ..protocol.messages import Activity, Done, GetTime, HostTime, Message, Ping, Refused, Status

INTERVAL = 0.02  # seconds between two drains while events arrive; a drain and a send take 0.1 ms of a core
IDLE_INTERVAL = 0.12  # at most, while none arrive
BATCH_SECONDS = 0.0008  # of the client's time that a batch may take
MAX_BATCH = 8_192  # events; 590 kB
QUEUE = 64  # batches that wait in the socket before draining stops: 38 MB at most
LINGER_MS = 200
UNREAD_BYTES = 8 << 20  # of what cells say, kept while no client is connected

_log = logging.getLogger(__name__)
_M = TypeVar("_M", bound=Message)
_session_of: dict[int, int] = {}  # by process: a rank may be forked from one that has imported this module


def process_session() -> int:
    """A number that no other process, before or after, has; sequence numbers count from its process's start."""
    return _session_of.setdefault(os.getpid(), time.time_ns())


def interval_of(ranks: int) -> float:
    """Seconds between two drains of each of `ranks` ranks while events arrive."""
    return max(INTERVAL, BATCH_SECONDS * ranks)


def connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: Mapping[str, str], channel: str, name: str
) -> zmq.Socket[bytes]:
    """A socket that is connected to a `Wire`; see `socket_for`."""
    socket = socket_for(context, kind, endpoint, channel, name)
    socket.connect(endpoint[channel])
    return socket


def socket_for(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: Mapping[str, str], channel: str, name: str
) -> zmq.Socket[bytes]:
    """A socket that can be connected to a `Wire`.

    Args:
        context: creates it.
        kind: of the socket.
        endpoint: the value of `Wire.endpoint()`.
        channel: ``"data"`` or ``"control"``.
        name: unique, so that the client recognises the rank after a broken connection.
    """
    socket = context.socket(kind)
    socket.linger = LINGER_MS
    socket.set_hwm(QUEUE)
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 400 if endpoint[channel].startswith("ipc:") else 2_000  # a try costs next to nothing
    socket.curve_serverkey = endpoint["server_public"].encode()
    socket.curve_publickey = endpoint["client_public"].encode()
    socket.curve_secretkey = endpoint["client_secret"].encode()
    socket.routing_id = name.encode()
    return socket


class Telemetry:
    """Publishes this rank's events, and receives the client's commands.

    Args:
        endpoint: the value of the client's `Wire.endpoint()`.
        rank: this rank.
        ranks: how many send to the same client.
        session: identifies the life of this process; None for `process_session()`. It must not change while the
            process lives.
        publishes: whether it sends events; else it only answers.
    """

    def __init__(
        self,
        endpoint: Mapping[str, str],
        rank: int,
        ranks: int = 1,
        session: int | None = None,
        publishes: bool = True,
    ) -> None:
        self.rank = rank
        self._publishes = publishes
        self._interval = interval_of(ranks)
        self.session = process_session() if session is None else session
        self.error: Exception | None = None
        self.clients = 1  # so many have been served; grows with `renew`
        self._endpoint = dict(endpoint)
        self._handlers: dict[type[Message], Callable[[Any], object]] = {
            Ping: lambda _: Activity("running", messages.SCRIPT),
            GetTime: lambda _: HostTime(time.monotonic_ns()),
        }
        self._lock = threading.Lock()  # guards the data socket and everything below it
        self._outbox: deque[tuple[Sequence[bytes], int]] = deque()  # frames; bytes of them that may be dropped
        self._unread = 0  # the sum of these
        self._attached = False  # a client is connected
        self._status: Status | None = None
        self._last_status: Status | None = None
        self._cursor = 0
        self._described = 0
        self._wake = threading.Event()
        self._stopping = False
        self._dropped = Dropped()  # control messages that were invalid, or failed
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._data: zmq.Socket[bytes] | None = None  # made when something is sent
        self._threads: list[threading.Thread] = []

    # ---- life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connects and starts the threads; returns at once, even if the client is not connected.

        Each time the connection is established, the control thread says hello.
        """
        if self._context is not None:
            raise RuntimeError("this Telemetry was already started")
        self._stopping = False
        self._context = zmq.Context(io_threads=1)
        self._control = socket_for(self._context, zmq.DEALER, self._endpoint, "control", self._name())
        # A new client, or a restored connection, is noticed by the connecting side: only then can it say hello.
        # Monitored from before the first connection, which may be established at once.
        self._connected = self._control.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._control.connect(self._endpoint["control"])
        self._stop_read, self._stop_write = os.pipe()
        flusher = [(self._flush_for_ever, "flusher")] if self._publishes else []
        for run, name in (*flusher, (self._answer_for_ever, "control")):
            thread = threading.Thread(target=run, name=f"ddp_lab-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _name(self) -> str:
        return f"{self.rank}-{self.session}-{time.monotonic_ns()}"

    def stop(self) -> None:
        """Sends the rest (for 0.2 s at most), ends the threads and closes the sockets."""
        if self._context is None:
            return
        if self._publishes:
            self.flush()
        self._stopping = True
        self._wake.set()
        os.write(self._stop_write, b"x")
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._data is not None:
            self._data.close()
        self._context.term()
        self._context = None
        os.close(self._stop_write)
        os.close(self._stop_read)

    @property
    def attached(self) -> bool:
        """Whether a client is connected."""
        return self._attached

    # ---- publishing -------------------------------------------------------------------------------------

    def flush(self, cell: str | None = None, timeout: float = 0.05) -> bool:
        """Sends everything recorded so far: call it at the end of a cell, from the cell's thread.

        Args:
            cell: id of the cell run that ended; the client's `Wire.wait_for(cell, ...)` returns when everything
                sent before has been handled.
            timeout: seconds to wait at most while the client does not read.

        Returns:
            Whether everything was passed to the socket.
        """
        deadline = time.monotonic() + timeout
        marker = None if cell is None else self._json("flushed", cell=cell)
        target = recording.statistics().recorded
        while True:
            with self._lock:
                if self._context is None:
                    return False
                if self._publish() and self._cursor >= target:
                    if marker is not None:
                        self._put(marker)
                    return self._send_outbox()
                if self._outbox:  # the socket is full, or there is none
                    self._data.poll(2, zmq.POLLOUT) if self._data is not None else time.sleep(0.002)
            if time.monotonic() >= deadline:
                return False

    def send_cell(self, cell: str, kind: str, *frames: bytes) -> None:
        """Sends what a cell says, after everything that was sent before.

        Not on the main thread while a cell's own code runs: an interrupt could end it between two frames.

        Args:
            cell: id of the cell run.
            kind: what the frames are; see `ddp_lab.engine.cells.delivery`.
            frames: its data.
        """
        with self._lock:
            if self._context is None:
                return
            message = [*self._json("cell", cell=cell, kind=kind), *frames]
            size = sum(map(len, message))
            self._put(message, size)
            if not self._send_outbox():
                self._forget_unread()
                self.wake()

    def _forget_unread(self) -> None:
        """Drops the oldest of what cells have said to a client that may never come. Needs the lock."""
        while not self._attached and self._unread > UNREAD_BYTES:
            self._remove(next(index for index, (_, size) in enumerate(self._outbox) if size))

    def _put(self, frames: Sequence[bytes], may_drop: int = 0) -> None:
        """Appends a message, of which so many bytes may be dropped: all or none. Needs the lock."""
        self._outbox.append((frames, may_drop))
        self._unread += may_drop

    def _remove(self, index: int) -> None:
        self._unread -= self._outbox[index][1]
        del self._outbox[index]

    def send_status(self, status: Status) -> None:
        """Sends this rank's state; of several between two drains only the last."""
        with self._lock:
            self._status = self._last_status = status
        self.wake()

    def renew(self) -> None:
        """Starts again for a new client: sends the ring's events, all descriptions and the last status.

        Messages that the last client did not receive are dropped: they would arrive first, and then count as all.
        """
        with self._lock:
            if self._context is None:
                return
            if self._data is not None:
                self._data.close(linger=0)
                self._data = None
            self._outbox.clear()
            self._unread = 0
            self._cursor = self._described = 0
            self._status = self._last_status
            self.clients += 1
        self.wake()

    def wake(self) -> None:
        """Drains now, and then at the usual rate while events arrive: call it when a cell begins."""
        self._wake.set()

    def _json(self, kind: str, /, **fields: Any) -> list[bytes]:
        return [b"j", json.dumps({"type": kind, "rank": self.rank, "session": self.session, **fields}).encode()]

    def _publish(self) -> bool:
        """Drains once and sends; returns whether everything was passed to the socket. Needs the lock."""
        if not self._send_outbox():
            return False
        batch, dropped, following = recording.drain(self._cursor)
        # Drained after the events, but sent before them: events may refer to the newest description.
        described, self._described = recording.descriptions(self._described)
        if described:
            self._put(self._json("describe", descriptions=described))
        if len(batch) or dropped:
            first = following - len(batch)
            for start in range(0, max(1, len(batch)), MAX_BATCH):
                part = batch[start : start + MAX_BATCH]
                made = events.Batch(self.rank, self.session, first + start, 0 if start else dropped, part)
                self._put(events.encode(made))
        if self._status is not None:
            own = {"rank": self.rank, "session": self.session, "pid": os.getpid()}
            self._put(self._json("status", status=own | messages.plain(self._status)))
            self._status = None
        self._cursor = following
        return self._send_outbox()

    def _send_outbox(self) -> bool:
        """Sends without waiting; returns whether everything has been handed to the socket. Needs the lock."""
        while self._outbox:
            if self._data is None:
                self._data = self._connect_data()
            if self._data is None:
                return False
            try:
                self._data.send_multipart(self._outbox[0][0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._remove(0)
        return True

    def _connect_data(self) -> zmq.Socket[bytes] | None:
        """A socket for data; None while the process has too many open files. Needs the lock."""
        assert self._context is not None
        try:
            return connect(self._context, zmq.PUSH, self._endpoint, "data", self._name())
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return None

    def _flush_for_ever(self) -> None:
        interval = self._interval
        while not self._stopping:
            woken = self._wake.wait(interval)
            self._wake.clear()
            try:
                with self._lock:
                    before = self._cursor
                    self._publish()
                    moved = self._cursor != before
            except Exception as error:  # noqa: BLE001 - the thread's top: stored and shown by the client
                self._fail(error)
                return
            busy = woken or moved
            interval = self._interval if busy else max(self._interval, min(IDLE_INTERVAL, interval * 1.25))

    def _fail(self, error: Exception) -> None:
        self.error = error
        _log.error("telemetry of rank %d: %s", self.rank, error, exc_info=error)
        with self._lock, contextlib.suppress(zmq.ZMQError):
            self._data = self._data or self._connect_data()
            if self._data is None:
                return
            text = f"its telemetry ended: {type(error).__name__}: {error}"
            self._data.send_multipart(self._json("error", text=text), zmq.NOBLOCK)

    # ---- control ----------------------------------------------------------------------------------------

    def on_control(self, kind: type[_M], handler: Callable[[_M], object]) -> None:
        """Calls `handler(message)` on the control thread for each message of this type.

        Of a request it returns the reply. An exception is sent in its place, and logged unless it is `Refused`. Later
        messages wait for it, so it must be short.
        """
        self._handlers[kind] = handler

    def _say(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps({"rank": self.rank, "session": self.session, **message}).encode())

    def _answer_for_ever(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._stop_read, zmq.POLLIN)
        poller.register(self._connected, zmq.POLLIN)
        try:
            while not self._stopping:
                ready = dict(poller.poll())
                if self._connected in ready:
                    self._attached = parse_monitor_message(self._connected.recv_multipart())["event"] != (
                        zmq.EVENT_DISCONNECTED
                    )
                    if self._attached:
                        self._say({"type": "hello", "pid": os.getpid()})
                if self._control in ready:
                    self._take(self._control.recv_multipart())
            with contextlib.suppress(zmq.Again):
                self._control.setsockopt(zmq.SNDTIMEO, 0)
                self._say({"type": "bye"})
        except Exception as error:  # noqa: BLE001 - the thread's top: stored and shown by the client
            self._fail(error)
        finally:
            self._control.disable_monitor()
            self._connected.close()
            self._control.close()

    def _take(self, frames: list[bytes]) -> None:
        """Answers a message; what is none is dropped, and sometimes logged."""
        try:
            message, number = messages.decode(frames)
        except (ValueError, RecursionError):
            self._complain("invalid message: %r", frames[0][:80])
            return
        answer: dict[str, Any]
        try:
            answer = {"reply": self._reply(message)}
        except Exception as error:  # noqa: BLE001 - sent to the client
            if not isinstance(error, Refused):
                self._complain("control message %s: %r", type(message).__name__, error)
            answer = {"reply": {}, "error": str(error) if isinstance(error, Refused) else _words_of(error)}
        if number is not None:
            self._say({"type": "reply", "id": number, **answer})

    def _reply(self, message: Message | ValueError) -> dict[str, Any]:
        if isinstance(message, ValueError):
            raise message
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ValueError(f"rank {self.rank} does not know the control message {type(message).__name__}")
        reply = handler(message)
        return messages.plain(reply) if message.reply not in (None, Done) else {}

    def _complain(self, text: str, *arguments: object) -> None:
        """Logs some errors of messages: see `Dropped`."""
        if self._dropped.one_more():
            _log.warning(f"{text} (%d such so far)", *arguments, self._dropped.count)


def _words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
