"""Lesson 5, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

from . import running
from .lesson_tests import test_checks as test_checks
from .lesson_tests import test_predictions as test_predictions

_AVERAGE = (
    "%%distributed\ndef average(self):\n    for p in self.network.parameters():\n{}\n"
    "ByHand.average_gradients = average\n"
)
_SUM = "        dist.all_reduce(p.grad)\n"

WRONG = {
    "1": {
        _AVERAGE.format(_SUM): "Divide by world_size",
        _AVERAGE.format("        p.grad /= world_size\n"): "were divided, but not added up",
        _AVERAGE.format(f"{_SUM}        if p.dim() > 1:\n            p.grad /= world_size\n"): "some are not",
    },
    "2": {
        "%%distributed\nweight = samples / total": "they add up to 1",
        "%%distributed\nweight = total / (world_size * samples)": "on the wrong side of 1",
        "%%distributed\nweight = samples": "is not the weight",
    },
}

CAME_TRUE = {
    1: "average",
    2: "equal except for the last digits",
    3: "no, it stays below 0.1 %",
    4: "2",
    5: "with LayerNorm only",
    6: "zero, or in the last digits",
}


def _differences(lesson: running.Notebook, cell: str, of: str) -> list[float]:
    """The numbers that ranks print behind a word."""
    found = re.findall(rf"{of}:? +([\d.]+e[-+]\d+)", running.text(running.cell(lesson, cell)))
    assert found, of
    return [float(number) for number in found]


def test_averaging_equals_one_process(lesson: running.Notebook) -> None:
    """Averaged ranks take the steps of one process, by hand and by DDP; ranks for themselves do not."""
    assert max(_differences(lesson, "solution-1", "one process")) < 1e-5
    assert max(_differences(lesson, "steps", "averaged")) < 1e-3
    assert min(_differences(lesson, "steps", "for itself")) > 0.1
    assert max(_differences(lesson, "ddp", "from ByHand")) < 1e-5
    assert max(_differences(lesson, "ddp", "from one process")) < 1e-3
    assert len(running.figure(running.cell(lesson, "picture"))["data"]) == 3


def test_where_it_does_not(lesson: running.Notebook) -> None:
    """Sums come out halved, LayerNorm agrees, BatchNorm does not, and SyncBatchNorm says where it can't run."""
    assert "one process: 0.5000" in running.text(running.cell(lesson, "sum"))
    assert max(_differences(lesson, "batch-norm", "LayerNorm")) < 1e-4
    assert min(_differences(lesson, "batch-norm", "BatchNorm")) > 0.01
    assert "SyncBatchNorm: not on this device." in running.text(running.cell(lesson, "batch-norm"))
