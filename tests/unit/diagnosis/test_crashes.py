"""What is said of runs that ended early, word for word, of made-up ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ddp_lab.diagnosis.crashes import (
    BUFFERS,
    Entered,
    Group,
    RankAtEnd,
    diagnose_crash,
    first_sentence,
    without_noise,
)
from ddp_lab.diagnosis.snapshot import Steps
from tests.unit.approved import approved

ALL = {0: Group("", (0, 1)), 1: Group("mesh dp", (0, 1))}
SUM = Entered("all_reduce", 4, "float32", "train.py:42", "main", "", -1, ended=False)
BUCKET = replace(SUM, bytes=1_056, place="train.py:39", purpose="bucket 0 of Net", model=0)
GATHER = replace(SUM, name="all_gather", bytes=40, place="train.py:17")
SHARDS = replace(GATHER, purpose="layers.0 (forward)", model=0, sharded=True)
BARRIER = replace(SUM, name="barrier", bytes=1, place="train.py:19", function="save")
STATE = replace(SUM, name="broadcast", bytes=576, purpose=BUFFERS, place="train.py:33")
LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:9 (train.py:39)"
UNJOINED = ("failed", "RuntimeError: Gloo connectFullMesh failed with Connection closed by peer (train.py:3)")
OWN = "ValueError: no such file (data.py:7)"
LOGGED = "it had logged WARNING: skipped the rest: no goal (train.py:29)"
ABORTED, KILLED, STOPPED = (
    ("killed", "killed by SIGABRT"),
    ("killed", "killed by SIGKILL"),
    ("ended", "ended with the run"),
)
EXITED = ("exited", "exited with code 0 before the end of the program")
SENT = replace(SUM, name="send", bytes=64, peer=1, place="train.py:7")
RECEIVED = replace(SENT, name="recv", peer=0, place="train.py:12")
RESET = ("failed", "ConnectionResetError: [Errno 104] Connection reset by peer (data.py:7)")
DONE, BROKEN, FAILED = ("finished", "finished the program"), ("failed", LOST), ("failed", OWN)


def steps(begun: int, ended: int, twice: int = -1) -> Mapping[int, Steps]:
    """Of model 0, of which one step has two forwards."""
    return {0: Steps("Net", begun, ended, {step: 1 + (step == twice) for step in range(begun)})}


def rank(number: int, end: tuple[str, str], *calls: Entered, group: int = 0, **more: Any) -> RankAtEnd:
    """A rank that has ended all collectives but the last."""
    before = {at: replace(one, ended=True) for at, one in enumerate(calls[:-1], 1)}
    entered = before | ({len(calls): calls[-1]} if calls else {})
    return RankAtEnd(number, *end, {group: entered} if entered else {}, more.pop("steps", {}), **more)


SITUATIONS = {
    "a backward left out": [
        rank(0, BROKEN, BUCKET, BUCKET, steps=steps(20, 19)),
        rank(1, ABORTED, BUCKET, SUM, steps=steps(19, 19, twice=5)),
    ],
    "fewer backwards, nobody knows since when": [
        rank(0, BROKEN, BUCKET, BUCKET, steps=steps(20, 19)),
        rank(1, ABORTED, BUCKET, SUM, steps=steps(19, 19)),
    ],
    "a barrier on one rank": [
        rank(0, ABORTED, BUCKET, BARRIER, steps=steps(10, 10)),
        rank(1, BROKEN, BUCKET, BUCKET, steps=steps(11, 10)),
    ],
    "a call in the place of a backward, of equally many": [
        rank(0, ABORTED, SUM, steps=steps(3, 3)),
        rank(1, BROKEN, BUCKET, steps=steps(3, 2)),
    ],
    "a call in the place of the first backward": [rank(0, ABORTED, SUM), rank(1, BROKEN, BUCKET, steps=steps(1, 0))],
    "other sizes": [rank(0, BROKEN, SUM), rank(1, ABORTED, replace(SUM, bytes=8))],
    "another dtype": [rank(0, BROKEN, SUM), rank(1, ABORTED, replace(SUM, dtype="int32"))],
    "an uneven gather": [rank(0, BROKEN, GATHER, GATHER), rank(1, ABORTED, GATHER, replace(GATHER, bytes=28))],
    "uneven parts that may be": [
        rank(0, FAILED, replace(SUM, name="all_to_all")),
        rank(1, STOPPED, replace(SUM, name="all_to_all", bytes=8)),
    ],
    "buffers": [
        rank(0, BROKEN, STATE, buffers={"mask": (12, 12), "mean": (4,)}),
        rank(1, ABORTED, replace(STATE, bytes=324), buffers={"mask": (9, 9), "mean": (4,)}),
    ],
    "a buffer that one rank lacks": [
        rank(0, BROKEN, STATE, buffers={"mask": (12, 12)}),
        rank(1, ABORTED, replace(STATE, bytes=324)),
    ],
    "buffers of which no shape is known": [rank(0, BROKEN, STATE), rank(1, ABORTED, replace(STATE, bytes=324))],
    "other calls on a mesh": [rank(0, BROKEN, SUM, group=1), rank(1, ABORTED, GATHER, group=1)],
    "other buckets": [
        rank(0, BROKEN, BUCKET),
        rank(1, ABORTED, replace(BUCKET, bytes=8, purpose="bucket 1 of Net")),
    ],
    "finished, with a logged error": [rank(0, BROKEN, BARRIER), rank(1, DONE, last_words=LOGGED)],
    "finished after a collective": [rank(0, BROKEN, SUM, BARRIER), rank(1, DONE, SUM)],
    "finished while another still waits": [rank(0, ("running", "runs the cell"), SUM, BARRIER), rank(1, DONE, SUM)],
    "other lines": [rank(0, BROKEN, SUM), rank(1, ABORTED, replace(SUM, bytes=8, place="train.py:50"))],
    "finished with fewer batches": [
        rank(0, BROKEN, BUCKET, BUCKET, steps=steps(20, 19)),
        rank(1, DONE, BUCKET, steps=steps(19, 19)),
    ],
    "finished after a batch that was left out": [
        rank(0, BROKEN, BUCKET, BUCKET, steps=steps(20, 19)),
        rank(1, DONE, BUCKET, steps=steps(19, 19, twice=3)),
    ],
    "finished with fewer batches of a sharded model": [
        rank(0, BROKEN, GATHER, SHARDS),
        rank(1, DONE, GATHER),
    ],
    "exited at once": [rank(0, BROKEN, SUM, BARRIER), rank(1, EXITED, SUM)],
    "a validation on one rank": [rank(0, BROKEN, BUCKET, STATE), rank(1, ABORTED, BUCKET, BARRIER)],
    "a validation on one rank, beside a backward": [
        rank(0, BROKEN, BUCKET, STATE, steps=steps(1, 1)),
        rank(1, ABORTED, BUCKET, BUCKET, steps=steps(2, 1)),
    ],
    "a validation on one rank, of which the result is broadcast": [
        rank(0, BROKEN, BUCKET, STATE),
        rank(1, ABORTED, BUCKET, replace(STATE, bytes=4, purpose="")),
    ],
    "a validation on one rank, the other has finished": [rank(0, BROKEN, BUCKET, STATE), rank(1, DONE, BUCKET)],
    "a sharded model of other sizes": [rank(0, BROKEN, SHARDS), rank(1, ABORTED, replace(SHARDS, bytes=28))],
    "a sharded model's backward left out": [
        rank(0, BROKEN, SHARDS, replace(SHARDS, name="reduce_scatter"), steps=steps(6, 5)),
        rank(1, ABORTED, SHARDS, SHARDS, steps=steps(5, 5, twice=3)),
    ],
    "finished after a sharded model's backward was left out": [
        rank(0, BROKEN, SHARDS, SHARDS, steps=steps(5, 5)),
        rank(1, DONE, SHARDS, steps=steps(5, 5, twice=3)),
    ],
    "an error of its own": [rank(0, BROKEN, SUM, SUM), rank(1, FAILED, SUM)],
    "an error that all have": [rank(0, FAILED, SUM), rank(1, FAILED, SUM)],
    "an error before any collective": [rank(0, STOPPED), rank(1, FAILED)],
    "killed while others wait": [rank(0, BROKEN, SUM, SUM), rank(1, KILLED, SUM)],
    "killed alone": [rank(0, STOPPED, SUM), rank(1, ("killed", "killed by SIGSEGV"))],
    "killed by the agent alone": [rank(0, STOPPED, SUM), rank(1, STOPPED, SUM)],
    "aborted by itself": [rank(0, BROKEN, SUM, SUM), rank(1, ABORTED, SUM)],
    "aborted alone": [rank(0, STOPPED, SUM), rank(1, ABORTED, SUM)],
    "all finished": [rank(0, DONE, SUM), rank(1, DONE)],
    "all finished, with other types": [
        rank(0, DONE, replace(STATE, purpose="")),
        rank(1, DONE, replace(STATE, purpose="", bytes=8, dtype="int64")),
    ],
    "finished before all had joined": [rank(0, UNJOINED), rank(1, DONE, last_words=LOGGED)],
    "killed before all had joined": [rank(0, UNJOINED), rank(1, KILLED)],
    "left before a message was sent": [
        rank(0, DONE, messages=[SENT], last_words="it called sys.exit (train.py:8)"),
        rank(1, BROKEN, messages=[replace(SENT, ended=True), RECEIVED]),
    ],
    "left without a message": [rank(0, DONE, SUM), rank(1, BROKEN, SUM, messages=[RECEIVED])],
    "an error before a message": [rank(0, FAILED), rank(1, BROKEN, messages=[RECEIVED])],
    "killed before a message": [rank(0, KILLED), rank(1, BROKEN, messages=[RECEIVED])],
    "a message that nobody waits for": [rank(0, KILLED), rank(1, FAILED, messages=[RECEIVED])],
    "an error of a connection of its own": [rank(0, BROKEN, SUM, SUM), rank(1, RESET, SUM)],
    "the same, after an error": [rank(0, RESET, SUM), rank(1, FAILED, SUM), rank(2, BROKEN, SUM, SUM)],
    "three ranks": [
        rank(0, BROKEN, GATHER),
        rank(1, ABORTED, replace(GATHER, bytes=28)),
        rank(2, BROKEN, GATHER),
    ],
}


def test_what_is_said() -> None:
    """Of each situation: the cause and the remedy, or that nothing more is known than each rank has said."""
    told = []
    for title, ranks in SITUATIONS.items():
        found = diagnose_crash(ranks, ALL)
        told.append(f"--- {title}\n" + (f"[{found.kind}] {found.brief}" if found is not None else "nothing"))
    approved("crashes", "\n".join(told))


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (
            "RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
            "peer [::1]:9. This is typically caused by a remote worker crashing. Check the logs of the remote worker "
            "before reporting an error. GLHF! 🏖️ (train.py:3)",
            "RuntimeError: Connection closed by peer [::1]:9. (train.py:3)",
        ),
        ("ValueError: [1, 2] (train.py:3)", "ValueError: [1, 2] (train.py:3)"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 8 bytes. Error code 12 (Cannot allocate memory) (train.py:3)",
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12 "
            "(Cannot allocate memory) (train.py:3)",
        ),
    ],
)
def test_noise(error: str, kept: str) -> None:
    assert without_noise(error) == kept


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (
            "RuntimeError: Expected to have finished reduction. This error indicates that your module has …\nParameter "
            "indices which did not receive grad for rank 1: 2 3 (train.py:31)",
            "RuntimeError: Expected to have finished reduction. (train.py:31)",
        ),
        ("ValueError: v1.2 of a.b is too old (%%distributed [3] line 4)",) * 2,
        ("KeyError: 'a\nb' (train.py:3)", "KeyError: 'a (train.py:3)"),
        ("RuntimeError: shapes differ (see docs). Pad them", "RuntimeError: shapes differ (see docs)."),
        ("killed by SIGKILL",) * 2,
    ],
)
def test_first_sentence(error: str, first: str) -> None:
    """A line that reports an end has the first sentence of its error, and where it was raised."""
    assert first_sentence(error) == first
