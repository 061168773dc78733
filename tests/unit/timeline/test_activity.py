"""The activities of one rank: what is kept of many, and how much of a step they cover."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.analysis.step_parts import SPANS
from ddp_lab.protocol.events import DTYPE, Kind
from ddp_lab.timeline.tables.activity import _MOST, ActivityTable

_APART, _LASTS = 100, 10  # ns between two forwards, and that each takes


@pytest.mark.parametrize("batch", [1, 997, 3 * _MOST])
def test_the_newest_activities_are_kept(batch: int) -> None:
    """Whatever comes at once: of many forwards the newest ones count, and those before are forgotten."""
    number = 3 * _MOST if batch > 1 else 300
    table, forwards = ActivityTable(), np.zeros(2 * number, DTYPE)
    forwards["kind"] = [Kind.FORWARD_BEGIN, Kind.FORWARD_END] * number
    forwards["host_ns"] = np.repeat(1_000 + _APART * np.arange(number), 2) + [0, _LASTS] * number
    forwards["bucket"] = -1
    for first in range(0, number, batch):
        table.extend(forwards[2 * first : 2 * (first + batch)], [])
        table.digest([])
    end = 1_000 + _APART * number
    begins = end - _APART * np.array([1, 7, 250, min(_MOST, number), number])
    steps = np.stack([begins - 1, np.full(5, end), np.full(5, end + 1), np.full(5, end + 2)], axis=1)
    forwards_of_steps = table.within(steps)[:, SPANS.index("accumulation")] // _LASTS
    assert forwards_of_steps.tolist() == [1, 7, 250, *[min(_MOST, number)] * 2]
    one_by_one = np.concatenate([table.within(step[None]) for step in steps])
    assert np.array_equal(table.within(steps), one_by_one)
