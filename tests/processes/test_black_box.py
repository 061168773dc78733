"""What a rank has recorded stays when it is killed: in a file in memory, and then in its journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ddp_lab.launch.black_boxes import BlackBoxes
from ddp_lab.protocol import black_box, journal
from ddp_lab.protocol.events import Kind
from ddp_lab.timeline.timeline import read_run

# Leaves what it records, with a journal that it never catches up with; then it is killed.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from ddp_lab import native, recording
file, folder, has_journal = int(sys.argv[1]), Path(sys.argv[2]), not sys.argv[3:]
if not has_journal:
    recording.mark("before")
native.load().leave_in(file)
if has_journal:
    from ddp_lab.launch import recorded_rank
    recording.enable()
    about = {"rank": 0, "world_size": 1, "restart": 0, "run": "r"}
    writer = recorded_rank.JournalWriter(folder / "rank0.journal", about)
    recording.mark("first")
    while writer._cursor < recording.statistics().recorded:
        pass
    writer._write = lambda: True
for _ in range(1_000):
    recording.mark("again")
if os.fork() == 0:
    for _ in range(10):
        recording.mark("in the child")
    ours = recording.drain(recording.statistics().recorded - 10)[0]
    assert len(ours) == 10, ours
    os._exit(0)
assert os.wait()[1] == 0
recording.mark("last")
os.kill(os.getpid(), signal.SIGKILL)
"""


def _die(boxes: BlackBoxes, folder: Path, *options: str) -> None:
    (file,) = boxes._files
    command = [sys.executable, "-c", PROGRAM, str(file), str(folder), *options]
    done = subprocess.run(command, pass_fds=[file], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.fixture
def boxes() -> Iterator[BlackBoxes]:
    made = BlackBoxes(1)
    yield made
    made.close()


def test_what_was_recorded_stays(boxes: BlackBoxes, tmp_path: Path) -> None:
    """From the first event on, whole, with its descriptions; a forked child records for itself alone."""
    assert black_box.read(boxes._files[0]) is None
    _die(boxes, tmp_path, "no journal")
    left = black_box.read(boxes._files[0])
    assert left is not None
    assert left.events["sequence"].tolist() == list(range(1_002))
    assert set(left.events["kind"].tolist()) == {int(Kind.MARK)}
    assert np.all(np.diff(left.events["host_ns"]) >= 0)
    assert [one["name"] for one in left.descriptions if one["type"] == "mark"] == ["again", "last"]


def test_a_journal_is_completed(boxes: BlackBoxes, tmp_path: Path) -> None:
    """Behind its last whole message, once; it says how the rank ended, and no byte of it is damaged. A journal of
    another process stays as it is."""
    _die(boxes, tmp_path)
    path = tmp_path / "rank0.journal"
    with path.open("ab") as file:
        file.write(journal.pack(journal.json_frames("describe", descriptions=[]), 3)[:30])  # a message that was cut
    pid = black_box.pid_of(boxes._files[0])
    boxes.note({0: SimpleNamespace(exitcode=-9, timestamp=1, pid=pid)})  # type: ignore[dict-item]
    boxes.complete(tmp_path)
    completed = path.read_bytes()
    boxes.complete(tmp_path)
    assert path.read_bytes() == completed
    other = BlackBoxes(1)
    _die(other, tmp_path / "elsewhere", "no journal")
    other.complete(tmp_path)
    other.close()
    assert path.read_bytes() == completed
    run = read_run([path])
    (rank,) = run.timeline.ranks()
    assert (rank.state, rank.events, rank.dropped) == ("killed by SIGKILL", 1_002, 0)
    assert not run.damage
    assert [name for _, _, name in run.timeline.marks()][-2:] == ["again", "last"]


def test_a_box_of_another_version_is_refused(boxes: BlackBoxes) -> None:
    os.pwrite(boxes._files[0], b"DDPLBBX0" + bytes(100), 0)
    with pytest.raises(ValueError, match="written by another version"):
        black_box.read(boxes._files[0])
