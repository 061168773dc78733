"""A rank's journal on disks that are full, gone or silent: the program goes on, and what is missing is known."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_lab import recording
from ddp_lab.launch.recorded_rank import JournalWriter
from ddp_lab.protocol import journal
from ddp_lab.timeline.timeline import read_run
from tests.disks import full
from tests.waiting import wait_until

ABOUT = {"rank": 3, "world_size": 4, "restart": 0, "run": "r"}


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """All that came on stderr so far."""
    so_far = [""]

    def read() -> str:
        so_far[0] += capfd.readouterr().err
        return so_far[0]

    return read


@pytest.fixture
def first() -> Iterator[int]:
    """Sequence number of the next event."""
    recording.enable()
    return recording.statistics().recorded


def _mark(times: int) -> None:
    for _ in range(times):
        recording.mark("here")


def _caught_up(writer: JournalWriter) -> None:
    wait_until(lambda: writer._cursor == recording.statistics().recorded, "the events in the journal")


def _sequence(path: Path) -> list[int]:
    """Numbers of the events in a journal, in which no byte may be damaged."""
    contents = journal.read(path)
    assert contents.damage == []
    return [number for batch in contents.batches for number in batch.events["sequence"].tolist()]


def test_a_disk_that_is_full_for_a_moment_costs_nothing(tmp_path: Path, told: Callable[[], str], first: int) -> None:
    """What could not be written while the disk was full is written when it has room: every event is in the journal,
    whose messages are all whole, and one line has said why it waited."""
    path = journal.path_of(tmp_path, 3)
    writer = JournalWriter(path, ABOUT)
    wait_until(lambda: path.exists() and path.stat().st_size > 100, "the journal")
    with full(path.stat().st_size + 20_000):
        _mark(1_000)
        wait_until(lambda: "can't write its journal" in told(), "a word on the full disk")
        _mark(1_000)
    _mark(1_000)
    writer.close("finished")
    assert _sequence(path) == list(range(first, first + 3_000))
    assert told().count("\n") == 1
    assert f"ddp-lab: rank 3 can't write its journal {path}: File too large. The program continues" in told()
    assert not read_run([path], partial=True).damage


def test_a_disk_that_stays_full(tmp_path: Path, told: Callable[[], str], first: int) -> None:
    """What was written before is read; the journal says how the program ended and how many events are missing."""
    path = journal.path_of(tmp_path, 3)
    writer = JournalWriter(path, ABOUT)
    wait_until(lambda: path.exists() and path.stat().st_size > 100, "the journal")
    _mark(100)
    _caught_up(writer)
    with full(path.stat().st_size):
        _mark(recording.statistics().capacity + 100)
        writer.close("RuntimeError: \x1b" + "é" * 300)
    assert _sequence(path) == list(range(first, first + 100))
    notices = read_run([path], partial=True).notices
    assert (
        f"{recording.statistics().recorded - first - 100:,} events of rank 3 could not be recorded: File" in notices[1]
    )
    timeline = read_run([path], partial=True).timeline
    assert timeline.ranks()[0].dropped == recording.statistics().recorded - 100  # those before its begin among them
    assert notices[2].startswith(r"rank 3 ended early: RuntimeError: \x1b")
    assert told().count("\n") == 1


def test_a_part_that_could_not_be_taken_back(tmp_path: Path, first: int) -> None:
    """Of a message that the disk took in part, the part may stay at the file's end: the next one stands over it."""
    path = journal.path_of(tmp_path, 3)
    writer = JournalWriter(path, ABOUT)
    _mark(100)
    _caught_up(writer)
    with path.open("ab") as file:
        file.write(b"\xdd" * 50)
    _mark(100)
    writer.close("finished")
    assert _sequence(path) == list(range(first, first + 200))
    assert not read_run([path], partial=True).damage


@pytest.mark.parametrize("how", ["never there", "a file", "full"])
def test_a_journal_that_cannot_be_begun(tmp_path: Path, told: Callable[[], str], how: str) -> None:
    """Without its folder, or where that takes nothing, the rank goes on, and says that nothing of it was recorded."""
    folder = tmp_path / "folder"
    if how == "a file":
        folder.write_text("")
    elif how == "full":
        folder.mkdir()
    with full(700):  # less than the first message
        writer = JournalWriter(journal.path_of(folder, 3), ABOUT)
        _mark(10)
        writer.close("finished")
    first, second = told().splitlines()
    assert "can't write its journal" in first
    assert second.startswith("ddp-lab: rank 3 recorded nothing: ")


def test_a_folder_that_comes_late(tmp_path: Path, told: Callable[[], str], first: int) -> None:
    """What was recorded before the folder could be written is in the journal all the same."""
    folder = tmp_path / "folder"
    writer = JournalWriter(journal.path_of(folder, 3), ABOUT)
    _mark(10)
    wait_until(lambda: "No such file or directory" in told(), "a word on the folder")
    folder.mkdir()
    writer.close("finished")
    assert _sequence(journal.path_of(folder, 3)) == list(range(first, first + 10))


def test_a_journal_that_is_removed_begins_anew(tmp_path: Path, told: Callable[[], str], first: int) -> None:
    """Where somebody removes the folder under a rank, that is said, counted, and what follows is recorded."""
    path = journal.path_of(tmp_path / "folder", 3)
    path.parent.mkdir()
    writer = JournalWriter(path, ABOUT)
    _mark(100)
    _caught_up(writer)
    shutil.rmtree(path.parent)
    _mark(1)
    wait_until(lambda: "it was removed" in told(), "a word on the removed file")
    path.parent.mkdir()
    _mark(10)
    writer.close("finished")
    assert _sequence(path) == list(range(first + 100, first + 111))
    assert "100 events of rank 3 could not be recorded: " in read_run([path], partial=True).damage[0]


@pytest.mark.soak
def test_a_disk_that_does_not_answer(tmp_path: Path, told: Callable[[], str]) -> None:
    """A file that can't even be opened, as on a server that is away, holds up neither begin nor work; the end waits
    some seconds for it, and says so."""
    path = journal.path_of(tmp_path, 3)
    os.mkfifo(path)
    writer = JournalWriter(path, ABOUT)
    _mark(10)
    writer.close("finished")
    assert told() == f"ddp-lab: rank 3 could not finish its journal: {path} accepted no data for 5 s\n"
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # lets the thread go on, and end
    wait_until(lambda: not writer._thread.is_alive(), "the end of the thread")
    os.close(reader)


def test_only_the_newest_events_are_kept(tmp_path: Path, first: int) -> None:
    """A journal that has grown too long begins anew with the newest events, and goes on."""
    path = journal.path_of(tmp_path, 3)
    writer = JournalWriter(path, ABOUT, keep_events=100)
    for _ in range(40):
        _mark(10)
        _caught_up(writer)
    writer.close("finished")
    kept = _sequence(path)
    assert 100 <= len(kept) <= 220
    assert kept == list(range(kept[0], first + 400))
    assert not list(tmp_path.glob("*.shorter"))
