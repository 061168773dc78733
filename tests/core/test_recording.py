"""The Python face of the recorder. All tests share the process's recorder, so each reads from its own cursor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddp_lab import native, recording
from ddp_lab.protocol import archive
from ddp_lab.protocol.events import DTYPE, Kind
from tests.waiting import DEADLINE_S

_C = native.load()


@pytest.fixture
def cursor() -> Iterator[int]:
    """The position of the next event; recording is on before and after the test."""
    recording.enable()
    yield recording.statistics().recorded
    recording.enable()


def test_an_event_is_drained_as_it_was_recorded(cursor: int) -> None:
    """Every field given to record() arrives; what was not given says that it does not apply. A cursor beyond the last
    event raises instead of waiting for an event that has its number by chance."""
    before = _C.now_ns()
    given = {"reducer": 3, "step": 1 << 40, "bucket": 2, "parameter": 5, "bytes": 1 << 35}
    _C.record(Kind.GRAD_READY, **given, process_group=1, generation=7)
    _C.record(Kind.BACKWARD_BEGIN)
    events, dropped, following = recording.drain(cursor)
    assert (len(events), dropped, following, events.dtype) == (2, 0, cursor + 2, DTYPE)
    names = ("kind", "reducer", "step", "bucket", "parameter", "bytes", "process_group", "generation")
    assert [events[0][name] for name in names] == [Kind.GRAD_READY, 3, 1 << 40, 2, 5, 1 << 35, 1, 7]
    assert [events[1][name] for name in names] == [Kind.BACKWARD_BEGIN, -1, -1, -1, -1, -1, -1, 0]
    assert list(events["sequence"]) == [cursor, cursor + 1]
    assert before <= events["host_ns"][0] <= events["host_ns"][1] <= _C.now_ns()
    with pytest.raises(IndexError, match="beyond the next event"):
        recording.drain(following + 1)


def test_drops_are_counted_exactly(cursor: int) -> None:
    """A reader that comes too late learns how many events it missed, and the statistics count them once. A drained
    array is a copy of its own: writable, and unchanged when the ring is overwritten."""
    _C.record(Kind.MARK, step=17)
    kept, _, cursor = recording.drain(cursor)
    before = recording.statistics()
    for number in range(before.capacity + 1000):
        _C.record(Kind.MARK, step=number)
    events, dropped, following = recording.drain(cursor)
    assert dropped == 1000
    assert list(events["step"]) == list(range(1000, 1000 + before.capacity))
    assert following == cursor + before.capacity + 1000
    after = recording.statistics()
    assert after.dropped - before.dropped == 1000
    assert after.recorded - before.recorded == before.capacity + 1000
    assert kept["step"].tolist() == [17]
    assert kept.flags.writeable


def test_off_and_measured(cursor: int) -> None:
    """Between disable() and enable() neither events nor marks nor descriptions appear. statistics(measure=True) reports
    nanoseconds for an event without recording one."""
    _, described = recording.descriptions(0)
    recording.disable()
    assert not recording.enabled()
    assert not recording.statistics().enabled
    _C.record(Kind.MARK)
    recording.mark("while off")
    assert recording.drain(cursor)[2] == cursor
    assert recording.descriptions(described) == ([], described)
    recording.enable()
    recording.mark("on again")
    assert recording.drain(cursor)[2] == cursor + 1
    assert recording.statistics().ns_per_event is None
    cost = recording.statistics(measure=True).ns_per_event
    assert cost > 0
    assert recording.statistics().recorded == cursor + 1


def test_marks_and_logged_numbers(cursor: int) -> None:
    """Marks of one name share an index, which one description translates into the name. Each call is one description, a
    tensor of one element is its number, what is no number is refused, and nothing is logged while recording is off."""
    _, position = recording.descriptions(0)
    for name in ("load", "train", "load"):
        recording.mark(name)
    events, _, _ = recording.drain(cursor)
    found, following = recording.descriptions(position)
    assert set(events["kind"]) == {Kind.MARK}
    names = {description["index"]: description["name"] for description in found}
    assert [description["type"] for description in found] == ["mark", "mark"]
    assert [names[index] for index in events["parameter"]] == ["load", "train", "load"]
    assert recording.descriptions(following) == ([], following)
    position = recording.descriptions(0)[1]
    before = time.monotonic_ns()
    recording.log("loss", torch.tensor([0.5]))
    recording.log("loss", 0.25)
    with recording.suspended():
        recording.log("loss", 0.125)
    with pytest.raises(TypeError):
        recording.log("loss", None)  # type: ignore[arg-type]
    found, _ = recording.descriptions(position)
    assert [(one["type"], one["name"], one["value"]) for one in found] == [
        ("value", "loss", 0.5),
        ("value", "loss", 0.25),
    ]
    assert before <= found[0]["at_ns"] <= found[1]["at_ns"] <= time.monotonic_ns()


def test_marks_of_many_threads_get_one_index_for_each_name(cursor: int) -> None:
    """Threads that mark the same new names at once register each name once and lose no event."""
    _, position = recording.descriptions(0)
    names = [f"phase {number}" for number in range(20)]
    together = threading.Barrier(4)

    def mark_all() -> None:
        together.wait(timeout=DEADLINE_S)
        for name in names:
            recording.mark(name)

    threads = [threading.Thread(target=mark_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    events, dropped, _ = recording.drain(cursor)
    found, _ = recording.descriptions(position)
    assert sorted(description["name"] for description in found) == sorted(names)
    assert (len(events), dropped, len(set(events["thread"]))) == (80, 0, 4)
    assert sorted(events["parameter"]) == sorted(4 * [description["index"] for description in found])


class _Owner:
    pass


def test_a_description_is_kept_while_an_event_may_refer_to_it(cursor: int) -> None:
    """It outlives its owner until the ring has been overwritten once; later ones keep their positions."""
    _, position = recording.descriptions(0)
    owner = _Owner()
    recording.describe({"type": "owned"}, owner)
    _C.record(Kind.NONE)
    del owner
    recording.describe({"type": "lasting"})
    assert [one["type"] for one in recording.descriptions(position)[0]] == ["owned", "lasting"]
    for _ in range(recording.statistics().capacity):
        _C.record(Kind.NONE)
    recording.describe({"type": "last"})
    assert [one["type"] for one in recording.descriptions(position)[0]] == ["lasting", "last"]
    found, following = recording.descriptions(position + 2)
    assert ([one["type"] for one in found], following) == (["last"], position + 3)


def test_descriptions_of_models(cursor: int) -> None:
    """Models that never train leave nothing behind, a model holds its last assignments alone, and one that is gone is
    described once."""
    recording.describe({"type": "before"})
    kept = len(recording._descriptions)
    for _ in range(50):
        owner = _Owner()
        recording.describe({"type": "owned"}, owner)
        del owner
    recording.describe({"type": "after"})
    assert len(recording._descriptions) == kept + 1
    owner = _Owner()
    for _ in range(50):
        recording.describe({"type": "assignment", "reducer": 12345}, owner)
    assert weakref.getweakrefcount(owner) <= 2
    owner, other = _Owner(), _Owner()
    for _ in range(3):
        recording.describe({"type": "assignment", "reducer": 12346}, owner)
    recording.describe({"type": "assignment", "reducer": 12347}, other)
    _, position = recording.descriptions(0)
    del owner
    gone = [one for one in recording.descriptions(position)[0] if one["reducer"] in (12346, 12347)]
    assert gone == [{"type": "gone", "reducer": 12346}]


def test_a_description_is_a_copy_that_json_can_express() -> None:
    """What is appended later to the caller's dict is not in the description; what JSON lacks is refused."""
    _, position = recording.descriptions(0)
    mine = {"type": "own", "buckets": [{"bucket": 0}]}
    recording.describe(mine)
    mine["buckets"].append({"bucket": 1})  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        recording.describe({"type": "own", "tensor": object()})
    found, following = recording.descriptions(position)
    assert found == [{"type": "own", "buckets": [{"bucket": 0}]}]
    assert following == position + 1


def test_saved_files(cursor: int, tmp_path: Path) -> None:
    """The file holds events, descriptions and rank, at exactly the path given. In a process group it says which rank
    wrote it, also when nothing has been recorded."""
    recording.mark("saved")
    path = recording.save(tmp_path / "events.rank0")
    assert path == tmp_path / "events.rank0"
    saved = archive.read(path)
    assert [rank for rank, _ in saved.chunks] == [0] * len(saved.chunks)
    assert saved.chunks[-1][1]["sequence"][-1] == cursor
    assert saved.ranks[0]["dropped"] + sum(len(chunk) for _, chunk in saved.chunks) == cursor + 1
    assert "saved" in [description.get("name") for _, description in saved.described]
    code = (
        "import sys, torch.distributed as dist\n"
        "from ddp_lab import recording\n"
        "store = dist.HashStore()\n"
        "dist.init_process_group('fake', store=store, rank=3, world_size=4)\n"
        "recording.save(sys.argv[1])\n"
        "dist.destroy_process_group()\n"
    )
    code = "import torch.testing._internal.distributed.fake_pg\n" + code
    path = tmp_path / "rank3.npz"
    done = subprocess.run([sys.executable, "-c", code, os.fspath(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    saved = archive.read(path)
    assert ([*saved.ranks], sum(len(chunk) for _, chunk in saved.chunks)) == ([3], 0)
