"""Lesson 6, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

from . import running
from .lesson_tests import test_checks as test_checks
from .lesson_tests import test_predictions as test_predictions

_AVERAGE = "%%distributed\ndef average(gradients):\n"
_READY = "%%distributed\ndef on_ready(states, launch):\n"
_CAT = "    buffer = torch.cat([g.flatten() for g in gradients])\n    dist.all_reduce(buffer)\n"

WRONG = {
    "1": {
        _AVERAGE + "    for g in gradients:\n        dist.all_reduce(g)\n        g /= world_size": "2 times",
        _AVERAGE + _CAT: "not the averages",
        _AVERAGE
        + _CAT
        + "    for g, s in zip(gradients, buffer.split([6, 4])):\n        g.copy_(s.view_as(g))": "sums",
    },
    "2": {
        _READY
        + "    for index, state in enumerate(states):\n        if state == 'ready': launch(index)": "has to wait",
        _READY + "    for index, state in enumerate(states):\n        if state != 'pending': launch(index)": "twice",
        _READY
        + "    if all(state == 'ready' for state in states):\n"
        + "        for index in range(len(states)):\n            launch(index)": "could be in flight",
    },
    "3": {
        "late_rank, late_bucket = 1, 1": "because it waits",
        "late_rank, late_bucket = 0, 0": "still on time",
        "late_rank, late_bucket = 0, 3": "already late",
        "late_rank, late_bucket = '0', '1'": "write two numbers",
    },
}

CAME_TRUE = {
    1: "layers 9, 10, 11",
    2: "the bucket with the first layer",
    3: "wrong gradients, without an error",
    4: "it waits until bucket 0 is launched",
}

SHORTER = {"rounds=15": "rounds=5"}


def test_order(lesson: running.Notebook) -> None:
    """Overlap by hand averages right; launching at once mixes the branches of ranks that disagree, launching in bucket
    order does not, and neither does DDP, which takes rank 0's order of readiness."""
    assert "6 buckets; the same gradients: True" in running.text(running.cell(lesson, "overlap"))
    assert min(_errors(lesson, "errors") + _errors(lesson, "exercise-2")) > 0.1
    assert max(_errors(lesson, "solution-2") + _errors(lesson, "rebuild")) < 1e-5
    rebuilt = running.text(running.cell(lesson, "rebuild"))
    assert "after a backward: generation 0, bucket 0: 8 gradients of left, right" in rebuilt
    assert "after two: generation 1, bucket 0: 4 gradients of right" in rebuilt
    assert "after two: generation 1, bucket 1: 4 gradients of left" in rebuilt


def test_steps_of_the_reducer(lesson: running.Notebook) -> None:
    """The walk sees a bucket that is ready and has to wait for the one before it, and then both launched."""
    walked = running.text(running.cell(lesson, "step-through"))
    paused = re.findall(r"rank 1  \['(\w+)', '(\w+)'\]  pauses: (.*)", walked)
    assert paused[:3] == [
        ("pending", "ready", "bucket_ready of bucket 1"),
        ("pending", "ready", "gradient_ready of right.2.bias"),
        ("ready", "ready", "bucket_ready of bucket 0"),
    ]
    assert [one[1:] for one in paused[3:4]] == [("ready", "launched of bucket 0")]
    assert paused[4][2] == "launched of bucket 1"


def test_measured(lesson: running.Notebook) -> None:
    """Four ways by hand and five sizes of buckets are drawn as distributions."""
    assert re.search(r"With overlap, a step takes \d+% of the time", running.text(running.cell(lesson, "draw")))
    boxes = running.figure(running.cell(lesson, "draw"))["data"]
    assert [one["type"] for one in boxes] == ["box"] * 9


def test_readiness_names_rank_and_layer(lesson: running.Notebook) -> None:
    """The delay that was put behind layer 8 of rank 0 is found there, from the events alone."""
    found = running.text(running.cell(lesson, "solution-3"))
    assert re.search(r"LatePlace\(rank=0, bucket=1, parameter='layer8\.\w+'", found)


def _errors(lesson: running.Notebook, name: str) -> list[float]:
    """How far the gradients of each rank were off."""
    found = re.findall(r"off by (\S+)", running.text(running.cell(lesson, name)))
    assert found
    return [float(value) for value in found]
