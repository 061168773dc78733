"""Clocks of other hosts: what questions and answers say of them, and how times are moved."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.analysis.clocks import MOST_DRIFT, Questions
from ddp_lab.protocol import events
from ddp_lab.timeline.clocks import ClockLine, HostClocks, clocks_of
from ddp_lab.timeline.timeline import Timeline

NOW = 10**15
OFFSET = -123_456_789_012_345


def _asked(drift: float, seconds: float, seed: int = 0, delay_ns: float = 1e5) -> Questions:
    """Four questions each second over a way whose directions take different, changing times."""
    random, questions = np.random.default_rng(seed), Questions()
    for second in np.arange(0, seconds, 0.25):
        sent = NOW + int(second * 1e9)
        there, back = random.exponential(delay_ns, 2) + 2e4
        answer = sent + there - (OFFSET + drift * (sent + there - NOW))
        questions.add(sent, int(answer), int(sent + there + back))
    return questions


@given(
    drift=st.floats(-MOST_DRIFT / 2, MOST_DRIFT / 2),
    seconds=st.floats(0.5, 60),
    ahead=st.floats(-60, 60),
    seed=st.integers(0, 1 << 16),
)
def test_the_right_offset_is_within_the_uncertainty(drift: float, seconds: float, ahead: float, seed: int) -> None:
    """Whatever the delays of both directions, for moments between, before and after the questions."""
    at = NOW + int((seconds + ahead) * 1e9)
    found = _asked(drift, seconds, seed).offset(at)
    assert abs(found.ns - (OFFSET + drift * (at - NOW))) <= found.uncertain_ns + 2


def test_questions_over_time() -> None:
    """Quick answers count: the uncertainty is far below the typical delay, and the drift is found. Without an answer
    there is no offset. Contradictions mean that the past counts no more; the offset is found from what is newest."""
    one, many = _asked(5e-5, 0.25), _asked(5e-5, 300)
    at = NOW + 300 * 10**9
    found, first = many.offset(at), one.offset(NOW)
    assert found.uncertain_ns < first.uncertain_ns
    assert found.uncertain_ns < 60_000
    assert abs(found.drift - 5e-5) < 1e-6
    assert Questions().offset(NOW) is None
    questions = _asked(0.0, 100)
    for second in range(100, 200):
        jumped = OFFSET + 5_000_000
        sent = NOW + second * 10**9
        questions.add(sent, sent + 50_000 - jumped, sent + 100_000)
    found = questions.offset(NOW + 200 * 10**9)
    assert abs(found.ns - (OFFSET + 5_000_000)) <= found.uncertain_ns


@given(targets=st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=8))
def test_a_line_has_no_jumps_and_keeps_the_past(targets: list[int]) -> None:
    """It runs towards each estimate, by a thousandth at most, and what was moved once is moved alike again."""
    line = ClockLine(0, OFFSET, 0.0)
    told: dict[int, int] = {0: OFFSET}
    for number, target in enumerate(targets, 1):
        now = number * 2 * 10**9
        line.follow(now, OFFSET + target, 0.0, 2.0)
        told |= {at: line.offset(at) for at in range(now - 10**9, now + 10**9 + 1, 10**9 // 2)}
    at = np.array(sorted(told), np.int64)
    offsets = line.offsets(at)
    for again in (offsets, np.array([line.offset(int(one)) for one in at])):
        assert np.abs(np.array([told[int(one)] for one in at]) - again).max() <= 2  # ns, of rounding
    assert (np.abs(np.diff(offsets)) <= 1e-3 * np.diff(at) + 1).all()


class Hosts:
    """Stands for a wire whose ranks' clocks are known: the estimate itself is tried on real hosts."""

    def times(self, ranks: list[int], timeout: float) -> dict[int, tuple[int, int, int]]:
        return {rank: (NOW, NOW - OFFSET + 500, NOW + 1_000) for rank in ranks if rank == 1}


def _batch(rank: int) -> events.Batch:
    made = np.zeros(2, events.DTYPE)
    made["host_ns"] = [NOW - OFFSET, NOW - OFFSET + 1_000]
    made["device_end_ns"] = [0, NOW - OFFSET]
    return events.Batch(rank, 1, 0, 0, made)


def test_events_are_moved() -> None:
    """Times of a host with another clock are moved, those that are none (0) and those of this clock are not."""
    timeline = Timeline()
    hosts = {"here": ("own", (0,)), "there": ("other", (1,)), "silent": ("third", (2,))}
    clocks = HostClocks(Hosts(), lambda: hosts, "own", timeline.set_status)
    clocks.begin()
    try:
        moved = clocks.placed(_batch(1)).events
        assert abs(int(moved["host_ns"][0]) - NOW) <= 1_000_000
        assert int(moved["host_ns"][1] - moved["host_ns"][0]) == pytest.approx(1_000, abs=5)
        assert moved["device_end_ns"].tolist()[0] == 0
        for rank in (0, 2, 3):
            assert clocks.placed(_batch(rank)).events["host_ns"][0] == NOW - OFFSET
        assert [clock.host for clock in clocks.clocks()] == ["there"]
    finally:
        clocks.stop()
    assert [clock.ranks for clock in timeline.clocks] == [(1,)]


def test_clocks_are_saved(tmp_path: Path) -> None:
    """A saved timeline still tells how exact times of different hosts are."""
    timeline = Timeline()
    clock = {"host": "b", "offset_ns": -5_000_000_000, "uncertain_ns": 70_000, "drift": 1e-6}
    for rank in (2, 3):
        timeline.set_status(rank, {"state": "idle", "clock": clock})
    loaded = Timeline.load(timeline.save(tmp_path / "saved.npz"))
    assert loaded.clocks == timeline.clocks
    assert "ranks 2–3 on b were clock-aligned with the other hosts by -5.000000 s" in str(loaded.clocks[0])
    assert "± 0.070 ms" in str(loaded.clocks[0])


@pytest.mark.parametrize("told", ["1", "{}", '{"host": "a"}', '{"host": "a", "offset_ns": 1e400}', "[]", "null"])
def test_hostile_clocks(told: str) -> None:
    """What a damaged file says of clocks is left out."""
    assert clocks_of({0: {"clock": json.loads(told)}}) == ()
