"""Whatever bytes come in, who reads them says what is wrong: nothing is executed, no memory filled, no thread ended."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_lab import events, journal
from ddp_lab.client.recorded_runs import read_run
from ddp_lab.client.timeline import Timeline
from ddp_lab.client.wire import JSON_FRAME, Wire
from tests.leftovers import wait_until
from tests.security import hostile
from tests.training_events import Training

QUICK, LONG = 25, 5_000
MEMORY = 256 << 20  # bytes that reading something small may take
_TIMELINE = hostile.recorded()
_ASSIGNMENT = Training(2, 3).assignment()
_BATCH = events.encode(events.Batch(1, 7, 0, 0, _TIMELINE.since(0)[0][0][1]))


def few(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a property on a few examples in `make test`, always the same ones."""
    return settings(_settings(QUICK), derandomize=True)(test)


def many(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a property on many examples that nobody has seen, in `make soak` alone."""
    return pytest.mark.soak(_settings(LONG)(test))


def _settings(examples: int) -> settings:
    shared = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=shared)


def _said(read: Callable[[], Any]) -> str:
    """What a reader refuses with; empty if it reads."""
    try:
        read()
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where hostile files lie."""
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a valid saved timeline."""
    with np.load(_TIMELINE.save(folder / "valid.npz")) as file:
        return dict(file)


def _decodes_or_says_why(frames: list[bytes]) -> None:
    tracemalloc.start()
    try:
        batch = events.decode(frames)
        Timeline().extend(batch)
    except ValueError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MEMORY


_frames = st.one_of(
    st.lists(st.binary(max_size=200), max_size=4),
    st.tuples(hostile.changed_bytes(_BATCH[0]), hostile.changed_bytes(_BATCH[1])).map(list),
    st.tuples(st.just(_BATCH[0]), hostile.changed_bytes(_BATCH[1])).map(list),
)


@few
@given(_frames)
def test_batches(frames: list[bytes]) -> None:
    """A batch of other bytes is a batch or a ValueError, and takes no more memory than its events."""
    _decodes_or_says_why(frames)


@many
@given(_frames)
def test_many_batches(frames: list[bytes]) -> None:
    """The same, for long."""
    _decodes_or_says_why(frames)


@pytest.mark.parametrize(
    ("field", "number"), [("bucket", 2**31 - 1), ("parameter", 2**30), ("step", 2**62), ("step", -2)]
)
def test_numbers_that_no_rank_has(field: str, number: int) -> None:
    """A number that would make tables huge is refused by name; a far step alone takes no time."""
    made = np.frombuffer(_BATCH[1], events.DTYPE).copy()
    made[field][3] = number
    with pytest.raises(ValueError, match=rf"the batch of rank 1 holds an event with {field} {number}"):
        events.decode([_BATCH[0], made.tobytes()])
    timeline = Timeline()
    made["step"], made["bucket"], made["parameter"] = 0, 0, 0
    made["step"][-1] = 2**52
    timeline.extend(events.decode([_BATCH[0], made.tobytes()]))
    assert timeline.reducers()[0].last_step == 2**52


def test_a_count_without_events() -> None:
    """A header that announces four billion events is refused before anything is made for them."""
    header = bytearray(_BATCH[0])
    struct.pack_into("<I", header, len(header) - 4, 2**32 - 1)
    with pytest.raises(ValueError, match="announces 4294967295 events of 72 bytes and holds"):
        events.decode([bytes(header), _BATCH[1]])


def _read_everything(path: Path, folder: Path) -> None:
    """Reads a file, and what it holds if it can be read: nothing else than ValueError comes of either."""
    refusal = _said(lambda: read_run([path], partial=True))
    assert not refusal or path.name in refusal
    if refusal:
        return
    timeline = Timeline.load(path)
    for name in ("spans", "steps", "sync", "gradients", "drift", "summary", "findings", "find_late", "marks"):
        getattr(timeline, name)()
    timeline.report(folder / "report.html")


@few
@given(st.data())
def test_saved_timelines(saved: dict[str, np.ndarray], folder: Path, data: st.DataObject) -> None:
    """A saved timeline with other contents is read, or a ValueError says what is wrong with which file."""
    path = folder / "changed.npz"
    path.write_bytes(hostile.npz(data.draw(hostile.changed_arrays(saved))))
    _read_everything(path, folder)


def test_a_group_that_leaves_a_rank_out(saved: dict[str, np.ndarray], folder: Path) -> None:
    """Steps of a rank, or spans of a bucket, that the model's description does not have: the report shows them."""
    for field, kept in (("group_ranks", [0]), ("buckets", [])):
        about = json.loads(str(saved["about"]))
        for _, description in about["described"]:
            description[field] = kept
        path = folder / "changed.npz"
        path.write_bytes(hostile.npz({**saved, "about": np.array(json.dumps(about))}))
        _read_everything(path, folder)


def test_a_step_that_only_ends(saved: dict[str, np.ndarray], folder: Path) -> None:
    """A model of which nothing is left but the end of a step: its times are not known, and all else is read."""
    made = saved["events"].copy()
    made["reducer"][made["kind"] == events.Kind.BACKWARD_END] = 1
    path = folder / "changed.npz"
    path.write_bytes(hostile.npz({**saved, "events": made}))
    _read_everything(path, folder)
    assert "10.0 ms a step (median)." in Timeline.load(path).summary()


@many
@given(st.data())
def test_many_saved_timelines(saved: dict[str, np.ndarray], folder: Path, data: st.DataObject) -> None:
    """The same, for long."""
    path = folder / "changed.npz"
    path.write_bytes(hostile.npz(data.draw(hostile.changed_arrays(saved))))
    _read_everything(path, folder)


def _damaged(folder: Path, data: st.DataObject) -> None:
    whole, name = data.draw(st.sampled_from([((folder / "valid.npz").read_bytes(), "npz"), (_journal(), "journal")]))
    path = folder / f"damaged.{name}"
    path.write_bytes(data.draw(hostile.changed_bytes(whole)))
    refusal = _said(lambda: Timeline.load(path, partial=True))
    assert not refusal or path.name in refusal


@many
@given(st.data())
def test_many_damaged_files(folder: Path, saved: dict[str, np.ndarray], data: st.DataObject) -> None:
    """The same as the next, for long."""
    _damaged(folder, data)


@few
@given(st.data())
def test_damaged_files(folder: Path, saved: dict[str, np.ndarray], data: st.DataObject) -> None:
    """A saved timeline or a journal with other bytes, or its beginning alone, is read or refused by name."""
    _damaged(folder, data)


def _opening(**changes: Any) -> bytes:
    fields = {"rank": 0, "run": "r", "restart": 0, "world_size": 1, "host": "h", "clock": "c", "pid": 1, "session": 1}
    return journal.json_message("journal", schema_version=events.SCHEMA_VERSION, **{**fields, **changes})


def _journal(*more: bytes) -> bytes:
    described = [_ASSIGNMENT]
    batch = events.encode(events.Batch(0, 1, 0, 0, _TIMELINE.since(0)[0][0][1]))
    parts = [_opening(), journal.json_message("describe", descriptions=described), journal.pack(batch), *more]
    return journal.MAGIC + b"".join(parts)


@few
@given(st.data())
def test_journals(folder: Path, data: st.DataObject) -> None:
    """A journal whose messages hold other things is read, or a ValueError names the file and the field."""
    fields = data.draw(hostile.changed_json({"type": "describe", "descriptions": [_ASSIGNMENT]}))
    path = folder / "changed.journal"
    path.write_bytes(_journal(journal.pack([JSON_FRAME, json.dumps(fields).encode()])))
    refusal = _said(lambda: Timeline.load(path, partial=True))
    assert not refusal or path.name in refusal


class _Bomb:
    """Says, when it is unpickled, that it was."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["DDP_LAB_TEST_BOMB"],)


def _pickled(saved: dict[str, np.ndarray]) -> bytes:
    return hostile.npz({**saved, "events": np.array([_Bomb()], object)})


def _bare_pickle(saved: dict[str, np.ndarray]) -> bytes:
    return pickle.dumps(_Bomb())


def _bare_array(saved: dict[str, np.ndarray]) -> bytes:
    body = io.BytesIO()
    np.save(body, saved["events"])
    return body.getvalue()


def _header_of_a_terabyte(saved: dict[str, np.ndarray]) -> bytes:
    body = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        body, {"descr": np.lib.format.dtype_to_descr(events.DTYPE), "fortran_order": False, "shape": (10**11,)}
    )
    return hostile.npz({**saved, "events": body.getvalue()})


def _other_compression(saved: dict[str, np.ndarray]) -> bytes:
    return hostile.npz(saved, compression=zipfile.ZIP_LZMA)


def _deep_json(saved: dict[str, np.ndarray]) -> bytes:
    return hostile.npz({**saved, "about": np.array("[" * 100_000)})


@pytest.mark.parametrize(
    "make", [_pickled, _bare_pickle, _bare_array, _header_of_a_terabyte, _other_compression, _deep_json]
)
def test_hostile_files(
    make: Callable[..., bytes], saved: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickles are not unpickled, sizes not believed: each file is refused by name, by whoever reads it."""
    exploded = tmp_path / "exploded"
    monkeypatch.setenv("DDP_LAB_TEST_BOMB", str(exploded))
    path = tmp_path / "hostile.npz"
    path.write_bytes(make(saved))
    for read in (Timeline.load, lambda one: read_run([one]), lambda one: Timeline.load([one, one])):
        with pytest.raises(ValueError, match=r"hostile\.npz is not a saved timeline"):
            read(path)
    assert not exploded.exists()


@pytest.fixture(scope="module")
def rank() -> Iterator[tuple[Wire, Any, Any]]:
    """A wire, and the data and control socket of a rank that holds its key."""
    with Wire() as wire, zmq.Context() as context:
        endpoint = wire.endpoint()
        made = []
        for kind, channel in ((zmq.PUSH, "data"), (zmq.DEALER, "control")):
            socket = context.socket(kind)
            socket.linger = 0
            socket.curve_serverkey = endpoint["server_public"].encode()
            socket.curve_publickey = endpoint["client_public"].encode()
            socket.curve_secretkey = endpoint["client_secret"].encode()
            socket.connect(endpoint[channel])
            made.append(socket)
        wire.on_batch(Timeline().extend)
        timeline = Timeline()
        wire.on_description(timeline.describe)
        wire.on_status(timeline.set_status)
        yield wire, *made
        for socket in made:
            socket.close()


_MESSAGES = [
    {"type": "describe", "rank": 0, "session": 1, "descriptions": [{"type": "mark", "index": 0, "name": "m"}]},
    {"type": "status", "rank": 0, "status": {"state": "idle"}},
    {"type": "flushed", "rank": 0, "cell": "c"},
    {"type": "error", "rank": 0, "text": "t"},
    {"type": "hello", "rank": 0, "pid": 1},
    {"type": "bye", "rank": 0},
    {"type": "reply", "rank": 0, "id": 1, "reply": {}},
]
_message = st.sampled_from(_MESSAGES).flatmap(hostile.changed_json).map(lambda one: json.dumps(one).encode())
_sent = st.one_of(
    st.lists(st.binary(max_size=60), min_size=1, max_size=4),
    _message.map(lambda one: [JSON_FRAME, one]),
    st.just([JSON_FRAME, b"[" * 200_000]),
    st.just([JSON_FRAME, b"9" * 5_000]),
)


@few
@given(st.lists(_sent, min_size=1, max_size=5))
def test_messages_of_a_rank(rank: tuple[Wire, Any, Any], sent: list[list[bytes]]) -> None:
    """Whatever a rank with the key sends, the wire goes on: it takes the next message, and keeps the error."""
    wire, data, control = rank
    for frames in sent:
        data.send_multipart(frames)
        control.send_multipart(frames[1:] or frames)
        control.send_multipart(frames)
    _still_serves(wire, data, control)


def test_wrong_ranks_are_not_let_in(rank: tuple[Wire, Any, Any]) -> None:
    """A hello of a rank that is no number leaves no entry that would break who sends to all; the error names it."""
    wire, data, control = rank
    for wrong in ("x", [], -1, 1.5, None, True):
        control.send(json.dumps({"type": "hello", "rank": wrong}).encode())
    _still_serves(wire, data, control)
    assert wire.connected() <= {0, 5}
    wire.send(None, {"op": "ping"})
    assert wire.error is not None


_count = iter(range(10**9))


def _still_serves(wire: Wire, data: Any, control: Any) -> None:
    marker = f"marker {next(_count)}"
    data.send_multipart([JSON_FRAME, json.dumps({"type": "flushed", "rank": 0, "cell": marker}).encode()])
    assert wire.wait_for(marker, [0], 20)
    control.send(b'{"type": "bye", "rank": 5}')
    control.send(b'{"type": "hello", "rank": 5}')
    wait_until(lambda: 5 in wire.connected(), 20, "the hello")
