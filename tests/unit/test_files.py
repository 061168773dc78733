"""What is written over a user's file replaces it as a whole, or leaves it as it was."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_lab import files
from ddp_lab.cli import main
from ddp_lab.timeline.timeline import Timeline
from tests.disks import full, small_disk
from tests.training_events import Training


def _timeline(steps: int = 30) -> Timeline:
    return Training(2).trained(steps)


WRITERS: dict[str, Callable[[Timeline, Path], object]] = {
    "save": lambda timeline, path: timeline.save(path),
    "report": lambda timeline, path: timeline.report(path),
    "trace": lambda timeline, path: timeline.to_perfetto(path),
    "packed trace": lambda timeline, path: timeline.to_perfetto(path.with_suffix(".gz")),
    "text": lambda timeline, path: files.write_text(path, "x" * 5_000),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_older_file(tmp_path: Path, name: str) -> None:
    """Where the new file does not fit, the one before is there, byte by byte, and nothing beside it. What is replaced
    is never written to, not even at the last moment: who has it open reads it to its end."""
    older, timeline, path = b"older" * 100, _timeline(), tmp_path / "file.x"
    there = [path.with_suffix(".gz"), path]
    for one in there:
        one.write_bytes(older)
    with full(2_000), pytest.raises(OSError, match=r"File too large: '.*/file\.(x|gz)'"):
        WRITERS[name](timeline, path)
    assert sorted(tmp_path.iterdir()) == there
    assert [one.read_bytes() for one in there] == [older, older]
    with there[0].open("rb") as first, there[1].open("rb") as second:
        WRITERS[name](timeline, path)
        assert [first.read(), second.read()] == [older, older]
    assert len([one for one in tmp_path.iterdir() if one.read_bytes() != older]) == 1


def test_a_full_small_disk_leaves_the_older_timeline(tmp_path: Path) -> None:
    """The same on a disk of one megabyte that others have filled."""
    with small_disk(tmp_path / "small") as folder:
        path = _timeline(5).save(folder / "run.npz")
        free = os.statvfs(folder)
        (folder / "others").write_bytes(bytes(free.f_bavail * free.f_bsize))
        with pytest.raises(OSError, match="No space left on device"):
            _timeline(200).save(path)
        assert Timeline.load(path).reducers()[0].last_step == 4


def test_a_comparison_that_does_not_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ddp-lab compare --json` and `ddp-lab report` say in a line that they can't write, and leave what was there."""
    run = str(_timeline().save(tmp_path / "run.npz"))
    answer = tmp_path / "answer.json"
    answer.write_text("{}")
    with full(500):
        assert main.main(["compare", run, run, "--json", str(answer)]) == 1
        assert main.main(["report", run, "--output", str(answer)]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err == [f"ddp-lab: can't write {answer}: File too large"] * 2
    assert json.loads(answer.read_text()) == {}


def test_modes_links_and_what_is_no_file_stay(tmp_path: Path) -> None:
    """A new file has the umask's mode and a replaced one keeps its own; a link leads to the new contents; what is no
    file is written as it is."""
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    before = os.umask(0o027)
    try:
        files.write_text(link, "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    files.write_text(link, "newer")
    assert (link.is_symlink(), path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (True, "newer", 0o604)
    files.write_text("/dev/null", "nothing")
    assert not Path("/dev/null").is_file()
    with pytest.raises(FileNotFoundError, match=r"nowhere/file'"):
        files.write_text(tmp_path / "nowhere" / "file", "")
