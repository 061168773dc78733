"""Operations of process groups: the events of several ranks become rows that say who was last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_lab.dashboard.views import VIEWS
from ddp_lab.dashboard.views.view import Selection
from ddp_lab.launch import reports
from ddp_lab.protocol.events import Batch, Kind
from ddp_lab.timeline import collective_summary
from ddp_lab.timeline.tables.collectives import CollectiveTable
from ddp_lab.timeline.timeline import RecordedRun, Timeline
from tests.unit.backwards import MS, rows

_CALL = {"type": "call", "index": 0, "operation": "allreduce_", "dtype": "Float", "reduction": "sum"}
_PLACE = {"file": "train.py", "line": 12, "function": "step"}


def _one(kind: Kind, at_ms: float, number: int, *, group: int = 0, call: int = 0, peer: int = -1) -> dict[str, Any]:
    return {
        **{"kind": kind, "host_ns": int(at_ms * MS), "step": number, "process_group": group},
        **{"parameter": call, "bucket": peer, "bytes": 4_000_000},
    }


def _describe(timeline: Timeline, rank: int, *, session: int = 1, index: int = 0) -> None:
    group = {"type": "group", "index": index, "name": "0", "ranks": [0, 1], "description": "mesh_dp"}
    timeline.describe(rank, {**group, "mesh_dimension": "dp", "backend": "gloo", "session": session})
    timeline.describe(rank, {**_CALL, **_PLACE, "session": session})


def _timeline() -> Timeline:
    """Rank 1 enters its collective 0 two milliseconds after rank 0; rank 0's collective 1 never ends."""
    timeline = Timeline()
    entered, ended = Kind.COLLECTIVE_ENTERED, Kind.COLLECTIVE_ENDED
    facts = {
        0: [
            *(_one(entered, 10, 0), _one(Kind.WAIT_BEGIN, 11, 0), _one(ended, 16, 0), _one(Kind.WAIT_END, 17, 0)),
            _one(entered, 20, 1),
        ],
        1: [_one(entered, 12, 0), _one(ended, 16, 0)],
    }
    for rank, of_rank in facts.items():
        _describe(timeline, rank)
        timeline.extend(Batch(rank, 1, 0, 0, rows(*of_rank)))
    return timeline


def test_a_collective_has_one_row_on_each_rank() -> None:
    """Each says what, where, how long it waited for the last rank, how long the transfer took, and how fast it was."""
    frame = _timeline().collectives()
    first = frame[(frame["rank"] == 0) & (frame["sequence"] == 0)].iloc[0]
    assert first["operation"] == "all_reduce"
    assert (first["place"], first["dtype"], first["state"]) == ("train.py:12", "Float", "complete")
    assert (first["last_rank"], first["ranks"]) == (1, 2)
    assert first[["ms", "wait_ms", "late_ms", "transfer_ms", "waited_ms"]].tolist() == pytest.approx([6, 2, 0, 4, 6])
    assert first["bus_gb_s"] == pytest.approx(1.0)  # 4 MB × 2 × (2 - 1) / 2 in 4 ms
    late = frame[frame["rank"] == 1].iloc[0]
    assert late[["wait_ms", "late_ms"]].tolist() == pytest.approx([0, 2])
    still = frame[frame["sequence"] == 1].iloc[0]
    assert (still["state"], still["last_rank"]) == ("running", -1)


def test_words_of_groups(tmp_path: Path) -> None:
    """A sentence for each group and for each operation that has not ended; bytes count once; a file keeps all, and the
    page of `ddp-lab run` begins with the doctor's words."""
    made = _timeline()
    words = made.summary()
    assert "Mesh dp (ranks 0–1), gloo: 2 all_reduce" in words
    assert "rank 1 was last in 100 %, by 2.0 ms" in words
    assert "Rank 0 entered all_reduce at train.py:12; it has not ended." in words
    (facts,) = collective_summary.group_facts(made.collective_columns(), made.groups())
    assert facts.operations == {"all_reduce": 2}
    assert facts.bytes == 8_000_000
    assert len(facts.running) == 1
    loaded = Timeline.load(made.save(tmp_path / "run.npz"))
    assert loaded.collectives().equals(made.collectives())
    assert loaded.groups() == made.groups()
    assert loaded.summary() == made.summary()
    page = tmp_path / "report.html"
    reports.write_pages(RecordedRun(made, (), hangs=("rank 1 waits for rank 0",)), page)
    text = page.read_text(encoding="utf-8")
    assert "Collectives by group" in text
    assert "rank 1 waits for rank 0" in text


def test_a_group_of_a_rejoined_cluster_is_another_one() -> None:
    """After a rejoin the ranks describe a group with the same name and ranks: it has a number of its own for all."""
    timeline = _timeline()
    for rank in range(2):
        _describe(timeline, rank, index=1)
        timeline.extend(Batch(rank, 1, 10, 0, rows(_one(Kind.COLLECTIVE_ENTERED, 30 + rank, 0, group=1))))
    frame = timeline.collectives()
    assert [one.group for one in timeline.groups()] == [0, 1]
    assert sorted(frame[frame["group"] == 1]["last_rank"]) == [1, 1]


def test_sends_and_receives_are_matched_by_their_pair() -> None:
    """The k-th send of a rank to another belongs to the k-th receive of that one; directions do not mix. Ranks that
    enter different operations as the same collective are named with their places."""
    timeline = Timeline()
    for rank, operation in ((0, "send"), (1, "recv_")):
        _describe(timeline, rank)
        timeline.describe(rank, {"type": "call", "index": 1, "operation": operation, "session": 1})
        begin = _one(Kind.COLLECTIVE_ENTERED, 10 + rank, 0, call=1, peer=1 - rank)
        timeline.extend(Batch(rank, 1, 0, 0, rows(begin)))
    frame = timeline.collectives()
    assert frame["peer"].tolist() == [1, 0]
    assert frame["last_rank"].tolist() == [1, 1]
    timeline = Timeline()
    for rank, operation in ((0, "allreduce_"), (1, "broadcast_")):
        _describe(timeline, rank)
        timeline.describe(rank, {**_CALL, "operation": operation, "file": "a.py", "line": rank + 1, "session": 1})
        timeline.extend(Batch(rank, 1, 0, 0, rows(_one(Kind.COLLECTIVE_ENTERED, 10, 5))))
    assert "as its collective #6, rank 0 all_reduce at a.py:1 and rank 1 broadcast at a.py:2" in timeline.summary()


def test_numbers_of_many_operations_are_equal() -> None:
    """The report's table has those of the summary, of all operations; the tab says that it leaves out older ones."""
    timeline, count = Timeline(), 2_500
    for rank in range(2):
        _describe(timeline, rank)
        pairs = [(_one(Kind.COLLECTIVE_ENTERED, n, n), _one(Kind.COLLECTIVE_ENDED, n + 0.5, n)) for n in range(count)]
        timeline.extend(Batch(rank, 1, 0, 0, rows(*(one for pair in pairs for one in pair))))
    assert "gloo: 2,500 all_reduce" in timeline.group_summary()
    reported = VIEWS["groups"].reported(timeline, Selection())
    assert reported is not None
    assert reported.scene.table is not None
    assert reported.scene.table.rows[0][2] == "2,500 all_reduce"
    tab = VIEWS["groups"].facts(timeline, Selection()).words
    assert "gloo: 2,000 all_reduce" in tab[0]
    assert tab[1] == "These are the newest operations: 1,000 older ones are left out here."


def test_a_ring_keeps_the_newest_and_counts_the_rest() -> None:
    """A table is bounded, what it has forgotten is counted, and ends find their rows after it has gone round."""
    table = CollectiveTable()
    for first in range(0, 40_000, 1_000):
        numbers = range(first, first + 1_000)
        table.extend(rows(*(_one(Kind.COLLECTIVE_ENTERED, one, one) for one in numbers)))
        table.extend(rows(*(_one(Kind.COLLECTIVE_ENDED, one + 1, one) for one in numbers)))
    kept = table.rows()
    assert table.forgotten == 40_000 - len(kept["sequence"])
    assert kept["sequence"].tolist() == list(range(table.forgotten, 40_000))
    assert (kept["ended"] - kept["entered"] == MS).all()
