"""Ranks that are made late while they train are named, with the layer."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_lab.analysis.stragglers import LatePlace
from tests.benchmarks import stragglers
from tests.benchmarks.stragglers import Delay
from tests.ranks.conftest import Ranks
from tests.ranks.monitoring import busy_stragglers

EPISODES = [Delay(1, 4, 150.0), None, Delay(0, 11, 150.0)]  # longer than any other process keeps a rank waiting


def _judged(rank: int, size: int) -> list[tuple[list[LatePlace], bool]]:
    timelines = stragglers.train(EPISODES, 16)
    judged = stragglers.judge(EPISODES, timelines) if timelines else []
    return [(one.named, one.is_right) for one in judged]


def test_a_late_layer_is_named_with_its_cost(ranks: Ranks) -> None:
    """150 ms in one layer of one rank, in every step: rank, layer, pattern and cost are named."""
    found: list[Any] = ranks(2, _judged)[0]
    for delay, (named, is_right) in zip(EPISODES, found, strict=True):
        if delay is None:
            continue
        assert is_right, named
        first = named[0]
        assert (first.where, first.pattern) == ("place", "persistent")
        assert first.delay_ms >= 100
        assert 0 < first.cost_percent <= 100
        assert first.parameter is not None
        assert first.bucket is not None


def test_the_measurement_counts_right_and_wrong() -> None:
    """Episodes are drawn as asked for, and an episode is right only if its own rank and layer are named first."""
    drawn = stragglers.plan(7, 5, 3, seed=1)
    assert sum(one is None for one in drawn) == 5
    assert all(one is None or (0 <= one.rank < 3 and 5 <= one.ms <= 50) for one in drawn)
    place = LatePlace(1, 0, "layers.4.bias", 50.0, 1.0)
    other = LatePlace(0, 0, "layers.4.bias", 50.0, 1.0)
    assert stragglers.Judged(Delay(1, 4, 50.0), [place, other]).is_right
    assert stragglers.Judged(Delay(1, 4, 50.0), [place, other]).also_named == 1
    assert not stragglers.Judged(Delay(1, 4, 50.0), [other, place]).is_right
    assert not stragglers.Judged(Delay(1, 4, 50.0)).is_right
    assert stragglers.Judged(None).is_right
    assert not stragglers.Judged(None, [place]).is_right


@pytest.mark.soak
def test_a_straggler_on_busy_cores() -> None:
    """4 ms of one of three ranks on two cores are told in nearly all runs, with a place or without; no advice on
    communication stands in their place, and findings, stragglers and summary never contradict each other."""
    found = busy_stragglers.counts(busy_stragglers.measure(50))
    assert found["named"] >= 48, found
    assert found["advice in its place"] == 0, found
    assert found["contradictions"] == 0, found


@pytest.mark.soak
def test_busy_cores_alone_name_nobody() -> None:
    """Three equal ranks on two cores: hardly ever is one of them called late."""
    found = busy_stragglers.measure(30, ms=0.0)
    assert sum(bool(one["named"]) for one in found) <= 2, found
