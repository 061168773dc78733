"""Lesson 9, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

from . import running
from .lesson_tests import test_checks as test_checks
from .lesson_tests import test_predictions as test_predictions

_BF16 = """%%distributed
def bf16(state, bucket):
    small = bucket.buffer().to(torch.{}){}
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda done: {})
"""
_AVERAGE, _BACK = " / world_size", "bucket.buffer().copy_(done.value()[0])"

_LATER = """%%distributed
def top_k_later(state, bucket):
    buffer = bucket.buffer()
    {}
    rest = buffer{}
    rest[largest(buffer)] {}= 0
    state[bucket.index()] = rest
    return {}(state, bucket)
"""
_ADD = "buffer += state.get(bucket.index(), 0)"

WRONG = {
    "1": {
        _BF16.format("bfloat16", "", _BACK): "not divided",
        _BF16.format("bfloat16", _AVERAGE, "done.value()[0]"): "converted",
        _BF16.format("float16", _AVERAGE, _BACK): "is float16's",
        "%%distributed\ndef bf16(state, bucket):\n    return bucket.buffer()": "no future",
    },
    "2": {
        _LATER.format(_ADD, ".clone()", "", "fp16"): "0.2 % of 3000",
        _LATER.format(_ADD, "", "+", "top_k"): "Is a *copy* kept",
        _LATER.format("pass", ".clone()", "", "top_k"): "Is the old rest added first",
        _LATER.format("buffer += state.get('rest', 0)", ".clone()", "", "top_k").replace(
            "state[bucket.index()]", "state['rest']"
        ): "needs a rest of each",
    },
}

CAME_TRUE = {
    1: "less than 0.1 %",
    2: "it never changes",
    3: "about as accurate",
    4: "no, they differ",
}

SHORTER = {"wanted=15": "wanted=5"}


def test_accuracy_against_bytes(lesson: running.Notebook) -> None:
    """Few bytes cost accuracy if what is not sent is forgotten, and next to none if it is remembered."""
    told = running.text(running.cell(lesson, "train"))
    rows = re.findall(r"(\w[\w ,.%]*): +([\d,]+) bytes a step, ([\d.]+)% right", told)
    found = {name: (int(sent.replace(",", "")), float(right)) for name, sent, right in rows}
    assert len(found) == 7
    plain, forgotten, remembered = (found[name] for name in ("plain average", "top 0.2 %", "top 0.2 %, the rest later"))
    assert found["fp16"][0] == found["bf16"][0] == plain[0] / 2
    assert forgotten[0] == remembered[0] < plain[0] / 200
    assert forgotten[1] + 10 < remembered[1]
    assert remembered[1] > plain[1] - 10
    assert len(running.figure(running.cell(lesson, "accuracy-figure"))["data"]) == len(found)


def test_gossip_and_live(lesson: running.Notebook) -> None:
    """Gossip lets the ranks drift apart; a hook is exchanged four times while the model trains."""
    told = running.text(running.cell(lesson, "gossip"))
    assert "rank 0 and rank 1 have different results" in told
    assert float(re.findall(r"all ranks' models: ([\d.]+)%", told)[0]) > 0
    points = running.figure(running.cell(lesson, "reconfigure"))["data"]
    assert [trace["name"] for trace in points] == ["fp16", "my bf16", "my top 0.2 %", "none"]
