"""Lesson 13, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import ast
import re

import pytest

from . import running
from .lesson_tests import test_checks as test_checks

_KEEP = (
    "%%distributed\nmodel = wrapped(gradient_as_bucket_view=True)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nweight = model.module.layers[1].weight\n"
    "train(model, optimizer, steps=3)\n"
)
_CHECKPOINT = "%%distributed\ndef checkpoint(optimizer):\n    "

WRONG = {
    "1": {
        f"{_KEEP}before = weight.grad.norm()\ntrain(model, optimizer, steps=1)": "of the gradient's shape",
        f"{_KEEP}before = weight.grad.detach()\ntrain(model, optimizer, steps=1)": "is in the bucket",
        _KEEP.replace("gradient_as_bucket_view=True", "")
        + "before = weight.grad\ntrain(model, optimizer, steps=1)": "Leave the option as it was",
        f"{_KEEP}train(model, optimizer, steps=1)\nbefore = weight.grad.clone()": "Copy it before the fourth",
    },
    "2": {
        _CHECKPOINT + "return None": "consolidate it first",
        _CHECKPOINT + "if rank == 0:\n        optimizer.consolidate_state_dict(to=0)\n"
        "        return optimizer.state_dict()": "rank [1] did not call",
        _CHECKPOINT + "optimizer.consolidate_state_dict(to=rank)\n    return optimizer.state_dict()": "once, with to=0",
        _CHECKPOINT
        + "optimizer.consolidate_state_dict(to=0)\n    return optimizer.state_dict()": "on rank 1: Optimizer",
        _CHECKPOINT + "optimizer.consolidate_state_dict(to=0)": "rank 0 should return state_dict()",
        _CHECKPOINT
        + "optimizer.consolidate_state_dict(to=0)\n"
        + "    return optimizer.state_dict() if rank == 0 else 0": "None; otherwise",
    },
}


def test_what_is_in_memory(lesson: running.Notebook) -> None:
    """Views leave no gradient outside of the buckets; ZeRO leaves each rank about half of Adam's state."""
    drawn = running.figure(running.cell(lesson, "shared-out-seen"))["data"]
    bars = {bar["name"]: running.numbers(bar["y"]) for bar in drawn}
    plain, views, *shared = zip(*bars.values(), strict=True)
    parameters, buckets, gradients, optimizer = plain
    assert buckets == pytest.approx(parameters) == pytest.approx(gradients)
    assert optimizer == pytest.approx(2 * parameters, rel=0.01)
    assert views == (pytest.approx(parameters), pytest.approx(buckets), 0, pytest.approx(optimizer))
    assert all(one[:3] == views[:3] and 0.3 * optimizer < one[3] < 0.7 * optimizer for one in shared)
    assert sum(one[3] for one in shared) == pytest.approx(optimizer)
    assert float(re.findall(r"differ by (\S+)", running.text(running.cell(lesson, "shared-out")))[0]) < 1e-6
    assert "changed by 0%" in running.text(running.cell(lesson, "exercise-1"))


def test_sixteen_bits(lesson: running.Notebook) -> None:
    """Natively half as much travels, under autocast as much as before; torch's own class says what it can't do."""
    [seen] = running.cell(lesson, "precision-seen").outputs
    columns, *rows = re.findall(r"<tr>(.*?)</tr>", seen.data["text/html"], re.DOTALL)
    cells = [re.findall(r">([^<>\s][^<>]*)</t[dh]>", row) for row in rows]
    assert "MiB that travel" in columns
    (_, *exact), (_, *autocast), (_, *native) = cells
    assert exact[:3] == ["float32"] * 3
    assert autocast[:3] == ["float32", "bfloat16", "float32"]
    assert native[:3] == ["bfloat16"] * 3
    assert float(exact[3]) == float(autocast[3]) == pytest.approx(2 * float(native[3]), abs=0.11)
    assert "on GPUs only; here it says" in running.text(running.cell(lesson, "own-class"))


def test_graphs_end_where_buckets_do(lesson: running.Notebook) -> None:
    """torch.compile makes a graph for each bucket, of its layers, in the opposite order; one without DDP.

    With a single bucket there are two.
    """
    told = running.text(running.cell(lesson, "compiled"))
    graphs = {
        name: ast.literal_eval(found)
        for name, found in re.findall(r"│ (.*): \d+ graph.s., of layers (.*)$", told, re.M)
    }
    [buckets] = [ast.literal_eval(found) for found in re.findall(r"order of launch: (.*)$", told, re.M)]
    assert graphs["buckets of 1 MiB"] == buckets[::-1]
    assert len(buckets) > 3
    assert len(graphs["without DDP"]) == 1
    assert len(graphs["one of 25 MiB"]) == 2
