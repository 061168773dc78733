"""Lesson 15, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

import pytest

from . import running
from .lesson_tests import test_checks as test_checks

_SHARD = "%%distributed\ndef shard(network):\n"
_LAYERS = "    for layer in network.layers:\n        fully_shard(layer)\n"
_ONCE = (
    "%%distributed\ndef shard_once(network):\n{}\n    return fully_shard(network)\n"
    'model, optimizer, training_step = build("fully_shard", shard_once)'
)

WRONG = {
    "1": {
        _SHARD + "    return network": "fully_shard was not applied",
        _SHARD + _LAYERS + "    return network": "the network is none",
        _SHARD + "    fully_shard(network.layers[0])\n    return fully_shard(network)": "layers.1 has no group",
        _SHARD + _LAYERS + "    fully_shard(network)": "should return the network",
        _SHARD
        + "    fully_shard(list(network.layers))\n    return fully_shard(network)": "several layers are in one group",
        _SHARD + "    fully_shard(network)\n" + _LAYERS + "    return network": "for the network before its layers",
    },
    "2": {
        _ONCE.format("    pass"): "keep a group for each layer",
        _ONCE.format(
            _LAYERS.rstrip().replace("(layer)", "(layer, reshard_after_forward=layer is network.layers[2])")
        ): "layers.2 is still gathered",
    },
    "3": {
        "ranks_needed, fits_with_zero = 2, False": "which is too much",
        "ranks_needed, fits_with_zero = 64, False": "it also fits on 32 ranks",
        "ranks_needed, fits_with_zero = 3, False": "should be 2, 4, 8",
        "ranks_needed, fits_with_zero = next(n for n in (2, 4, 8, 16) if peak('fully_shard', n) <= limit), True": (
            "Look at the peak of ZeRO-1"
        ),
    },
}

SHORTER = {"steps=6": "steps=3", "for _ in range(7):": "for _ in range(3):", "sorted(times)[3]": "sorted(times)[1]"}


def test_memory_falls_with_each_strategy(lesson: running.Notebook) -> None:
    """DDP holds most, ZeRO-1 less, fully_shard least; what a rank keeps is halved where it is divided."""
    bars = {
        one["name"]: running.numbers(one["y"])
        for one in running.figure(running.cell(lesson, "side-by-side-seen"))["data"]
    }
    ddp, zero, sharded = (dict(zip(bars, values, strict=True)) for values in zip(*bars.values(), strict=True))
    assert sum(ddp.values()) > sum(zero.values()) > sum(sharded.values())
    assert zero["optimizer"] == pytest.approx(ddp["optimizer"] / 2, rel=0.35)
    for part in ("parameters", "gradients", "optimizer"):
        assert sharded[part] == pytest.approx(ddp[part] / 2, rel=0.02)
    assert ddp["buckets"] == pytest.approx(ddp["gradients"])
    assert sharded["buckets"] == 0


def test_predictions_are_close(lesson: running.Notebook) -> None:
    """The predicted peaks are within 5 % of the measured ones."""
    [seen] = running.cell(lesson, "predicted").outputs
    rows = re.findall(r"<tr>(.*?)</tr>", seen.data["text/html"], re.DOTALL)
    errors = {}
    for row in rows:
        name, _, _, error = re.findall(r">([^<>\s][^<>]*)</t[dh]>", row)
        errors[name] = float(error)
    assert set(errors) == {"ddp", "zero-1", "fully_shard", "gathered once"}
    assert max(abs(error) for error in errors.values()) <= 5


def test_groups_are_gathered_and_reduced(lesson: running.Notebook) -> None:
    """Each layer has a row with times of its unshards and its reduce-scatter."""
    [seen] = running.cell(lesson, "groups").outputs
    assert [f"layers.{index}" in seen.data["text/html"] for index in range(6)] == [True] * 6
