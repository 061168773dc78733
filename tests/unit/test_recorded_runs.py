"""Files of several ranks become one timeline, or an error that names the file that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_lab import cli, events, journal
from ddp_lab.client.recorded_files import find_files
from ddp_lab.client.recorded_runs import read_run
from ddp_lab.client.timeline import Timeline
from ddp_lab.events import Batch
from tests.training_events import Training

STEPS = 30


def write_journals(
    folder: Path,
    training: Training,
    *,
    ahead_ns: Sequence[int] | None = None,
    end: str | None = "finished",
    **about: Any,
) -> list[Path]:
    """Writes what the ranks of a training would; `ahead_ns`: by how much each rank's clock is ahead of rank 0's."""
    folder.mkdir(parents=True, exist_ok=True)
    ahead = ahead_ns or [0] * training.ranks
    paths = [journal.path_of(folder, rank) for rank in range(training.ranks)]
    for rank, path in enumerate(paths):
        opening = {
            "schema_version": events.SCHEMA_VERSION, "session": 10 + rank, "pid": 100 + rank, "rank": rank,
            "host": f"host{ahead[rank]}", "clock": f"boot{ahead[rank]}", "world_size": training.ranks,
            "restart": 0, "run": "a",
        }  # fmt: skip
        path.write_bytes(journal.MAGIC + journal.json_message("journal", **(opening | about)))
        _append(path, journal.json_message("describe", descriptions=[training.assignment()]))
    for step in range(STEPS):
        for rank, made in enumerate(training.step(step, begin_ns=10**12 + step * 20_000_000)):
            made["host_ns"] += ahead[rank]
            batch = Batch(rank, 10 + rank, int(made["sequence"][0]), 0, made)
            _append(paths[rank], journal.pack([bytes(frame) for frame in events.encode(batch)]))
    for path in paths:
        if end is not None:
            _append(path, journal.json_message("end", how=end))
    return paths


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


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
    """Ranks 2 and 3 are on a host whose clock is 3 hours ahead: merged, they are as late as on one host."""
    delays = {(3, 1): 6.0}
    hours = 3 * 3600 * 10**9 + 12_345
    write_journals(tmp_path / "one", Training(ranks=4, delays=delays))
    write_journals(tmp_path / "two", Training(ranks=4, delays=delays), ahead_ns=[0, 0, hours, hours])
    one, two = read_run([tmp_path / "one"]), read_run([tmp_path / "two"])
    (notice,) = two.notices
    assert notice.startswith(f"ranks 2–3 on host{hours}: {-hours / 1e6:.0f}"[:30])
    assert f"from {STEPS * 3} collectives" in notice
    theirs, ours = two.timeline.sync(), one.timeline.sync()
    assert theirs["last_rank"].tolist() == ours["last_rank"].tolist()
    assert np.abs(theirs["late_ms"] - ours["late_ms"]).max() < 0.7  # half of an all-reduce
    assert {place.rank for place in two.timeline.find_late()} == {3}


def test_hosts_without_a_common_collective_are_said(tmp_path: Path) -> None:
    """Where nothing tells how far clocks are apart, the notice says so, and times stay as they are."""
    paths = write_journals(tmp_path / "one", Training(ranks=2), ahead_ns=[0, 5])
    other = write_journals(tmp_path / "two", Training(ranks=2, reducer=7), ahead_ns=[0, 5])
    run = read_run([paths[0], other[1]])
    assert any("times of the two hosts can't be compared" in notice for notice in run.notices)


def _second_of_rank_0(folder: Path) -> list[Path]:
    return [*write_journals(folder / "a", Training()), write_journals(folder / "b", Training())[0]]


def _another_run(folder: Path) -> list[Path]:
    return [
        write_journals(folder / "a", Training())[0],
        write_journals(folder / "b", Training(), run="b")[1],
    ]


def _without_rank_1(folder: Path) -> list[Path]:
    paths = write_journals(folder, Training(ranks=3))
    return [paths[0], paths[2]]


def _newer(folder: Path) -> list[Path]:
    return write_journals(folder, Training(), schema_version=events.SCHEMA_VERSION + 1)


def _no_recording(folder: Path) -> list[Path]:
    (folder / "notes.npz").write_text("hello")
    return [folder / "notes.npz"]


def _empty(folder: Path) -> list[Path]:
    return [folder]


def _begun(folder: Path) -> list[Path]:
    journal.path_of(folder, 1).write_bytes(journal.MAGIC)
    return [journal.path_of(folder, 1)]


def _gone(folder: Path) -> list[Path]:
    return [folder / "gone.journal"]


WRONG: dict[str, tuple[Callable[[Path], list[Path]], str]] = {
    "two of a rank": (_second_of_rank_0, r"two files are of rank 0: .*a/rank0\.journal and .*b/rank0\.journal"),
    "two runs": (
        _another_run,
        r"rank0\.journal \(rank 0\) and .*rank1\.journal \(rank 1\) are of different runs, a and b",
    ),
    "missing": (_without_rank_1, r"there is no file of rank 1, which took part: the 2 given are of ranks 0, 2"),
    "schema": (
        _newer,
        rf"rank0\.journal holds events of schema version {events.SCHEMA_VERSION + 1}, this ddp_lab reads",
    ),
    "no recording": (_no_recording, r"notes\.npz is not a saved timeline"),
    "empty": (_empty, r"holds no recording"),
    "begun": (_begun, r"rank1\.journal does not say whose journal it is"),
    "gone": (_gone, r"gone\.journal does not exist"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_culprit(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Files that do not belong together, or are none, are refused by name; `ddp-lab report` says the same in a line."""
    make, message = WRONG[name]
    paths = make(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_run(paths)
    assert cli.main(["report", *map(str, paths)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ddp-lab: ")
    assert error.count("\n") == 1


def test_a_part_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --partial missing ranks and unreadable files are notices, and the rest is reported."""
    paths = write_journals(tmp_path, Training(ranks=3))
    paths[1].write_bytes(journal.MAGIC)
    assert cli.main(["report", str(tmp_path), "--partial", "--output", str(tmp_path / "page.html")]) == 0
    captured = capsys.readouterr()
    assert "no file of rank 1" in captured.err
    assert "left out" in captured.err
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
    whole = list(journal.messages(path))
    assert b"".join(journal.pack(frames) for frames in whole) == data[len(journal.MAGIC) :]
    ends = np.cumsum([len(journal.pack(frames)) for frames in whole]) + len(journal.MAGIC)
    for end in range(len(journal.MAGIC), len(data), 7):
        path.write_bytes(data[:end])
        assert len(list(journal.messages(path))) == int((ends <= end).sum())


def test_news_are_what_has_not_been_read(tmp_path: Path) -> None:
    """Reading on from where one was gives the file's bytes once; one that was written anew is read from its begin."""
    path = journal.path_of(tmp_path, 0)
    path.write_bytes(journal.MAGIC + b"ab")
    (piece,) = journal.news(tmp_path, {})
    assert piece.data == b"ab"
    have = {piece.name: (piece.life, piece.offset + len(piece.data))}
    assert journal.news(tmp_path, have) == []
    _append(path, b"cd")
    (piece,) = journal.news(tmp_path, have)
    assert piece.data == b"cd"
    anew = tmp_path / "anew"
    anew.write_bytes(journal.MAGIC + b"x")
    anew.replace(path)
    (piece,) = journal.news(tmp_path, {piece.name: (piece.life, piece.offset + 2)})
    assert piece.data == b"x"


def test_saved_timelines_and_folders_of_them_can_be_read(tmp_path: Path) -> None:
    """What `Timeline.save` wrote is a recording like any other; a folder's journals go before its saved timelines."""
    write_journals(tmp_path / "run", Training())
    timeline = read_run([tmp_path / "run"]).timeline
    saved = timeline.save(tmp_path / "run" / "timeline.npz")
    assert len(find_files([tmp_path / "run"])) == 2
    again = read_run([saved]).timeline
    assert again.spans().equals(timeline.spans())
    assert Timeline.load([tmp_path / "run"]).spans().equals(timeline.spans())
    assert Timeline.load(tmp_path / "run").spans().equals(timeline.spans())
