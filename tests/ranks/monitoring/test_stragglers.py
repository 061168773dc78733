"""A rank that is late by little, on cores that are busy, is named; equal ranks are not."""

from __future__ import annotations

import pytest

from tests.ranks.monitoring import busy_stragglers


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
