"""From a source to a sentence: when no progress is said, and that any source will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from ddp_lab.diagnosis.detector import PROGRESS_AGAIN, Detector
from ddp_lab.diagnosis.report import HangReport
from ddp_lab.diagnosis.snapshot import Call, Place, RankSnapshot
from ddp_lab.diagnosis.sources.cells import Watch
from tests.unit.diagnosis.test_hangs import in_backward, waiting
from tests.waiting import wait_until

BARRIER = Call("barrier", "collective", "0", (0, 1), "", 0, None, 7)
DEADLOCK = "A backward pass and another collective wait for each other: rank 0 is in barrier #7"
IMPORT = Place("<frozen importlib._bootstrap>", 7, "_load", "", users=False)


class DictSource:
    """Ranks whose states are made up: rank -> snapshot."""

    def __init__(self, states: Mapping[int, RankSnapshot]) -> None:
        self._states = states

    def snapshots(self) -> list[RankSnapshot]:
        return list(self._states.values())


def test_a_source_made_of_a_dict() -> None:
    """The doctor and the watch of a cell say of it what they say of real ranks."""
    source = DictSource({0: waiting(0, BARRIER), 1: in_backward(1, 1)})
    report = HangReport.collect(source)
    assert report.diagnosis.kind == "backward"
    assert report.diagnosis.sentence.startswith(DEADLOCK)
    assert "rank 1 is in the backward, for bucket 1 of Net" in report.diagnosis.sentence
    watch = Watch(source, lambda ranks: None, 0.02)
    text = str(wait_until(lambda: watch.look(None), "a word"))
    assert text.startswith("no progress for ")
    assert report.brief in text


def _said(detector: Detector, looks: Sequence[tuple[float, Sequence[RankSnapshot]]]) -> list[str]:
    """What is said after each look, "" for nothing."""
    return [str(detector.judge(at, ranks, detector.add(at, ranks)) or "") for at, ranks in looks]


PAIR = [waiting(0, BARRIER), in_backward(1, 1)]
LATER = [waiting(0, replace(BARRIER, sequence=8)), in_backward(1, 2)]
BUSY = [waiting(0, BARRIER), RankSnapshot(1, "running", stack=(IMPORT,))]


def test_a_cell_is_told_once() -> None:
    """Nothing is said before the time is over, and nothing after it was: outputs and other lines are progress. That a
    rank imports is said before, once."""
    detector = Detector(10.0, sure_s=10.0)
    detector.progress(0.0)
    said = _said(detector, [(4.0, PAIR), (9.0, PAIR), (12.0, LATER), (13.0, BUSY), (23.0, BUSY), (33.0, BUSY)])
    assert said[:4] == [""] * 4
    assert said[4].startswith("ranks have waited for 10 s: rank 0 waits in barrier #7; rank 1 is in `_load()`")
    assert said[5] == ""
    detector.progress(40.0)
    said = _said(detector, [(44.0, PAIR), (49.0, PAIR), (55.0, PAIR), (66.0, PAIR)])
    assert said[:2] == ["", ""]
    assert said[2].startswith("no progress for 11 s: A backward pass and another collective")
    assert detector.is_over
    assert said[3] == ""


def test_the_last_rank_of_a_script_has_just_come() -> None:
    """Where all ranks wait, there has been progress until the last one began: the first one's wait does not count."""
    detector = Detector(10.0, sure_s=5.0, of_script=True)
    said = _said(detector, [(0.0, BUSY), (9.0, BUSY), (9.5, PAIR), (19.0, PAIR), (20.0, PAIR)])
    assert said[:4] == [""] * 4
    assert said[4].startswith("no progress for 10 s: A backward pass and another collective")


def test_a_script_is_told_what_changes() -> None:
    """One rank's wait is enough. Another reason is said, too, and that the ranks make progress again; not if one has
    ended: the others may only have stopped to wait. A busy rank at another line is said after twice the time."""
    detector = Detector(10.0, sure_s=5.0, of_script=True)
    moving = [[PAIR[0], RankSnapshot(1, "running", stack=(Place("a.py", line, "f", "f()", True),))] for line in (3, 4)]
    times = [(0.0, moving[0]), (6.0, moving[1]), (11.0, moving[0]), (12.0, moving[0]), (21.0, moving[1])]
    said = _said(detector, [*times, (22.0, moving[1]), (23.0, moving[0])])
    assert said[:2] == ["", ""]
    assert said[2].startswith("no progress for 11 s: rank 0 waits in barrier #7")
    assert "rank 1 is in `f()`" in said[2]
    assert said[3:5] == ["", ""]
    assert said[5].startswith("ranks have waited for 22 s: rank 0 waits in barrier #7")
    assert said[6] == ""
    assert detector.last is not None
    ended = [PAIR[0], RankSnapshot(1, "idle", runs="script")]
    assert _said(detector, [(24.0, ended)])[0].startswith("no progress for 24 s: rank 1 has finished")
    stopped = [RankSnapshot(0, "running", runs="script"), ended[1]]
    assert _said(detector, [(25.0, stopped)]) == [""]
    assert _said(detector, [(26.0, [stopped[0], in_backward(1, 2)])]) == [PROGRESS_AGAIN]
    assert detector.last is None


@pytest.mark.parametrize("of_script", [False, True])
def test_who_debugs_a_rank_knows(of_script: bool) -> None:
    """No time passes while a rank is stopped in the debugger."""
    detector = Detector(10.0, sure_s=10.0, of_script=of_script)
    stopped = [PAIR[0], replace(PAIR[1], debugged=True)]
    assert _said(detector, [(0.0, PAIR), (20.0, stopped), (29.0, PAIR)]) == ["", "", ""]
