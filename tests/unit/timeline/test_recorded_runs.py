"""Files of several ranks become one timeline, or an error that names the file that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_lab import follow
from ddp_lab.cli import main
from ddp_lab.dashboard.report import page
from ddp_lab.protocol import events, journal
from ddp_lab.protocol.events import Batch
from ddp_lab.timeline.recorded.merge import find_files
from ddp_lab.timeline.timeline import Timeline, read_run
from tests import journals
from tests.training_events import Training
from tests.waiting import wait_until

STEPS = 30


def write_journals(
    folder: Path,
    training: Training,
    *,
    ahead_ns: Sequence[int] | None = None,
    end: str | None = "finished",
    session: int = 10,
    **about: Any,
) -> list[Path]:
    """Writes what the ranks of a training would; `ahead_ns`: by how much each rank's clock is ahead of rank 0's."""
    folder.mkdir(parents=True, exist_ok=True)
    ahead = ahead_ns or [0] * training.ranks
    messages: list[list[list[bytes]]] = []
    for rank in range(training.ranks):
        given = {"session": session + rank, "pid": 100 + rank, "rank": rank, "run": "a", "world_size": training.ranks}
        clock = {"host": f"host{ahead[rank]}", "clock": f"boot{ahead[rank]}"}
        described = journal.json_frames("describe", descriptions=[training.assignment()])
        messages.append([journals.opening(**{**given, **clock, **about}), described])
    for step in range(STEPS):
        for rank, made in enumerate(training.step(step, begin_ns=10**12 + step * 20_000_000)):
            made["host_ns"] += ahead[rank]
            messages[rank].append(journals.batch(Batch(rank, session + rank, int(made["sequence"][0]), 0, made)))
    paths = [journal.path_of(folder, rank) for rank in range(training.ranks)]
    for path, of_rank in zip(paths, messages, strict=True):
        path.write_bytes(journals.written([*of_rank, *([] if end is None else [journal.json_frames("end", how=end)])]))
    return paths


def _places(path: Path) -> list[int]:
    """Where the messages of a journal begin, and where the last one ends."""
    sizes = [len(journal.pack(frames, 0)) for frames in journal.messages(path)]
    return [len(journal.MAGIC) + sum(sizes[:number]) for number in range(len(sizes) + 1)]


def test_journals_of_all_ranks_are_one_timeline(tmp_path: Path) -> None:
    """All steps of all ranks are there, without a notice; files may be given one by one or as their folder."""
    paths = write_journals(tmp_path, Training(ranks=3))
    for given in ([tmp_path], paths, paths[::-1]):
        run = read_run(given)
        assert run.notices == ()
        steps = run.timeline.steps()
        assert steps.groupby("rank").size().tolist() == [STEPS] * 3
        assert (steps["state"] == "complete").all()
        assert [rank.state for rank in run.timeline.ranks()] == ["finished"] * 3
        assert [rank.dropped for rank in run.timeline.ranks()] == [0] * 3


def test_clocks_of_other_hosts_are_aligned(tmp_path: Path) -> None:
    """Ranks 2 and 3 are on a host whose clock is 3 hours ahead: merged, they are as late as on one host. Where nothing
    tells how far clocks are apart, the notice says so, and times stay as they are."""
    delays = {(3, 1): 6.0}
    hours = 3 * 3600 * 10**9 + 12_345
    write_journals(tmp_path / "one", Training(ranks=4, delays=delays))
    write_journals(tmp_path / "two", Training(ranks=4, delays=delays), ahead_ns=[0, 0, hours, hours])
    one, two = read_run([tmp_path / "one"]), read_run([tmp_path / "two"])
    (notice,) = two.notices
    assert notice.startswith(f"ranks 2–3 on host{hours}: {-hours / 1e6:.0f}"[:30])
    assert f"from {STEPS * 3} collectives" in notice
    theirs, ours = two.timeline.all_reduces(), one.timeline.all_reduces()
    assert theirs["last_rank"].tolist() == ours["last_rank"].tolist()
    assert np.abs(theirs["late_ms"] - ours["late_ms"]).max() < 0.7  # half of an all-reduce
    assert {place.rank for place in two.timeline.stragglers()} == {3}
    paths = write_journals(tmp_path / "one", Training(ranks=2), ahead_ns=[0, 5])
    other = write_journals(tmp_path / "two", Training(ranks=2, reducer=7), ahead_ns=[0, 5])
    run = read_run([paths[0], other[1]])
    assert any("times of the two hosts can't be compared" in notice for notice in run.notices)


def _written(path: Path, data: bytes) -> list[Path]:
    path.write_bytes(data)
    return [path]


WRONG: dict[str, tuple[Callable[[Path], list[Path]], str]] = {
    "two of a rank": (
        lambda folder: [*write_journals(folder / "a", Training()), write_journals(folder / "b", Training())[0]],
        r"two files are of rank 0: .*a/rank0\.journal and .*b/rank0\.journal",
    ),
    "two runs": (
        lambda folder: [
            write_journals(folder / name, Training(), run=name)[rank] for rank, name in enumerate(("a", "b"))
        ],
        r"rank0\.journal \(rank 0\) and .*rank1\.journal \(rank 1\) are of different runs, a and b",
    ),
    "missing": (
        lambda folder: write_journals(folder, Training(ranks=3))[::2],
        r"there is no file of rank 1, which belongs to the run: the 2 given files are of ranks 0, 2",
    ),
    "schema": (
        lambda folder: write_journals(folder, Training(), schema_version=events.SCHEMA_VERSION + 1),
        rf"rank0\.journal holds events of schema version {events.SCHEMA_VERSION + 1}; this ddp_lab reads",
    ),
    "no recording": (lambda folder: _written(folder / "notes.npz", b"hello"), r"notes\.npz is not a saved timeline"),
    "empty": (lambda folder: [folder], r"contains no recording"),
    "begun": (lambda folder: _written(journal.path_of(folder, 1), journal.MAGIC), r"rank1\.journal has no header"),
    "gone": (lambda folder: [folder / "gone.journal"], r"gone\.journal does not exist"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_culprit(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Files that do not belong together, or are none, are refused by name; `ddp-lab report` says the same in a line."""
    make, message = WRONG[name]
    paths = make(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_run(paths)
    assert main.main(["report", *map(str, paths)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ddp-lab: ")
    assert error.count("\n") == 1


def test_in_a_folder_what_is_no_recording_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other files with such names are reported and ignored, beside journals and beside a saved timeline."""
    write_journals(tmp_path / "run", Training())
    saved = tmp_path / "saved"
    saved.mkdir()
    read_run([tmp_path / "run"]).timeline.save(saved / "timeline.npz")
    np.savez(saved / "data.npz", weights=np.ones(3))
    (saved / "a.npz").write_text("hello")
    (tmp_path / "run" / "mine.journal").write_text("hello")
    for folder, others in ((tmp_path / "run", ["mine.journal"]), (saved, ["a.npz", "data.npz"])):
        assert main.main(["report", str(folder)]) == 0
        captured = capsys.readouterr()
        assert [f"ddp-lab: {folder / name} is ignored: it is not a recording" for name in others] == [
            line for line in captured.err.splitlines() if "ignored" in line
        ]
        assert "DigitsNet" in captured.out


def test_nothing_to_show_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without a model is told in a sentence; the exit code is 1 and no page is written."""
    path = journal.path_of(tmp_path, 0)
    path.write_bytes(journals.written([journals.opening()]))
    assert main.main(["report", str(tmp_path)]) == 1
    assert "nothing to report: the recorded processes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_a_part_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --partial missing ranks and unreadable files are notices, and the rest is reported."""
    paths = write_journals(tmp_path, Training(ranks=3))
    paths[1].write_bytes(journal.MAGIC)
    assert main.main(["report", str(tmp_path), "--partial", "--output", str(tmp_path / "page.html")]) == 0
    captured = capsys.readouterr()
    assert "no file of rank 1" in captured.err
    assert "ignored" in captured.err
    assert "DigitsNet" in captured.out
    assert (tmp_path / "page.html").is_file()


def test_a_rank_that_was_killed_is_told_from_one_that_ended(tmp_path: Path) -> None:
    """Without its last message a journal is of a killed rank; a message that is cut short is left out."""
    paths = write_journals(tmp_path, Training(), end=None)
    whole = [len(read_run([tmp_path]).timeline.steps().query(f"rank == {rank}")) for rank in range(2)]
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[:-10])
    run = read_run([tmp_path])
    assert [rank.state for rank in run.timeline.ranks()] == ["killed", "killed"]
    assert run.notices == ("rank 0 ended early: killed", "rank 1 ended early: killed")
    cut = [len(run.timeline.steps().query(f"rank == {rank}")) for rank in range(2)]
    assert (cut[0], cut[1]) == (whole[0], whole[1] - 1)


def test_every_cut_of_a_journal_can_be_read(tmp_path: Path) -> None:
    """Wherever the process was killed, the complete messages before are read, no more and no less."""
    path = write_journals(tmp_path, Training(ranks=1, buckets=1, parameters=1))[0]
    data = path.read_bytes()
    assert journals.written(list(journal.messages(path))) == data
    ends = np.array(_places(path)[1:])
    for end in range(len(journal.MAGIC), len(data), 23):
        path.write_bytes(data[:end])
        assert len(list(journal.messages(path))) == int((ends <= end).sum())


def test_news_are_what_has_not_been_read(tmp_path: Path) -> None:
    """Reading on from where one was gives the file's bytes once; one that was written anew is read from its begin."""
    path = journal.path_of(tmp_path, 0)
    path.write_bytes(b"ab")
    (piece,) = journal.news(tmp_path, {})
    assert piece.data == b"ab"
    have = {piece.name: (piece.life, piece.offset + len(piece.data))}
    assert journal.news(tmp_path, have) == []
    with path.open("ab") as file:
        file.write(b"cd")
    (piece,) = journal.news(tmp_path, have)
    assert (piece.data, piece.offset) == (b"cd", 2)
    anew = tmp_path / "anew"
    anew.write_bytes(b"xy")
    anew.replace(path)
    (piece,) = journal.news(tmp_path, {piece.name: (piece.life, piece.offset + 2)})
    assert (piece.data, piece.offset) == (b"xy", 0)


def test_what_stands_around_damage_is_read(tmp_path: Path) -> None:
    """Two steps of rank 1 are damaged, one by a byte, one cut and written over: all others are there, and a notice, and
    a warning of `Timeline.load`, say what is missing. The cut message hides none of those behind it."""
    paths = write_journals(tmp_path, Training())
    places, data = _places(paths[1]), bytearray(paths[1].read_bytes())
    data[places[10] + 50] ^= 4
    paths[1].write_bytes(data[: places[20] + 60] + data[places[21] :])
    run = read_run([tmp_path])
    notice = "rank1.journal is damaged in 2 places"
    (damage,) = run.damage
    assert notice in damage
    assert "2 of its messages are missing" in damage
    steps = run.timeline.steps().query("rank == 1")
    assert set(range(STEPS)) - set(steps["step"]) == {8, 18}
    assert run.timeline.ranks()[1].dropped == 2 * run.timeline.ranks()[1].events // (STEPS - 2)
    with pytest.warns(UserWarning, match=notice):
        Timeline.load(tmp_path)
    with follow(str(tmp_path)) as job:
        wait_until(lambda: any(notice in one for one in job.notices()), "the notice of who follows")
        wait_until(lambda: {one.state for one in job.timeline.ranks()} == {"finished"}, "the end of both")
        assert [one.events for one in job.timeline.ranks()] == [one.events for one in run.timeline.ranks()]


def test_no_bit_of_a_journal_changes_unnoticed(tmp_path: Path) -> None:
    """Of 150 journals, in each of which a bit was turned over, none is read with other numbers, and all but those
    damaged where they say what they are can be read."""
    path = write_journals(tmp_path, Training(ranks=1, buckets=1, parameters=1))[0]
    whole, numbers, header = path.read_bytes(), np.random.default_rng(0), _places(path)[1]
    right = {*_events(read_run([tmp_path]).timeline)}
    refused = 0
    for bit in numbers.integers(0, 8 * len(whole), 150).tolist():
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            run = read_run([tmp_path])
        except ValueError:
            refused += 1
            assert bit // 8 < header
            continue
        assert run.damage
        assert {*_events(run.timeline)} <= right
    assert refused < 30


def _events(timeline: Timeline) -> list[bytes]:
    return [event.tobytes() for _, chunk in timeline.since(0)[0] for event in chunk]


def test_what_was_taken_back_is_not_missed(tmp_path: Path) -> None:
    """Who follows a journal has read half of a message that its writer then took back and wrote in another way: it
    reads that place once more."""
    first, half, then = ([b"a" * 40], [b"b" * 400], [b"c" * 700])
    torn = journals.written([first]) + journal.pack(half, 1)[:200]
    again = journals.written([first, then, first])
    reader = journal.Reader()
    assert reader.feed(torn) == [first]
    found = reader.feed(again[reader.offset :])
    found += reader.feed(again[reader.offset :])
    assert found == [then, first]
    assert (reader.places, reader.missing) == (0, 0)


def test_the_first_to_fail_is_named_first(tmp_path: Path) -> None:
    """The rank whose error brought down the others, whatever its number; one that was killed could not say when. A
    journal whose disk was full at the end says so in its last message, or in its first one; the notice has it. A
    notice has the first line of an error, the page all of them."""
    ends = {
        0: ("RuntimeError: Connection closed by peer", 2),
        1: ("ValueError: no data\n\tin a.csv (train.py:3)", 1),
        2: None,
    }
    for rank, end in ends.items():
        said = [] if end is None else [journal.json_frames("end", how=end[0], ended_ns=end[1])]
        path = journal.path_of(tmp_path, rank)
        path.write_bytes(journals.written([journals.opening(rank=rank, world_size=3), *said]))
    run = read_run([tmp_path])
    assert [notice for notice in run.notices if "ended early" in notice] == [
        "rank 1 ended early: ValueError: no data (train.py:3)",
        "rank 0 ended early: RuntimeError: Connection closed by peer",
        "rank 2 ended early: killed",
    ]
    assert "<p>Rank 1 failed: ValueError: no data\n    in a.csv (train.py:3)</p>" in page(run.timeline)
    end = {"how": "finished", "missing": 1234, "why": "No space left on device"}
    for number, messages in enumerate(
        ([journals.opening(), journal.json_frames("end", **end)], [journals.opening(**end)])
    ):
        path = journal.path_of(tmp_path / str(number), 0)
        path.parent.mkdir()
        path.write_bytes(journals.written(messages))
        run = read_run([path])
        assert run.notices[0] == "1,234 events of rank 0 could not be recorded: No space left on device"
        assert not any("ended early" in notice for notice in run.notices)


def test_saved_timelines_and_folders_of_them_can_be_read(tmp_path: Path) -> None:
    """What `Timeline.save` wrote is a recording like any other; a folder's journals go before its saved timelines."""
    write_journals(tmp_path / "run", Training())
    timeline = read_run([tmp_path / "run"]).timeline
    saved = timeline.save(tmp_path / "run" / "timeline.npz")
    files, others = find_files([tmp_path / "run"])
    assert (len(files), others) == (2, [])
    again = read_run([saved]).timeline
    assert again.spans().equals(timeline.spans())
    assert Timeline.load([tmp_path / "run"]).spans().equals(timeline.spans())
    assert Timeline.load(tmp_path / "run").spans().equals(timeline.spans())
