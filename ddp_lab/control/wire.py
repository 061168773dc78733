"""The event and control channel, client side: receives what ranks publish, and sends them commands.

Ranks PUSH to one PULL socket (events, descriptions, statuses, in the order in which each rank sent them) and hold
one DEALER each to a ROUTER (control). Both are encrypted and authenticated with CurveZMQ: new key pairs are made
for every cluster, and only holders of the ranks' key can connect.

Ownership: one receiver thread owns every socket. It decodes, calls the handlers, which only append, and sends
what other threads put into `_outgoing`. Those threads touch `_lock`-guarded state and the waking pipe, no socket; the
main thread takes the lock with interrupts held back, see [Note: interrupts of the client].
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import zmq
from zmq.utils import z85

from ..errors import ClusterError
from ..printable import Dropped
from ..protocol import descriptions, events
from ..protocol.messages import GetTime, Message, Replies, Request, encode
from .interrupts import interrupts_deferred

JSON_FRAME = b"j"  # first frame of a data message that is not an event batch: the second is JSON
WAITING_CONTROL = 64  # control messages kept for a rank that has not said hello
DATA_QUEUE = 128  # messages of one rank queued here (75 MB at most), before that rank's own queue fills
_HANDSHAKE_MS = 3_000  # until a silent connection is closed, so that no stranger can use up this process's descriptors
MAX_MESSAGE = 64 << 20  # bytes; ranks send far smaller batches
_TAKE = 64  # messages of one socket before the others are checked
_MARKERS = 256  # ends of cells remembered per rank

_log = logging.getLogger(__name__)
_R = TypeVar("_R")
Listener = Callable[[int, str, list[bytes]], object]


@dataclass(frozen=True)
class WireStatistics:
    """Counts of what one rank has sent.

    Attributes:
        batches: event batches received.
        events: events in them.
        dropped: events that the rank recorded and overwrote before they could be sent.
        bytes: bytes of event batches.
    """

    batches: int = 0
    events: int = 0
    dropped: int = 0
    bytes: int = 0


class Wire:
    """Receives what the ranks publish and sends them control messages.

    Pass `endpoint` to every rank (`ddp_lab.engine.telemetry.Telemetry`), and register handlers before the first
    rank connects. Usable from any thread; a context manager.

    Args:
        address: interface to listen on, with ports that the system picks; or a folder, for sockets that processes of
            this host reach independent of the network.
        keys: those of an earlier wire with the same address, whose ranks will reconnect; None for new ones.
    """

    def __init__(self, address: str = "127.0.0.1", keys: Mapping[str, str] | None = None) -> None:
        self._lock = threading.Condition()
        self._on_batch: list[Callable[[events.Batch], object]] = []
        self._on_description: list[Callable[[int, dict[str, Any]], object]] = []
        self._on_status: list[Callable[[int, dict[str, Any]], object]] = []
        self._listeners: dict[str, Listener] = {}  # by cell; the receiver thread only reads it
        self._statistics: dict[int, WireStatistics] = {}
        self._markers: dict[int, deque[str]] = {}
        self._peers: dict[int, bytes] = {}  # rank -> routing id, since its hello
        self._connections: dict[int, int] = {}  # rank -> how often it has said hello
        self._heard: dict[int, float] = {}  # rank -> when its last message arrived, in seconds; the receiver thread's
        self._waiting: dict[int, deque[list[bytes]]] = {}  # for ranks that have not said hello
        self._outgoing: deque[tuple[int, list[bytes]]] = deque()
        self._requests: dict[int, Replies[Any]] = {}
        self._ids = itertools.count(1)
        self._error: Exception | None = None
        self._dropped = Dropped()
        self._closing = False
        self._linger = 0.0
        self._sockets = _Sockets(address, keys)
        self._thread = threading.Thread(target=self._run, name="ddp_lab-wire", daemon=True)
        self._thread.start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- interface --------------------------------------------------------------------------------------

    def endpoint(self) -> dict[str, str]:
        """Addresses and keys for the ranks, JSON-able. It holds a secret key: send it over a private channel."""
        return dict(self._sockets.endpoint)

    def keys(self) -> dict[str, str]:
        """Keys for a later wire at the same address. Secret."""
        return dict(self._sockets.keys)

    def on_batch(self, handler: Callable[[events.Batch], object]) -> None:
        """Calls `handler(batch)` for every event batch, on the receiver thread: let it only append."""
        self._on_batch.append(handler)

    def on_description(self, handler: Callable[[int, dict[str, Any]], object]) -> None:
        """Calls `handler(rank, description)` for every description, before the events that refer to it."""
        self._on_description.append(handler)

    def on_status(self, handler: Callable[[int, dict[str, Any]], object]) -> None:
        """Calls `handler(rank, status)` for every status that a rank sends."""
        self._on_status.append(handler)

    def listen(self, cell: str, listener: Listener) -> None:
        """From now on calls `listener(rank, kind, frames)`, on the receiver thread, for what ranks say of a cell.

        Args:
            cell: the id of a cell run, a call or a debugger; "" for the messages of widgets.
            listener: called in each rank's order; see [Note: one wire].
        """
        with interrupts_deferred():
            self._listeners[cell] = listener

    def unlisten(self, cell: str) -> None:
        """Drops what ranks still say of a cell."""
        with interrupts_deferred():
            self._listeners.pop(cell, None)

    def connected(self) -> set[int]:
        """The ranks that have said hello."""
        with interrupts_deferred(), self._lock:
            return set(self._peers)

    def connections(self) -> dict[int, int]:
        """rank -> how often it has connected: again after a broken connection, and in a new process."""
        with interrupts_deferred(), self._lock:
            return dict(self._connections)

    def wait_connected(self, ranks: Iterable[int], timeout: float) -> set[int]:
        """Waits until these ranks have said hello; returns those that had not after `timeout` seconds."""
        chosen = set(ranks)
        with self._lock:
            self._lock.wait_for(lambda: self._closing or chosen <= self._peers.keys(), timeout)
            return chosen - self._peers.keys()

    def forget(self, ranks: Iterable[int]) -> None:
        """Notes that the processes of these ranks have ended: their successors get no message that was for them."""
        with interrupts_deferred(), self._lock:
            ended = set(ranks)
            for rank in ended:
                self._peers.pop(rank, None)
                self._waiting.pop(rank, None)
            self._outgoing = deque((rank, payload) for rank, payload in self._outgoing if rank not in ended)

    def send(self, ranks: Iterable[int] | None, message: Message) -> None:
        """Sends a message; returns at once.

        Args:
            ranks: to whom; None for every rank that has said hello. A rank named here that has not said hello
                yet gets the message when it does (the last 64 are kept).
            message: the message.
        """
        self._put(ranks, encode(message))

    def _put(self, ranks: Iterable[int] | None, payload: list[bytes]) -> None:
        with interrupts_deferred(), self._lock:
            if self._closing:
                return
            chosen = sorted(self._peers) if ranks is None else sorted(set(ranks))
            self._outgoing.extend((rank, payload) for rank in chosen)
            self._sockets.wake()

    def request(self, ranks: Iterable[int] | None, request: Request[_R], timeout: float) -> Replies[_R]:
        """Sends a request; returns when all have answered, or after `timeout` seconds.

        Args:
            ranks: to whom; None for every rank that has said hello.
            request: the request.
            timeout: seconds to wait at most.

        Returns:
            rank -> reply. A rank that did not answer is missing; one whose handler raised is in ``errors``.
        """
        assert request.reply is not None
        number = next(self._ids)
        replies: Replies[_R] = Replies(self.connected() if ranks is None else ranks, request.reply)
        with interrupts_deferred():
            with self._lock:
                self._requests[number] = replies
            self._put(set(replies.missing), encode(request, number))
            with self._lock:
                self._lock.wait_for(lambda: self._closing or not replies.missing, timeout)
                del self._requests[number]
                return replies

    def times(self, ranks: Iterable[int], timeout: float) -> dict[int, tuple[int, int, int]]:
        """Asks ranks for the time on their own clocks, in nanoseconds.

        Returns:
            rank -> when it was asked, its answer, when the answer arrived; only of ranks that answer.
        """
        sent_ns = time.monotonic_ns()
        replies = self.request(ranks, GetTime(), timeout)
        return {rank: (sent_ns, reply.ns, replies.received_ns[rank]) for rank, reply in replies.items()}

    def wait_for(self, cell: str, ranks: Iterable[int], timeout: float = 0.5) -> bool:
        """Waits until everything that these ranks recorded before they flushed `cell` has been handled.

        Call it after a cell's replies: the timeline then holds the cell's last step.

        Returns:
            Whether all of them have; False after `timeout` seconds.
        """
        chosen = set(ranks)

        def arrived() -> bool:
            return self._closing or all(cell in self._markers.get(rank, ()) for rank in chosen)

        with interrupts_deferred(), self._lock:
            return self._lock.wait_for(arrived, timeout) and not self._closing

    def statistics(self) -> dict[int, WireStatistics]:
        """rank -> what it has sent so far."""
        with interrupts_deferred(), self._lock:
            return dict(self._statistics)

    def silence(self) -> dict[int, float]:
        """rank -> seconds since it last sent anything, for those that have."""
        now = time.monotonic()
        return {rank: now - at for rank, at in list(self._heard.items())}

    @property
    def refused(self) -> int:
        """Connections rejected because they did not hold the ranks' key."""
        return self._sockets.refused

    @property
    def malformed(self) -> int:
        """Messages that were dropped because they were invalid, or a handler failed on them."""
        return self._dropped.count

    @property
    def error(self) -> Exception | None:
        """The first error of the receiver thread, of a handler or reported by a rank; None if there was none."""
        return self._error

    def check(self) -> None:
        """Raises `ClusterError` if the receiver thread had an error."""
        if self._error is not None:
            raise ClusterError(f"the event channel failed: {self._error}") from self._error

    def close(self, linger: float = 0.0) -> None:
        """Ends the receiver thread and closes all sockets; messages not sent within `linger` seconds are dropped."""
        with interrupts_deferred(), self._lock:
            if self._closing:
                return
            self._closing, self._linger = True, linger
            self._lock.notify_all()
        self._sockets.wake()
        self._thread.join()
        self._sockets.release()

    # ---- the receiver thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        sockets = self._sockets
        steps: dict[Any, Callable[[], None]] = {
            sockets.waker: self._send_outgoing,
            sockets.gate: sockets.admit,
            sockets.control: lambda: self._take(sockets.control, self._handle_control),
            sockets.data: lambda: self._take(sockets.data, self._handle_data),
        }
        poller = zmq.Poller()
        for source in steps:
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll())
                for source, step in steps.items():
                    if source in ready:
                        step()
            if self._linger:
                self._send_outgoing()
        except Exception as error:
            self._note(error)
            raise
        finally:
            sockets.close(self._linger)

    def _note(self, error: Exception) -> None:
        """Keeps the first error, and logs some: see `Dropped`."""
        with self._lock:
            if self._error is None:
                self._error = error
        if self._dropped.one_more():
            _log.error("event channel: %s (%d such so far)", error, self._dropped.count, exc_info=error)

    def _take(self, socket: zmq.Socket[bytes], handle: Callable[[list[Any]], None]) -> None:
        """Handles some received messages; a bad one must not end the channel for all ranks."""
        for _ in range(_TAKE):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                handle([frame.buffer for frame in frames])
            except Exception as error:  # noqa: BLE001 - the thread's top for one message: stored, raised by check()
                self._note(error)

    def _handle_data(self, frames: list[memoryview]) -> None:
        if frames[0] != JSON_FRAME:
            batch = events.decode([bytes(frames[0]), *frames[1:]])
            self._heard[batch.rank] = time.monotonic()
            self._count(batch, sum(len(frame) for frame in frames))
            for handler in self._on_batch:
                handler(batch)
            return
        rank, message = descriptions.message_of(frames)
        self._heard[rank] = time.monotonic()
        kind = message["type"]
        if kind == "cell":
            listener = self._listeners.get(message["cell"])
            if listener is not None:
                listener(rank, message["kind"], [bytes(frame) for frame in frames[2:]])
        elif kind == "describe":
            for description in message["descriptions"]:
                for describe in self._on_description:
                    describe(rank, {**description, "session": message["session"]})
        elif kind == "status":
            for tell in self._on_status:
                tell(rank, message["status"])
        elif kind == "flushed":
            with self._lock:
                self._markers.setdefault(rank, deque(maxlen=_MARKERS)).append(message["cell"])
                self._lock.notify_all()
        elif kind == "error":
            raise ClusterError(f"rank {rank}: {message['text']}")

    def _count(self, batch: events.Batch, size: int) -> None:
        with self._lock:
            was = self._statistics.get(batch.rank, WireStatistics())
            self._statistics[batch.rank] = replace(
                was,
                batches=was.batches + 1,
                events=was.events + len(batch.events),
                dropped=was.dropped + batch.dropped,
                bytes=was.bytes + size,
            )

    def _handle_control(self, frames: list[memoryview]) -> None:
        now_ns = time.monotonic_ns()
        rank, message = descriptions.message_of(frames)
        peer = bytes(frames[0])
        self._heard[rank] = time.monotonic()
        if message["type"] == "hello":
            with self._lock:
                self._peers[rank] = peer
                self._connections[rank] = self._connections.get(rank, 0) + 1
                kept = self._waiting.pop(rank, ())
                self._outgoing.extendleft((rank, payload) for payload in reversed(kept))
                self._lock.notify_all()
            self._send_outgoing()
        elif message["type"] == "bye":
            with self._lock:
                if self._peers.get(rank) == peer:
                    del self._peers[rank]
        elif message["type"] == "reply":
            with self._lock:
                replies = self._requests.get(message["id"])
                if replies is not None:
                    self._lock.notify_all()
                    replies.take(rank, message, now_ns)

    def _send_outgoing(self) -> None:
        self._sockets.clear_waker()
        while True:
            with self._lock:
                if not self._outgoing:
                    return
                rank, payload = self._outgoing.popleft()
                peer = self._peers.get(rank)
            if peer is None or not self._sent(peer, payload):
                with self._lock:
                    self._waiting.setdefault(rank, deque(maxlen=WAITING_CONTROL)).append(payload)

    def _sent(self, peer: bytes, payload: list[bytes]) -> bool:
        try:
            self._sockets.control.send_multipart([peer, *payload], zmq.NOBLOCK)
        except zmq.Again:  # its queue is full because it does not read
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:  # it has disconnected; a successor will say hello
                return False
            raise
        return True


class _Sockets:
    """PULL for data, ROUTER for control, the gate that libzmq asks about each connection, and a pipe that wakes.

    One thread uses the sockets, and closes them; any thread may `wake` it.

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
