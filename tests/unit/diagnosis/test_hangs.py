"""Who waits for whom: sentences from made-up examinations that are hard to provoke."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

from ddp_lab.diagnosis import rules
from ddp_lab.diagnosis.collectives_in_flight import Collective, GroupFlights
from ddp_lab.diagnosis.mismatch import Mismatch
from ddp_lab.diagnosis.rules import HANGS, Diagnosis, diagnose
from ddp_lab.diagnosis.snapshot import BucketStage, Call, Model, Place, RankSnapshot, label

LINE = Place("<cell %%distributed [3]>", 4, "<module>", "dist.all_reduce(t)", users=True)
CALL = Call("all_reduce", "collective", "0", (0, 1), "float32 [8]", 32, None, 18)


def waiting(rank: int, call: Call = CALL) -> RankSnapshot:
    return RankSnapshot(rank, "running", stack=(LINE,), call=call)


def in_backward(rank: int, number: int, module: str = "Net") -> RankSnapshot:
    states = ["reduced"] * number + ["launched"] * (3 - number)
    model = Model(0, module, 5, True, True, "", tuple(BucketStage(state, 1, 1, ()) for state in states))
    return RankSnapshot(rank, "running", stack=(LINE,), models=(model,))


def test_numbers_that_differ_by_messages() -> None:
    """Ranks whose sequence numbers differ, but that have entered equally many collectives, are not out of step."""
    pair = [waiting(0), waiting(1, replace(CALL, sequence=17))]
    assert diagnose(pair).kind == "ahead"
    equally_far = (GroupFlights("0", "gloo", (0, 1), 12, None, 1, {}, (), 0),)
    assert diagnose([replace(one, flights=equally_far) for one in pair]).kind == "slow"


def test_a_line_is_the_same_on_a_rank_that_has_run_fewer_cells() -> None:
    """The number that a rank gives to a second cell of a label is its own: it makes no other line, and is not shown."""
    files = ["<cell %%distributed [3] #40>", "<cell %%distributed [3] #39>"]
    ranks = [replace(waiting(rank), entered_at=replace(LINE, file=file)) for rank, file in enumerate(files)]
    tensors = {0: Collective("all_reduce", "float32 [4]", 16), 1: Collective("all_reduce", "int32 [4]", 16)}
    found = rules.diagnose_mismatch(ranks, Mismatch("0", 2, tensors, sizes=True))
    assert found.kind == "sizes"
    assert "(int32 [4]) at %%distributed [3] line 4: the tensors differ." in found.sentence


def test_a_rank_outside_the_group_is_not_waited_for() -> None:
    """Of ranks that are no members of the group it does not matter what they do. Ranks that wait for something else
    than a moment ago make progress; one that waits for the same does not."""
    computing = RankSnapshot(2, "running", stack=(replace(LINE, text="train()"),))
    found = diagnose([waiting(0), RankSnapshot(1, "idle"), computing])
    assert found.kind == "ended"
    assert "rank 1 has finished the cell; rank 0 still waits in all_reduce #18" in found.sentence
    assert "rank 2" not in found.sentence
    before = [waiting(0), waiting(1, replace(CALL, sequence=17))]
    now = [waiting(0, replace(CALL, sequence=40)), waiting(1, replace(CALL, sequence=41))]
    found = diagnose(now, before)
    assert (found.kind, found.stuck) == ("working", False)
    assert "All ranks are making progress" in found.sentence
    assert diagnose(now, [now[0], before[1]]).kind == "ahead"
    assert diagnose([in_backward(0, 1), in_backward(1, 2)], [in_backward(0, 0), in_backward(1, 1)]).kind == "working"


def test_places_and_ranks_in_words() -> None:
    """Lines of cells and of files, as people look for them. A sentence on 64 ranks stays one. A group that a DeviceMesh
    made is called by its dimension, with its ranks; one without a name by these."""
    assert str(LINE) == "%%distributed [3] line 4"
    assert str(replace(LINE, file="/home/me/train.py")) == "/home/me/train.py:4"
    assert label(range(64)) == "ranks 0–63"
    assert label([0, 1, 2]) == "ranks 0, 1 and 2"
    of_mesh = replace(CALL, description="mesh_tp", ranks=(1, 3))
    assert str(of_mesh) == "all_reduce #18 of 32 B (float32 [8]) on mesh dimension tp (ranks 1, 3)"
    assert str(replace(of_mesh, description="a group")).endswith("on a group (ranks 1, 3)")


def test_each_diagnosis_has_a_lesson() -> None:
    """Whatever the doctor finds wrong is explained under a heading that is there."""
    kinds = set(re.findall(r'Diagnosis\(\s*"(\w+)"', inspect.getsource(rules)))
    kinds.add(rules.BUSY)
    assert len(kinds) > 15
    nothing_wrong = {"debugger", "idle", "working"}
    assert {kind for kind in kinds if not Diagnosis(kind, "").lesson} == nothing_wrong
    notebook = (Path(__file__).resolve().parents[3] / HANGS).read_text(encoding="utf-8")
    for kind in kinds - nothing_wrong:
        document, heading = Diagnosis(kind, "").lesson[:-1].split(', "')
        assert document == HANGS
        assert f'"## {heading}' in notebook
