"""Who waits for whom: sentences from made-up examinations that are hard to provoke."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_lab.diagnostics import calls, hangs
from ddp_lab.diagnostics.calls import HANGS, hang_lesson
from ddp_lab.diagnostics.flights import GroupFlights
from ddp_lab.diagnostics.hangs import diagnose
from ddp_lab.diagnostics.rank_state import BucketStage, Call, Examined, Model, Place, label

LINE = Place("<cell %%distributed [3]>", 4, "<module>", "dist.all_reduce(t)", users=True)
CALL = Call("all_reduce", "collective", "0", (0, 1), "float32 [8]", 32, None, 18)


def waiting(rank: int, call: Call = CALL) -> Examined:
    return Examined(rank, "running", stack=(LINE,), call=call)


def in_backward(rank: int, number: int, module: str = "Net") -> Examined:
    states = ["reduced"] * number + ["launched"] * (3 - number)
    model = Model(0, module, 5, True, True, "", tuple(BucketStage(state, 1, 1, ()) for state in states))
    return Examined(rank, "running", stack=(LINE,), models=(model,))


def test_a_rank_in_the_debugger() -> None:
    """A rank that its user has stopped is named with its line; it is not a hang, whatever the others wait for. A node
    that is cut off is: its ranks are named with who does not answer, and what the others wait in."""
    stopped = Examined(1, "running", stack=(LINE,), call=replace(CALL, sequence=17), debugged=True)
    found = diagnose([waiting(0), stopped])
    assert (found.kind, found.stuck) == ("debugger", False)
    assert found.sentence == (
        "rank 1 is stopped in the debugger at %%distributed [3] line 4. rank 0 waits in all_reduce #18 of 32 B "
        "(float32 [8])."
    )
    cut = [Examined(rank, "cut off", why="node 1 (b) does not answer", runs="script") for rank in (2, 3)]
    found = diagnose([replace(waiting(0), runs="script"), *cut])
    assert (found.kind, found.stuck) == ("cut", True)
    assert found.sentence.startswith(
        "ranks 2 and 3 are cut off: node 1 (b) does not answer. rank 0 waits in all_reduce"
    )


def test_calls_that_differ() -> None:
    """The same collective with other tensors, a broadcast from other roots, and one rank that left a call out: the
    sentence tells the sizes, the roots and the numbers."""
    found = diagnose([waiting(0), waiting(1, replace(CALL, bytes=64, what="float32 [16]"))])
    assert found.kind == "sizes"
    assert "32 B on rank 0 and 64 B on rank 1" in found.sentence
    call = replace(CALL, name="broadcast", peer=0)
    found = diagnose([waiting(0, call), waiting(1, replace(call, peer=1))])
    assert found.kind == "root"
    assert "rank 1 is in broadcast #18 of 32 B (float32 [8]) with root 1" in found.sentence
    found = diagnose([waiting(0), waiting(1, replace(CALL, sequence=17))])
    assert found.kind == "ahead"
    assert "#18" in found.sentence
    assert "#17" in found.sentence
    equally_far = (GroupFlights("0", "gloo", (0, 1), 12, None, 1, {}, (), 0),)  # what differs are sends
    pair = [waiting(0), waiting(1, replace(CALL, sequence=17))]
    assert diagnose([replace(one, flights=equally_far) for one in pair]).kind == "slow"


@pytest.mark.parametrize(
    ("state", "one", "two"),
    [
        (
            "silent",
            "rank 1 is unresponsive: .* ranks 0 and 2 wait for it. "
            "Interrupting a cell that you wait for terminates that rank's process",
            "ranks 1 and 2 are unresponsive: .* rank 0 waits for them. "
            "Interrupting a cell that you wait for terminates those ranks' processes",
        ),
        (
            "lost",
            "rank 1 failed .*; ranks 0 and 2 were waiting for it. .* a new process for it",
            "ranks 1 and 2 failed .*; rank 0 was waiting for them. .* new processes for them",
        ),
    ],
)
def test_one_or_several_that_others_wait_for(state: str, one: str, two: str) -> None:
    """Ranks that are silent or gone are told with who waits for them, in one's words or in several's."""
    for missing, told in (((1,), one), ((1, 2), two)):
        ranks = [Examined(rank, state, why="killed") if rank in missing else waiting(rank) for rank in range(3)]
        found = diagnose(ranks)
        assert found.kind == state
        assert re.search(told, f"{found.sentence} {found.remedy}")


def test_all_are_there() -> None:
    """All ranks in the same call: it is under way, whatever keeps it. All ranks make groups and wait for each other's.
    Ranks in the same bucket are under way, in different ones they trained different things."""
    found = diagnose([waiting(0), waiting(1)])
    assert (found.kind, found.stuck) == ("slow", True)
    assert "ranks 0 and 1 are all in all_reduce #18" in found.sentence
    making = replace(CALL, name="new_group", kind="group", what="", bytes=0, sequence=None, group="")
    assert diagnose([waiting(0, making), waiting(1, making)]).kind == "making"
    assert diagnose([in_backward(0, 1), in_backward(1, 1)]).kind == "slow"
    found = diagnose([in_backward(0, 1), in_backward(1, 2)])
    assert found.kind == "order"
    assert "rank 0 for bucket 1 of Net; rank 1 for bucket 2 of Net" in found.sentence
    assert diagnose([in_backward(0, 1), in_backward(1, 1, "Other")]).kind == "order"


def test_a_rank_outside_the_group_is_not_waited_for() -> None:
    """Of ranks that are no members of the group it does not matter what they do. Ranks that wait for something else
    than a moment ago make progress; one that waits for the same does not."""
    computing = Examined(2, "running", stack=(replace(LINE, text="train()"),))
    found = diagnose([waiting(0), Examined(1, "idle"), computing])
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


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ((replace(LINE, text="time.sleep(9)"),), "in a sleep call"),
        (
            (replace(LINE, text="next(batches)"), Place("torch/utils/data/dataloader.py", 7, "f", "", users=False)),
            "data",
        ),
        ((Place("lib/threading.py", 355, "wait", "", users=False), LINE), "a thread or a queue of its own"),
        ((replace(LINE, text="torch.save(state, path)"),), "writing a file"),
        ((LINE,), "`%cluster interrupt`"),
    ],
)
def test_the_remedy_fits_what_the_busy_rank_does(stack: tuple[Place, ...], words: str) -> None:
    """While others wait for a rank, what helps depends on what it does."""
    found = diagnose([waiting(0), Examined(1, "running", stack=stack)])
    assert found.kind == "busy"
    assert words in found.remedy


def test_each_diagnosis_has_a_lesson() -> None:
    """Whatever the doctor finds wrong is explained under a heading that is there."""
    kinds = set(re.findall(r'Diagnosis\(\s*"(\w+)"', inspect.getsource(hangs) + inspect.getsource(calls)))
    assert len(kinds) > 15
    nothing_wrong = {"debugger", "idle", "working"}
    assert {kind for kind in kinds if not hang_lesson(kind)} == nothing_wrong
    notebook = (Path(__file__).resolve().parents[3] / HANGS).read_text(encoding="utf-8")
    for kind in kinds - nothing_wrong:
        document, heading = hang_lesson(kind)[:-1].split(', "')
        assert document == HANGS
        assert f'"## {heading}' in notebook
