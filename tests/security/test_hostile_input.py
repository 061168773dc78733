"""Whatever bytes come in, who reads them says what is wrong: nothing is executed, no memory filled, no thread ended."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import socket
import stat
import struct
import tracemalloc
import xml.etree.ElementTree as ElementTree
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_lab import follow
from ddp_lab.cli import main
from ddp_lab.cluster.followed import _Connection
from ddp_lab.control import wire as wires
from ddp_lab.control.wire import JSON_FRAME, Wire
from ddp_lab.dashboard.views import VIEWS
from ddp_lab.launch.serve import JournalServer
from ddp_lab.protocol import events, journal
from ddp_lab.protocol.messages import Ping
from ddp_lab.timeline.comparison import compare
from ddp_lab.timeline.timeline import Timeline, read_run
from tests import journals
from tests.security import hostile
from tests.training_events import Training
from tests.waiting import wait_until

QUICK, LONG = 25, 5_000
MEMORY = 256 << 20  # bytes that reading something small may take
_TIMELINE = hostile.recorded()
_ASSIGNMENT = Training(2, 3).assignment()
_BATCH = events.encode(events.Batch(1, 7, 0, 0, _TIMELINE.since(0)[0][0][1]))


some_or_many = pytest.mark.parametrize("examples", [QUICK, pytest.param(LONG, marks=pytest.mark.soak)])


def _tried(examples: int, check: Callable[[Any], object], strategy: st.SearchStrategy[Any] | None = None) -> None:
    """Checks a few examples, always the same ones, or many that nobody has seen; by default whatever is drawn."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    how = settings(max_examples=examples, database=None, suppress_health_check=slow, derandomize=examples == QUICK)

    def example(drawn: Any) -> None:
        check(drawn)

    how(given(st.data() if strategy is None else strategy)(example))()


def _peak(act: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and the most memory that it took meanwhile."""
    tracemalloc.start()
    try:
        return act(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


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
    _, peak = _peak(lambda: _said(lambda: Timeline().extend(events.decode(frames))))
    assert peak < MEMORY


_frames = st.one_of(
    st.lists(st.binary(max_size=200), max_size=4),
    st.tuples(hostile.changed_bytes(_BATCH[0]), hostile.changed_bytes(_BATCH[1])).map(list),
    st.tuples(st.just(_BATCH[0]), hostile.changed_bytes(_BATCH[1])).map(list),
)


@some_or_many
def test_batches(examples: int) -> None:
    """A batch of other bytes is a batch or a ValueError, and takes no more memory than its events."""
    _tried(examples, _decodes_or_says_why, _frames)


@pytest.mark.parametrize(
    ("field", "number"), [("bucket", 2**31 - 1), ("parameter", 2**30), ("step", 2**62), ("step", -2)]
)
def test_numbers_that_no_rank_has(field: str, number: int) -> None:
    """A number that would make tables huge is refused by name; a far step alone takes no time."""
    made = np.frombuffer(_BATCH[1], events.DTYPE).copy()
    made[field][3] = number
    with pytest.raises(ValueError, match=rf"the batch of rank 1 contains an event with {field} {number}"):
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
    with pytest.raises(ValueError, match="announces 4294967295 events of 72 bytes but contains"):
        events.decode([bytes(header), _BATCH[1]])


def _read_everything(path: Path, folder: Path) -> None:
    """Reads a file, and what it holds if it can be read: nothing else than ValueError comes of either."""
    refusal = _said(lambda: read_run([path], partial=True))
    assert not refusal or path.name in refusal
    if not refusal:
        timeline = read_run([path], partial=True).timeline
        hostile.answers(timeline, folder)
        timeline.to_perfetto(folder / "trace.json")
        _said(lambda: compare(path, path))


def _read_changed(arrays: dict[str, np.ndarray], folder: Path) -> Path:
    """Reads a saved timeline of these arrays; returns its path."""
    path = folder / "changed.npz"
    path.write_bytes(hostile.npz(arrays))
    _read_everything(path, folder)
    return path


@pytest.mark.parametrize("kind", [events.Kind.ACTIVITY, events.Kind.SAMPLE])
@pytest.mark.parametrize("place", [5, 2**16])
def test_a_place_that_nobody_described(
    saved: dict[str, np.ndarray], folder: Path, kind: events.Kind, place: int
) -> None:
    """Time that was spent at such a place is read, and has no name."""
    made = saved["events"].copy()
    chosen = (made["kind"] == events.Kind.GRAD_READY) & (made["parameter"] > 0)
    made["kind"][chosen], made["parameter"][chosen] = kind, place
    made["host_ns"][chosen] = 10**12 + made["step"][chosen] * 10**7 + 7_500_000  # between two steps
    assert "10.0 ms per step (median)" in Timeline.load(_read_changed({**saved, "events": made}, folder)).summary()


@some_or_many
def test_saved_timelines(saved: dict[str, np.ndarray], folder: Path, examples: int) -> None:
    """A saved timeline with other contents is read, or a ValueError says what is wrong with which file."""
    _tried(examples, lambda arrays: _read_changed(arrays, folder), hostile.changed_arrays(saved))


def test_models_of_which_parts_are_missing(saved: dict[str, np.ndarray], folder: Path) -> None:
    """Steps of a rank, or spans of a bucket, that the model's description does not have: the report shows them. A model
    of which nothing is left but the end of a step: its times are not known, and all else is read."""
    for field, kept in (("group_ranks", [0]), ("buckets", [])):
        about = json.loads(str(saved["about"]))
        for _, description in about["described"]:
            description[field] = kept
        _read_changed({**saved, "about": np.array(json.dumps(about))}, folder)
    made = saved["events"].copy()
    made["reducer"][made["kind"] == events.Kind.BACKWARD_END] = 1
    assert "10.0 ms per step (median)." in Timeline.load(_read_changed({**saved, "events": made}, folder)).summary()


def _messages(*more: list[bytes], **opening: Any) -> list[list[bytes]]:
    batch = events.Batch(0, 1, 0, 0, _TIMELINE.since(0)[0][0][1])
    described = journal.json_frames("describe", descriptions=[_ASSIGNMENT])
    return [journals.opening(**opening), described, journals.batch(batch), *more]


def _described(*described: dict[str, Any]) -> list[bytes]:
    return journal.json_frames("describe", descriptions=list(described))


def _journal(*more: list[bytes], **opening: Any) -> bytes:
    return journals.written(_messages(*more, **opening))


def _held(path: Path) -> tuple[dict[tuple[int, int], bytes], list[str]]:
    """A file's events by rank and sequence number, and what is said of what it lacks."""
    run = read_run([path], partial=True)
    chunks, notices = run.timeline.since(0)[0], [one for one in run.notices if not one.startswith("there is no file")]
    return {(rank, int(event["sequence"])): event.tobytes() for rank, chunk in chunks for event in chunk}, notices


@pytest.mark.parametrize("kind", ["npz", "journal"])
@some_or_many
def test_damaged_files(folder: Path, saved: dict[str, np.ndarray], kind: str, examples: int) -> None:
    """A saved timeline or a journal with other bytes, or a part of its own, is read or refused by name, and takes no
    more memory than it has. Nothing is read that was not recorded, and nothing is missing without a word."""
    path = folder / f"damaged.{kind}"
    whole = (folder / "valid.npz").read_bytes()
    if kind == "journal":
        opening, described, _ = _messages()
        parts = np.array_split(_TIMELINE.since(0)[0][0][1], 4)
        batches = [journals.batch(events.Batch(0, 1, int(part["sequence"][0]), 0, part)) for part in parts]
        whole = journals.written([opening, described, *batches, journal.json_frames("end", how="finished")])
    path.write_bytes(whole)
    right, notices = _held(path)
    assert right
    assert not notices

    def check(data: bytes) -> None:
        path.write_bytes(data)
        refusal, peak = _peak(lambda: _said(lambda: read_run([path], partial=True)))
        assert peak < MEMORY
        assert not refusal or path.name in refusal
        if not refusal:
            held, notices = _held(path)
            assert held.items() <= right.items(), "numbers that were not recorded"
            assert held == right or notices, "less, and no word"

    _tried(examples, check, hostile.changed_bytes(whole) | hostile.damaged_bytes(whole))


_changed_message = st.sampled_from([_ASSIGNMENT, *hostile.WATCHED]).flatmap(
    lambda one: hostile.changed_json({"type": "describe", "descriptions": [one]}).map(
        lambda fields: [JSON_FRAME, json.dumps(fields).encode()]
    )
)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # norms of 1e308
@some_or_many
def test_journals(folder: Path, examples: int) -> None:
    """A journal whose messages hold other things, or come in another order, twice or not at all, is read, or a
    ValueError names the file and the field."""
    path = folder / "changed.journal"
    opening, *valid = _messages(journal.json_frames("end", how="finished"), [], [b""])
    batch = np.frombuffer(valid[1][1], events.DTYPE)
    others = hostile.changed_events(batch).map(lambda made: [valid[1][0], made.tobytes()])

    def check(messages: list[list[bytes]]) -> None:
        path.write_bytes(journals.written([opening, *messages]))
        _read_everything(path, folder)

    one_other = _changed_message.map(lambda one: [*valid[:2], one])
    _tried(examples, check, one_other | st.lists(st.sampled_from(valid) | _changed_message | others, max_size=4))


@pytest.mark.soak
def test_as_many_models_as_events(folder: Path) -> None:
    """What takes time for each pair of models would never end."""
    made = np.zeros(4_000, events.DTYPE)
    made["sequence"] = made["reducer"] = np.arange(len(made))
    made["host_ns"], made["kind"] = 10**12 + made["sequence"] * 1_000, events.Kind.BACKWARD_BEGIN
    made["bucket"] = made["parameter"] = -1
    path = folder / "models.journal"
    path.write_bytes(journals.written([journals.opening(), journals.batch(events.Batch(0, 1, 0, 0, made))]))
    _read_everything(path, folder)


# What a journal may hold that no rank writes -> what whoever reads or follows it says.
_CROOKED: dict[str, tuple[list[list[bytes]], str]] = {
    "norms of nothing": (_messages(_described({**hostile.WATCHED[0], "before": [[1.0]]})), "do not match 2 ranks"),
    "no norms": (_messages(_described({"type": "gradients", "reducer": 0, "step": 1})), "lacks 'generation'"),
    "no groups": (_messages(_described({"type": "drift", "reducer": 0, "step": 1, "ok": True})), "lacks 'first'"),
    "no checksum": (
        _messages(_described({"type": "inspection", "reducer": 0, "step": 1, "buckets": [{"bucket": 0}]})),
        "lacks 'norm'",
    ),
    "no frames": (_messages([]), "an event batch has a header"),
    "a list": (_messages([JSON_FRAME, b"[]"]), "list indices must be"),
    "no JSON": (_messages([JSON_FRAME, b"{"]), "Expecting property name"),
    "deep": (_messages([JSON_FRAME, b"[" * 100_000]), "a message contains too deeply nested lists"),
    "no opening": (_messages()[1:], "does not begin with a header"),
    "events first": (_messages()[2:], "does not begin with a header"),
    "two openings": (_messages(journals.opening(rank=5)), "is the journal of rank 0 and, further on, of rank 5"),
    "others' events": (_messages(rank=3), "holds events of rank 0, but is the journal of rank 3"),
    "no end": (_messages(journal.json_frames("end")), "a message lacks 'how'"),
    "a negative rank": (_messages(rank=-5), "rank is -5, not an integer"),
    "a rank of text": (_messages(rank="<script>"), "rank is '<script>', not an integer"),
    "no session": (_messages(session=None), "session is None, not an integer"),
    "another schema": (_messages(schema_version=99), "holds events of schema version 99"),
}


@pytest.mark.parametrize("name", _CROOKED)
def test_whoever_reads_a_journal_checks_the_same(tmp_path: Path, name: str) -> None:
    """What a file's reader refuses, `attach` refuses as well, in the same words, and both name the file."""
    messages, why = _CROOKED[name]
    path = tmp_path / "rank0.journal"
    path.write_bytes(journals.written(messages))
    said = [_said(lambda: read_run([path])), _said(lambda: follow(str(tmp_path)).close())]
    assert all("rank0.journal" in one and why in one for one in said), said
    assert said[0].replace(f"{tmp_path}/", "") == said[1]


def test_follow_refuses_files_of_two_runs(tmp_path: Path) -> None:
    """Journals that can't be of one run are refused by name, as `ddp-lab report` does."""
    (tmp_path / "a.journal").write_bytes(_journal())
    (tmp_path / "b.journal").write_bytes(_journal(session=2)[:-200])
    assert "two files are of rank 0" in _said(lambda: follow(str(tmp_path)).close())


def test_who_serves_journals_survives_what_is_none(tmp_path: Path) -> None:
    """A pipe among the journals of `ddp-lab run --serve` and questions that are none end nothing: who asks is told."""
    server = JournalServer(tmp_path)
    try:
        token = json.loads(server.invitation.read_text())["token"]
        os.mkfifo(tmp_path / "rank0.journal")
        with pytest.raises(ConnectionError, match=r"rank0\.journal is not a regular file"):
            follow(server.address, token)
        (tmp_path / "rank0.journal").unlink()
        (tmp_path / "rank0.journal").write_bytes(_journal())
        connection = _Connection(server.address, token)
        for question in (b"", b"[]", b"{", b'{"have": {"a": 1}}', b"[" * 100_000):
            connection._socket.send(question)
        wait_until(lambda: server.unanswered == 5, "five questions")
        connection.close()
        with follow(server.address, token) as job:
            assert job.timeline.reducers()
    finally:
        server.close()


@pytest.mark.parametrize("world_size", [50_000_000, 2**31 - 1])
def test_a_number_of_ranks_is_not_believed(tmp_path: Path, world_size: int) -> None:
    """A small journal of a run of two billion ranks takes no memory for them; the report says who has no file."""
    path = tmp_path / "rank0.journal"
    path.write_bytes(_journal(world_size=world_size))
    run, peak = _peak(lambda: read_run([path], partial=True))
    assert peak < 16 << 20
    assert f"there is no file of ranks 1–{world_size - 1}, which belongs to the run" in run.notices[0]


def test_sizes_that_are_announced(tmp_path: Path) -> None:
    """A journal of 128 MiB of nothing whose message announces 4 GiB is not waited for: no message is so large. 16 MiB
    of headers that all announce 8 MiB take effort for the bytes that are there, not for what they say."""
    path = tmp_path / "rank0.journal"
    opening = journals.written([journals.opening()])
    header = bytearray(journal.pack([b""], 1)[:16])
    struct.pack_into("<I", header, 8, 2**32 - 1)
    path.write_bytes(opening + header + struct.pack("<I", zlib.crc32(header)))
    os.truncate(path, 128 << 20)
    run, peak = _peak(lambda: read_run([path]))
    assert peak < 16 << 20
    assert "is damaged in one place (134,21" in run.damage[0]
    assert journal.MOST_BYTES == wires.MAX_MESSAGE
    path = tmp_path / "rank0.journal"
    head = struct.pack("<4sIII", journal.pack([b""], 0)[:4], 9, 8 << 20, 0)
    path.write_bytes(_journal() + (head + struct.pack("<I", zlib.crc32(head))) * ((16 << 20) // 20))
    reader = journal.Reader()
    fed = sum(len(reader.feed(data, last=not data)) for data in journal.chunks(path, reader))
    assert fed == 3
    assert reader.gave_up
    assert "the rest is ignored" in read_run([path], partial=True).damage[0]


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    """A pipe, a device or a socket that is called a recording is refused at once, by all who read files."""
    for name in ("rank0.journal", "run.npz"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        path = folder / name
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        else:
            path.symlink_to("/dev/zero")
        refused = [
            _said(lambda path=path: Timeline.load(path)),
            _said(lambda folder=folder: Timeline.load(folder)),
            _said(lambda path=path: compare(path, path)),
        ]
        if name == "rank0.journal":
            refused.append(_said(lambda folder=folder: follow(str(folder)).close()))
        assert all(f"{name} is not a regular file" in one for one in refused), refused


CONTROLS = "\x1b]0;title\x07\x1b[2J\x9b1m\x0b\x00\ud800\ufffe\u202etxt"


def _with_controls(folder: Path) -> list[Path]:
    """A journal and a saved timeline full of what a terminal obeys and XML forbids."""
    described = json.loads(json.dumps(_ASSIGNMENT))
    described["module"] = f"Net{CONTROLS}"
    described["options"] = {"comm_hook": CONTROLS, f"option{CONTROLS}": CONTROLS}
    for one in described["parameters"]:
        one["name"] = f"{CONTROLS}.weight{one['index']}"
    recorded = folder / f"rank0{CONTROLS[:12]}.journal"
    batch = events.Batch(0, 1, 0, 0, _TIMELINE.since(0)[0][0][1])
    opening = journals.opening(host=CONTROLS, run=CONTROLS, clock=CONTROLS, world_size=3)
    describe = journal.json_frames("describe", descriptions=[described])
    end = journal.json_frames("end", how=CONTROLS)
    recorded.write_bytes(journals.written([opening, describe, journals.batch(batch), end]))
    saved = folder / "saved.npz"
    with np.load(_TIMELINE.save(saved)) as file:
        arrays = dict(file)
    about = json.loads(str(arrays["about"]))
    about["described"] = [[rank, described] for rank, _ in about["described"][:1] * 2]
    about["ranks"] = {
        key: {**one, "status": {"state": CONTROLS, "host": CONTROLS}} for key, one in about["ranks"].items()
    }
    saved.write_bytes(hostile.npz({**arrays, "about": np.array(json.dumps(about))}))
    return [recorded, saved]


def test_control_characters_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, hosts, errors and file names that hold what a terminal obeys, or what XML forbids, are shown with escapes:
    on the terminal, in the page, and in pictures, which stay XML."""
    for path in _with_controls(tmp_path):
        page = tmp_path / "page.html"
        assert main.main(["report", str(path), "--partial", "--output", str(page)]) == 0
        main.main(["report", str(path), str(path)])  # an error that names the file
        out, err = capsys.readouterr()
        shown = out + err + page.read_text(encoding="utf-8")
        assert not re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ufffe]", shown)
        assert r"Net\x1b]0;title\x07\x1b[2J\x9b1m" in out
        timeline = Timeline.load([path], partial=True)
        for view in ("buckets", "overlap", "stragglers", "sync", "findings"):
            ElementTree.fromstring(VIEWS[view].picture(timeline))
        assert [one for one in timeline.ranks() if "\x1b" in one.state] == []


def test_a_bomb_is_refused_before_it_goes_off(saved: dict[str, np.ndarray], tmp_path: Path) -> None:
    """A file that unpacks to hundreds of times its size is refused by what it says of itself, without unpacking."""
    path = tmp_path / "bomb.npz"
    packed = bytearray(hostile.npz(saved, compression=zipfile.ZIP_DEFLATED))
    struct.pack_into("<I", packed, packed.index(b"PK\1\2") + 24, 377_487_488)
    path.write_bytes(packed)
    refusal, peak = _peak(lambda: _said(lambda: Timeline.load(path)))
    assert "would unpack to 377," in refusal
    assert peak < 16 << 20


class _Bomb:
    """Says, when it is unpickled, that it was."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["DDP_LAB_TEST_BOMB"],)


def _array(array: np.ndarray) -> bytes:
    body = io.BytesIO()
    np.save(body, array)
    return body.getvalue()


def _header_of_a_terabyte() -> bytes:
    body = io.BytesIO()
    described = np.lib.format.dtype_to_descr(events.DTYPE)
    header = {"descr": described, "fortran_order": False, "shape": (10**11,)}
    np.lib.format.write_array_header_1_0(body, header)
    return body.getvalue()


HOSTILE: dict[str, Callable[[dict[str, np.ndarray]], bytes]] = {
    "a pickle within": lambda saved: hostile.npz({**saved, "events": np.array([_Bomb()], object)}),
    "a pickle": lambda saved: pickle.dumps(_Bomb()),
    "an array": lambda saved: _array(saved["events"]),
    "a terabyte": lambda saved: hostile.npz({**saved, "events": _header_of_a_terabyte()}),
    "other compression": lambda saved: hostile.npz(saved, compression=zipfile.ZIP_LZMA),
    "deep JSON": lambda saved: hostile.npz({**saved, "about": np.array("[" * 100_000)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(
    name: str, saved: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickles are not unpickled, sizes not believed: each file is refused by name, by whoever reads it."""
    exploded = tmp_path / "exploded"
    monkeypatch.setenv("DDP_LAB_TEST_BOMB", str(exploded))
    path = tmp_path / "hostile.npz"
    path.write_bytes(HOSTILE[name](saved))
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


@pytest.fixture(scope="module")
def mute(rank: tuple[Wire, Any, Any]) -> Iterator[list[socket.socket]]:
    """A connection to each port of the wire that never says anything; made early, for a test that comes late."""
    addresses = [rank[0].endpoint()[channel].removeprefix("tcp://").split(":") for channel in ("data", "control")]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)), 20)) for host, port in addresses]


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


def test_messages_of_a_rank(rank: tuple[Wire, Any, Any], mute: object) -> None:
    """Whatever a rank with the key sends, the wire goes on: it takes the next message, and keeps the error."""
    wire, data, control = rank

    def check(sent: list[list[bytes]]) -> None:
        for frames in sent:
            data.send_multipart(frames)
            control.send_multipart(frames[1:] or frames)
            control.send_multipart(frames)
        _still_serves(wire, data, control)

    _tried(QUICK, check, st.lists(_sent, min_size=1, max_size=5))


def test_wrong_ranks_and_a_flood(rank: tuple[Wire, Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    """A hello of a rank that is no number leaves no entry that would break who sends to all; the error names it. Of a
    thousand messages that are none each is counted and dropped; the log has a line for every power of ten."""
    wire, data, control = rank
    for wrong in ("x", [], -1, 1.5, None, True):
        control.send(json.dumps({"type": "hello", "rank": wrong}).encode())
    _still_serves(wire, data, control)
    assert wire.connected() <= {0, 5}
    wire.send(None, Ping())
    assert wire.error is not None
    before = wire.malformed
    for _ in range(1_000):
        data.send_multipart([JSON_FRAME, b"[]"])
    _still_serves(wire, data, control)
    assert wire.malformed == before + 1_000
    assert len([one for one in caplog.records if one.name == "ddp_lab.control.wire"]) <= 4


def test_who_says_nothing_is_not_kept(rank: tuple[Wire, Any, Any], mute: list[socket.socket]) -> None:
    """A connection to the wire that doesn't shake hands is closed, long before ZeroMQ's thirty seconds; those of ranks
    stay."""
    for one in mute:
        while one.recv(1024):  # the greeting; the limit is of the whole handshake
            pass
    _still_serves(*rank)


_count = iter(range(10**9))


def _still_serves(wire: Wire, data: Any, control: Any) -> None:
    marker = f"marker {next(_count)}"
    data.send_multipart([JSON_FRAME, json.dumps({"type": "flushed", "rank": 0, "cell": marker}).encode()])
    assert wire.wait_for(marker, [0], 20)
    control.send(b'{"type": "bye", "rank": 5}')
    control.send(b'{"type": "hello", "rank": 5}')
    wait_until(lambda: 5 in wire.connected(), "the hello")
