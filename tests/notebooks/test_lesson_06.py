"""Lesson 6, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

import pytest

from . import running
from .judging import executed, judge

_AVERAGE = "%%distributed\ndef average(gradients):\n"
_CAT = "    buffer = torch.cat([g.flatten() for g in gradients])\n    dist.all_reduce(buffer)\n"

WRONG = {
    "1": {
        _AVERAGE + "    for g in gradients:\n        dist.all_reduce(g)\n        g /= world_size": "2 times",
        _AVERAGE + _CAT: "not the averages",
        _AVERAGE
        + _CAT
        + "    for g, s in zip(gradients, buffer.split([6, 4])):\n        g.copy_(s.view_as(g))": "sums",
    },
    "2": {"late_rank, late_bucket = 1, 1": "because it waits", "late_rank, late_bucket = 0, 0": "still on time"},
}


@pytest.fixture(scope="module")
def lesson() -> running.Notebook:
    return executed("06_buckets_and_overlap", WRONG)


def test_checks(lesson: running.Notebook) -> None:
    """A check says "Not yet" to the untouched exercise, names what is wrong with an answer, accepts the solution."""
    judge(lesson, WRONG)


def test_by_hand_and_by_ddp(lesson: running.Notebook) -> None:
    """The hand-written versions average alike, each is drawn, and DDP's single bucket hides next to nothing."""
    told = running.text(running.cell(lesson, "overlap"))
    assert told.count("the same gradients: True") == len(re.findall(r"naive [\d.]+ ms", told)) > 0
    [drawn] = running.cell(lesson, "draw-three").outputs
    assert len(drawn.data["application/vnd.plotly.v1+json"]["data"]) == 6
    table = running.text(running.cell(lesson, "one-or-several-seen"))
    one, several = (float(value) for value in re.findall(r"hidden_ms +([\d.]+) +([\d.]+)", table)[0])
    assert one < several


def test_readiness_names_rank_and_layer(lesson: running.Notebook) -> None:
    """The delay that was put behind layer 8 of rank 0 is found there, from the events alone."""
    found = running.text(running.cell(lesson, "solution-2"))
    assert re.search(r"LatePlace\(rank=0, bucket=1, parameter='layer8\.\w+'", found)
