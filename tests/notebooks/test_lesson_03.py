"""Lesson 3, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

import torch

from . import running
from .lesson_tests import test_checks as test_checks
from .lesson_tests import test_predictions as test_predictions

_PASS_ON = "%%distributed\ndef pass_on(outgoing, incoming, group=None):\n    "
_RING = """%%distributed
def ring_all_reduce(tensor, rank, ranks, pass_on):
    parts = list(tensor.tensor_split(ranks))
    for step in range(ranks - 1):
"""
_ADD = """        mine = parts[(rank - {}) % ranks]
        arrived = torch.empty_like(mine)
        pass_on(parts[(rank - {}) % ranks], arrived)
        mine += arrived
"""
_REPLACE = """    for step in range(ranks - 1):
        pass_on(parts[(rank - step + 1) % ranks], parts[(rank - step) % ranks])
"""
_WHOLE = """        arrived = torch.empty_like(tensor)
        pass_on(outgoing if step else tensor.clone(), arrived)
        tensor += arrived
        outgoing = arrived
"""

WRONG = {
    "1": {_PASS_ON + "pass": "nothing has arrived", _PASS_ON + "incoming.copy_(outgoing)": "should have received"},
    "2": {
        _RING + _ADD.format("step - 1", "step"): "each has one finished part",
        _RING + _ADD.format("1", "0") + _REPLACE: "Which part in which step?",
        _RING + _WHOLE: "3.0 times the buffer",
        _RING + "        if rank:\n            pass_on(parts[0], parts[1])": "waits for a part that no rank passes on",
        _RING + "        pass_on(part[rank], tensor)": "with 2 ranks: NameError: name 'part' is not defined",
    },
}

CAME_TRUE = {
    1: "2 steps, 64 KiB",
    2: "first is 2, second is 1",
    3: "32",
    4: "it continues, and the collective is not completed",
}


def test_each_rank_is_told_what_it_sent(lesson: running.Notebook) -> None:
    """The verdict on the ring compares its bytes with what is possible."""
    verdict = running.text(running.cell(lesson, f"verdict-2-{len(WRONG['2'])}"))
    assert "each of 4 ranks sent 1.6 times the buffer" in verdict


def test_messages_and_works(lesson: running.Notebook) -> None:
    """Tags tell messages apart, two blocking sends hang, and a launched collective completes when all have come."""
    assert "first: 2.0 second: 1.0" in running.text(running.cell(lesson, "messages"))
    hung = running.text(running.cell(lesson, "exercise-1"))
    assert "did not end within 2 s" in hung
    assert "dist.send(outgoing, following, group=group)" in hung
    told = running.text(running.cell(lesson, "async"))
    assert "launched, and here I am; completed: False" in told
    assert "after wait: 3.0 completed: True" in told
    assert "averaged in the future: 1.5" in told


def test_each_collective_is_called(lesson: running.Notebook) -> None:
    """The table has what each collective leaves, both players are shown, and both comparisons are drawn."""
    table = running.text(running.cell(lesson, "table"))
    left = {"reduce_scatter": "30, –", "all_to_all": "10, 20", "all_gather": "10, 20", "scatter": "10, –"}
    if torch.__version__.startswith("2.11."):  # its Gloo has the other alone, and the cell says so
        assert "all_to_all: Backend gloo does not support" in running.text(running.cell(lesson, "call-each"))
        left["all_to_all_single"] = left.pop("all_to_all")
    else:
        assert not running.text(running.cell(lesson, "call-each"))
    for name, on_rank_0 in left.items():
        assert re.search(rf"{name} +10, 11 +20, 21 +{on_rank_0}", table), name
    for name in ("watch", "table"):
        assert running.WIDGET in running.mime_types(running.cell(lesson, name))
    for name, lines in {"measure": ["yours", "dist.all_reduce"], "figure-2": ["gloo", "shm"]}.items():
        assert [line["name"] for line in running.figure(running.cell(lesson, name))["data"]] == lines
