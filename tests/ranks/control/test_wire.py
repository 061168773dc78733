"""The event and control channel between real processes: nothing lost unseen, nobody unknown let in, nothing left."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from ddp_lab import _C, recording
from ddp_lab.control.wire import Wire
from ddp_lab.engine.telemetry import Telemetry
from ddp_lab.errors import ClusterError
from ddp_lab.protocol import events
from ddp_lab.protocol.messages import Activity, GetTime, HostTime, Message, Ping, Request, Status
from tests.ranks.conftest import Ranks
from tests.waiting import DEADLINE_S, wait_until

FLOOD = 300_000


@dataclass(frozen=True)
class Leave(Message):
    """Stop."""


@dataclass(frozen=True)
class Early(Message):
    """Note it."""


@dataclass(frozen=True)
class Twice:
    """The reply to `Double`."""

    twice: int


@dataclass(frozen=True)
class Double(Request[Twice]):
    """A question with a number."""

    number: int


@dataclass(frozen=True)
class Fail(Request[Twice]):
    """A question whose answer raises."""


@dataclass(frozen=True)
class Lie(Request[Twice]):
    """A question whose answer is of another type."""


@dataclass(frozen=True)
class Dance(Request[Twice]):
    """A question that no rank answers."""


class Received:
    """Everything that arrived, in the order of arrival."""

    def __init__(self, wire: Wire) -> None:
        self.batches: list[events.Batch] = []
        self.order: list[tuple[str, int, Any]] = []
        self.statuses: list[tuple[int, dict[str, Any]]] = []
        wire.on_batch(self._batch)
        wire.on_description(lambda rank, description: self.order.append(("description", rank, description)))
        wire.on_status(lambda rank, status: self.statuses.append((rank, status)))

    def _batch(self, batch: events.Batch) -> None:
        self.batches.append(batch)
        self.order.append(("batch", batch.rank, batch))

    def of_rank(self, rank: int) -> np.ndarray:
        return np.concatenate([batch.events for batch in self.batches if batch.rank == rank])

    def dropped(self, rank: int) -> int:
        return sum(batch.dropped for batch in self.batches if batch.rank == rank)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire() as made:
        yield made


def _telemetry(endpoint: dict[str, str], rank: int) -> Any:
    """A Telemetry that begins after what this process has recorded before."""
    made = Telemetry(endpoint, rank, session=time.time_ns())
    made._cursor = recording.statistics().recorded
    made._described = recording.descriptions(0)[1]
    return made


@contextlib.contextmanager
def _started(
    endpoint: dict[str, str], rank: int, flushed: str = "", handlers: Mapping[type[Message], Any] | None = None
) -> Iterator[Any]:
    """A Telemetry with these handlers that runs during the block, until it has flushed, if a cell is given."""
    telemetry = _telemetry(endpoint, rank)
    for kind, handler in (handlers or {}).items():
        telemetry.on_control(kind, handler)
    telemetry.start()
    yield telemetry
    while flushed and not telemetry.flush(flushed):
        pass
    telemetry.stop()


@contextlib.contextmanager
def _until_told(
    endpoint: dict[str, str], rank: int, flushed: str = "", handlers: Mapping[type[Message], Any] | None = None
) -> Iterator[Any]:
    """One that stops when the client says so: what is still on its way then has 0.2 s."""
    left = threading.Event()
    with _started(endpoint, rank, handlers={Leave: lambda _: left.set(), **(handlers or {})}) as telemetry:
        yield telemetry
        while flushed and not telemetry.flush(flushed):
            pass
        assert left.wait(DEADLINE_S)


def _in_background(ranks: Ranks, *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(ranks(*arguments)))
    thread.start()
    return thread, results


@contextlib.contextmanager
def _meanwhile(wire: Wire, ranks: Ranks, *arguments: Any) -> Iterator[list[Any]]:
    """Ranks that run during the block, and are then told to leave; afterwards the list has what they returned."""
    thread, results = _in_background(ranks, *arguments)
    try:
        yield results
    finally:
        wire.send(range(arguments[0]), Leave())
        thread.join()


def _record(count: int, sent: Callable[[], int] = lambda: sys.maxsize) -> None:
    """Records events, and waits where more of them than half a ring are not sent yet."""
    most = recording.statistics().capacity // 2
    for number in range(count):
        _C.record(events.Kind.GRAD_READY, step=number)
        while number % 1_000 == 0 and number - sent() > most:
            time.sleep(0.001)


def _flood(rank: int, size: int, endpoint: dict[str, str]) -> tuple[int, int]:
    with _until_told(endpoint, rank, "flood") as telemetry:
        first = telemetry._cursor
        _record(FLOOD, lambda: telemetry._cursor - first)
    return first, threading.active_count()


def test_nothing_is_lost(wire: Wire, ranks: Ranks) -> None:
    """Two ranks that record many times what their rings hold, as fast as it is sent: all arrives, once and in order,
    and the counts are exact."""
    received = Received(wire)
    before = ranks(2, _threads)
    with _meanwhile(wire, ranks, 2, _flood, wire.endpoint()) as told:
        assert wire.wait_for("flood", [0, 1], DEADLINE_S)
    for rank, (first, _) in enumerate(told):
        sequence = received.of_rank(rank)["sequence"]
        assert (sequence == np.arange(first, first + FLOOD)).all()
        assert (received.of_rank(rank)["step"] == np.arange(FLOOD)).all()
        batches = [batch for batch in received.batches if batch.rank == rank]
        assert all(a.first + len(a.events) == b.first for a, b in itertools.pairwise(batches))
        counted = wire.statistics()[rank]
        assert (counted.events, counted.dropped, counted.batches) == (FLOOD, 0, len(batches))
        assert max(len(batch.events) for batch in batches) <= 8_192
    assert [threads for _, threads in told] == before, "stop() left a thread"
    wire.check()


def _threads(rank: int, size: int) -> int:
    return threading.active_count()


def _overflow(rank: int, size: int, endpoint: dict[str, str]) -> tuple[int, int]:
    telemetry = _telemetry(endpoint, rank)
    count = 2 * recording.statistics().capacity + 123
    _record(count)
    telemetry.start()
    while not telemetry.flush("overflow"):
        pass
    telemetry.stop()
    return count, recording.statistics().capacity


def test_overflow_is_counted(wire: Wire, ranks: Ranks) -> None:
    """Events that the ring overwrote before they were sent are counted as dropped, exactly; the newest arrive."""
    received = Received(wire)
    [(count, capacity)] = ranks(1, _overflow, wire.endpoint())
    assert wire.wait_for("overflow", [0], DEADLINE_S)
    steps = received.of_rank(0)["step"]
    assert received.dropped(0) + len(steps) == count
    assert 0 < len(steps) <= capacity
    assert (steps == np.arange(count - len(steps), count)).all()
    assert wire.statistics()[0].dropped == count - len(steps)


def _against_a_reader_that_stands_still(rank: int, size: int, endpoint: dict[str, str], done: str) -> int:
    with _until_told(endpoint, rank, "read") as telemetry:
        for _ in range(100):  # far more than all queues and the ring hold
            _record(20_000)
            telemetry.flush("stuck", timeout=0.0)
        Path(done).touch()
    return 100 * 20_000


def test_a_client_that_reads_slowly_stops_nobody(wire: Wire, ranks: Ranks, tmp_path: Path) -> None:
    """While the client does not read, the rank records on to its end; what then arrives and what was dropped add up."""
    received = Received(wire)
    gate, done = threading.Event(), tmp_path / "done"
    wire.on_batch(lambda _: gate.wait(DEADLINE_S))
    with (
        _meanwhile(wire, ranks, 1, _against_a_reader_that_stands_still, wire.endpoint(), str(done)) as counts,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(gate.set)
        wait_until(done.exists, "the rank has recorded everything")
        assert len(received.batches) <= 1
        gate.set()
        assert wire.wait_for("read", [0], DEADLINE_S)
    sequence = received.of_rank(0)["sequence"].astype(np.int64)
    assert (np.diff(sequence) > 0).all()
    assert received.dropped(0) > 0
    assert [len(sequence) + received.dropped(0)] == counts


def _says_much(rank: int, size: int, endpoint: dict[str, str], megabytes: int, done: str) -> None:
    with _until_told(endpoint, rank) as telemetry:
        for number in range(megabytes):
            telemetry.send_cell("much", str(number), bytes(1 << 20))
        Path(done).touch()


def test_what_cells_say_is_bounded_without_a_client(ranks: Ranks, tmp_path: Path) -> None:
    """What a rank says while no client is connected is kept as far as its socket's queue holds it, and the last 8 MB
    of the rest; all of it comes in order."""
    with Wire(str(tmp_path)) as first:
        endpoint, keys = first.endpoint(), first.keys()
    done, said = tmp_path / "done", []
    thread, _ = _in_background(ranks, 1, _says_much, endpoint, 200, str(done))
    wait_until(done.exists, "the rank has said everything")
    with Wire(str(tmp_path), keys) as wire:
        wire.listen("much", lambda rank, kind, frames: said.append((rank, int(kind), len(frames[0]))))
        wait_until(lambda: said and said[-1] == (0, 199, 1 << 20), "the last of it")
        wire.send([0], Leave())
        thread.join()
    numbers = [number for _, number, _ in said]
    assert numbers == sorted(numbers)
    assert 8 <= len(numbers) <= 64 + 8
    assert numbers[-7:] == list(range(193, 200))


def _while_the_client_dies(rank: int, size: int, endpoint: dict[str, str]) -> tuple[int, str | None]:
    with _started(endpoint, rank) as telemetry:
        for _ in range(FLOOD // 1_000):
            _record(1_000)
            time.sleep(0.005)
        telemetry.flush("too late")
    return FLOOD, telemetry.error and str(telemetry.error)


def test_a_client_that_dies_meanwhile_stops_nobody(ranks: Ranks) -> None:
    """The channel closes in the middle of a flood: the rank records to its end, without an error."""
    wire = Wire()
    received = Received(wire)
    with _meanwhile(wire, ranks, 1, _while_the_client_dies, wire.endpoint()) as told:
        wait_until(lambda: received.batches, "the first batch")
        wire.close()
    assert told == [(FLOOD, None)]


def test_unknown_keys_are_refused(wire: Wire, ranks: Ranks) -> None:
    """Who does not hold the ranks' key gets nothing in and nothing out, encrypted or not."""
    received = Received(wire)
    endpoint = wire.endpoint()
    public, secret = zmq.curve_keypair()
    batch = events.encode(events.Batch(0, 1, 0, 0, np.zeros(3, events.DTYPE)))
    with zmq.Context() as context:
        sockets = [_intruder(context, endpoint, kind, keys) for kind in (zmq.PUSH, zmq.DEALER) for keys in
                   (None, (public, secret))]  # fmt: skip
        sockets[0].send_multipart(batch)
        sockets[1].send_multipart(batch)
        for dealer in sockets[2:]:
            dealer.send(b'{"type": "hello", "rank": 0}')
        wait_until(lambda: wire.refused >= 2, "both wrong keys are refused")
        ranks(1, _hello, endpoint, "known")  # the channel works all the while
        assert wire.wait_for("known", [0], DEADLINE_S)
        wire.send([0], Early())
        assert not any(dealer.poll(50) for dealer in sockets[2:])
        for socket in sockets:
            socket.close(linger=0)
    assert sum(len(b.events) for b in received.batches) == 0
    wire.check()


def _intruder(context: Any, endpoint: dict[str, str], kind: int, keys: tuple[bytes, bytes] | None) -> Any:
    socket = context.socket(kind)
    if keys is not None:
        socket.curve_serverkey = endpoint["server_public"].encode()
        socket.curve_publickey, socket.curve_secretkey = keys
    socket.connect(endpoint["data" if kind == zmq.PUSH else "control"])
    return socket


def _hello(rank: int, size: int, endpoint: dict[str, str], cell: str, events_before: int = 0) -> None:
    with _started(endpoint, rank, cell):
        _record(events_before)


def _controlled(rank: int, size: int, endpoint: dict[str, str]) -> list[str]:
    heard: list[str] = []
    handlers: dict[type[Message], Any] = {
        Early: lambda message: heard.append("early"),
        Double: lambda message: Twice(2 * message.number),
        Fail: lambda message: {}["fail"],
        Lie: lambda message: HostTime(1),
    }
    with _until_told(endpoint, rank, handlers=handlers):
        pass
    return heard


def test_control(wire: Wire, ranks: Ranks) -> None:
    """Control reaches ranks named before their hello; requests are answered by rank, errors included."""
    wire.send([0, 1], Early())
    with _meanwhile(wire, ranks, 2, _controlled, wire.endpoint()) as heard:
        assert wire.wait_connected([0, 1], 60) == set()
        assert wire.request([0, 1], Double(21), 10) == {0: Twice(42), 1: Twice(42)}
        assert wire.request([1], Fail(), 10).errors == {1: "KeyError: 'fail'"}
        assert "does not know the control message Dance" in wire.request(None, Dance(), 10).errors[0]
        assert wire.request([0], Ping(), 10) == {0: Activity("running", "script")}
        assert list(wire.request([0, 7], GetTime(), 0.2)) == [0], "rank 7 does not exist"
        wire.check()
        assert wire.request([0], Lie(), 10).errors == {0: "its reply is malformed: Twice has no 'ns'"}
        with pytest.raises(ClusterError, match="Twice has no 'ns'"):
            wire.check()
    assert heard == [["early"], ["early"]]
    wait_until(lambda: wire.connected() == set(), "the ranks say goodbye")


def test_a_successor_gets_nothing_that_was_for_an_ended_process(wire: Wire, ranks: Ranks) -> None:
    """Messages to a rank that has not connected, or no longer, are dropped once its process is known to have ended."""
    wire.send([0], Early())
    wire.forget([0])
    wire.send([1], Early())
    with _meanwhile(wire, ranks, 2, _controlled, wire.endpoint()) as heard:
        assert wire.wait_connected([0, 1], 60) == set()
        assert wire.request([0, 1], Double(1), 10) == {0: Twice(2), 1: Twice(2)}
    assert heard == [[], ["early"]]


def _told_at_last(rank: int, size: int, endpoint: dict[str, str]) -> bool:
    with _until_told(endpoint, rank, handlers={Early: lambda message: _record(10)}):
        pass
    return True


def test_what_was_said_before_a_close_still_leaves(ranks: Ranks) -> None:
    """With seconds to linger, a message goes out though the channel is closed at once, in the middle of a batch."""
    busy, go_on = threading.Event(), threading.Event()

    def hold(batch: events.Batch) -> None:
        busy.set()
        go_on.wait(DEADLINE_S)

    with Wire() as wire:
        wire.on_batch(hold)
        thread, heard = _in_background(ranks, 1, _told_at_last, wire.endpoint())
        assert wire.wait_connected([0], 60) == set()
        wire.send([0], Early())
        assert busy.wait(DEADLINE_S)
        wire.send([0], Leave())
        closing = threading.Thread(target=wire.close, args=(10.0,))
        closing.start()
        wait_until(lambda: wire._closing, "the close")
        go_on.set()
        closing.join()
        thread.join()
    assert heard == [True]


NO_MESSAGES = [b"", b"[]", b"{", b"{}", b'{"op": 1}', b"null", b"\xff", b"[" * 100_000]


def _flooded(rank: int, size: int, endpoint: dict[str, str]) -> tuple[int, list[str], str | None]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_lab.engine.telemetry").addHandler(handler)
    with _until_told(endpoint, rank) as telemetry:
        pass
    return telemetry._dropped.count, lines, telemetry.error and str(telemetry.error)


def test_messages_that_are_none_are_counted_by_ranks(wire: Wire, ranks: Ranks) -> None:
    """Whatever a client with the key sends to a rank, that answers the next question; a thousand messages that are none
    are counted and dropped, and the log has a line for each power of ten."""
    with _meanwhile(wire, ranks, 1, _flooded, wire.endpoint()) as told:
        assert wire.wait_connected([0], 60) == set()
        for _ in range(10):  # no more at a time than a socket's queue holds
            wire._outgoing.extend((0, [NO_MESSAGES[number % len(NO_MESSAGES)]]) for number in range(100))
            assert list(wire.request([0], Ping(), 10)) == [0]
    [(count, lines, error)] = told
    assert (count, error) == (1_000, None)
    assert [line.rpartition(" (")[2] for line in lines] == [f"{10**power} such so far)" for power in range(4)]


def _renewed_without_files(rank: int, size: int, endpoint: dict[str, str]) -> list[bool]:
    import resource

    with _started(endpoint, rank) as telemetry:
        telemetry.send_status(Status("before"))
        told = [telemetry.flush()]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (10, limits[1]))  # numbers that are all taken; poll() needs some
        telemetry.renew()
        told.append(telemetry.flush("without"))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        told.append(telemetry.flush("with"))
    return told


def test_a_rank_that_can_open_no_more_files_is_heard_again_when_it_can(wire: Wire, ranks: Ranks) -> None:
    """A new client finds such a rank silent; what the rank's cells do does not fail of it, and it tells all later."""
    received = Received(wire)
    assert ranks(1, _renewed_without_files, wire.endpoint()) == [[True, False, True]]
    assert wire.wait_for("with", [0], DEADLINE_S)
    assert {status["state"] for _, status in received.statuses} == {"before"}
    wire.check()


def _describe_and_mark(rank: int, size: int, endpoint: dict[str, str]) -> None:
    with _started(endpoint, rank, "described") as telemetry:
        for number in range(200):
            recording.mark(f"{os.getpid()}.{time.time_ns()}.{number}")
        telemetry.send_status(Status("idle", "step 3"))


def test_descriptions_come_before_the_events_that_need_them(wire: Wire, ranks: Ranks) -> None:
    """Whatever moment the flusher chooses, a mark's name arrives before the mark, and the status before the end."""
    received = Received(wire)
    ranks(1, _describe_and_mark, wire.endpoint())
    assert wire.wait_for("described", [0], DEADLINE_S)
    known: set[int] = set()
    marks = 0
    for what, _, value in received.order:
        if what == "description":
            known.add(value["index"])
            assert value["session"] == received.batches[0].session
        else:
            assert set(value.events["parameter"].tolist()) <= known
            marks += len(value.events)
    assert marks == 200
    [(rank, status)] = received.statuses
    assert (rank, status["state"], status["cell"]) == (0, "idle", "step 3")


def test_a_failing_handler_is_shown_and_ends_nothing(wire: Wire, ranks: Ranks) -> None:
    """A handler's error is kept for `check()`; other handlers and later batches are served."""
    received = Received(wire)

    def fail(batch: events.Batch) -> None:
        raise ValueError("handler broke")

    wire.on_batch(fail)
    ranks(1, _hello, wire.endpoint(), "little", 1_000)
    assert wire.wait_for("little", [0], DEADLINE_S)
    assert len(received.of_rank(0)) == 1_000
    assert str(wire.error) == "handler broke"
    with pytest.raises(ClusterError, match="handler broke"):
        wire.check()


def test_waiting_ends() -> None:
    """Waiting for a cell that nobody flushed ends after its time, and at once when the wire is closed."""
    wire = Wire()
    assert not wire.wait_for("never", [0], 0.01)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(wire.wait_for("never", [0], DEADLINE_S)))
    thread.start()
    wire.close()
    thread.join(DEADLINE_S)
    assert results == [False]
    wire.close()
