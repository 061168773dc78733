"""The bucket schedule: properties of `ddp_lab._schedule` over random schedules and orders; what its replay refuses."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ddp_lab import BucketStateError, _schedule

BucketSchedule = _schedule.BucketSchedule
STATES = ["pending", "ready", "launched", "reduced"]


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    """Buckets of parameters; some indices belong to none."""
    parameters = draw(st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True))
    cuts = draw(st.sets(st.integers(1, len(parameters))).map(lambda some: sorted({*some, len(parameters)})))
    return [parameters[begin:end] for begin, end in zip([0, *cuts], cuts, strict=False)]


@given(buckets=partitions(), data=st.data())
def test_a_schedule_replays(buckets: list[list[int]], data: st.DataObject) -> None:
    """The recorded order of arrival gives the same launches again: in a fresh schedule, and in an abandoned one."""
    order = data.draw(st.permutations([p for bucket in buckets for p in bucket]))
    used = BucketSchedule(buckets)
    used.arm()
    for parameter in order[: data.draw(st.integers(0, len(order)))]:
        used.mark_ready(parameter)

    def replay(schedule: _schedule.BucketSchedule) -> list[list[int]]:
        schedule.arm()
        return [schedule.mark_ready(parameter) for parameter in order]

    assert replay(used) == replay(BucketSchedule(buckets))


class AnyCaller(RuleBasedStateMachine):
    """Calls in any order: what the state allows happens, anything else raises and changes nothing."""

    @initialize(buckets=partitions())
    def start(self, buckets: list[list[int]]) -> None:
        self.buckets = buckets
        self.schedule = BucketSchedule(buckets)
        self.arrived = {p for bucket in buckets for p in bucket}  # finished until it is armed
        self.reduced = set(range(len(buckets)))

    def launched(self) -> int:
        complete = [self.arrived.issuperset(bucket) for bucket in self.buckets]
        return [*complete, False].index(False)

    @rule()
    def arm(self) -> None:
        self.schedule.arm()
        self.arrived, self.reduced = set(), set()

    @rule(parameter=st.integers(0, 41))
    def mark_ready(self, parameter: int) -> None:
        bucket = next((b for b, members in enumerate(self.buckets) if parameter in members), None)
        if bucket is None or parameter in self.arrived:
            with pytest.raises(BucketStateError, match=rf"parameter {parameter}\b"):
                self.schedule.mark_ready(parameter)
            return
        before = self.launched()
        self.arrived.add(parameter)
        assert self.schedule.mark_ready(parameter) == list(range(before, self.launched()))

    @rule(bucket=st.integers(0, 20))
    def mark_reduced(self, bucket: int) -> None:
        if bucket >= self.launched() or bucket in self.reduced:
            with pytest.raises(BucketStateError, match=rf"bucket {bucket}\b"):
                self.schedule.mark_reduced(bucket)
            return
        self.schedule.mark_reduced(bucket)
        self.reduced.add(bucket)

    @invariant()
    def agrees(self) -> None:
        for index, bucket in enumerate(self.buckets):
            stages = [self.arrived.issuperset(bucket), index < self.launched(), index in self.reduced]
            assert self.schedule.state(index) == STATES[sum(stages)]
        assert self.schedule.finished == (len(self.reduced) == len(self.buckets))
        assert self.schedule.launched == self.launched()
        assert self.schedule.missing() == [p for b in self.buckets for p in b if p not in self.arrived]


TestAnyCaller = AnyCaller.TestCase


def test_impossible_transitions_tell_the_story() -> None:
    """The message names parameter, bucket and state, and the exception is ddp_lab's."""
    schedule = BucketSchedule([[1, 2], [0]])
    schedule.arm()
    schedule.mark_ready(1)
    with pytest.raises(BucketStateError, match=r"parameter 1 .* bucket 0 is pending .* 1 of 2 gradients"):
        schedule.mark_ready(1)
    with pytest.raises(BucketStateError, match=r"bucket 1 can't be reduced: it is pending .* 0 of 2 buckets"):
        schedule.mark_reduced(1)
    with pytest.raises(BucketStateError, match="parameter 1 is in bucket 0 and in bucket 1"):
        BucketSchedule([[1], [1]])


def test_the_schedule_needs_no_torch() -> None:
    """`_schedule` imports, works and raises its own exception in a process where torch can't be imported."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from ddp_lab import BucketStateError, _schedule\n"
        "schedule = _schedule.BucketSchedule([[0]])\n"
        "schedule.arm()\n"
        "assert schedule.mark_ready(0) == [0]\n"
        "try: schedule.mark_ready(0)\n"
        "except BucketStateError: print('no torch needed')\n"
        "assert not any('torch' in line for line in open('/proc/self/maps'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "no torch needed\n", done.stderr


def test_refusals() -> None:
    """Arrays that don't fit, times that are none and buckets without parameters are refused."""
    replay = _schedule.Replay(np.array([[2.0, 1.0]]), np.zeros(1), np.array([2.0]))
    zeros = {name: np.zeros((1, 2)) for name in ("launch", "latency", "transfer", "write_back")}
    contention = np.array([[0.0, 0.0, 1.0, 1.0]])
    found = replay.run([[1, 0]], **zeros, contention=contention)
    assert found[1].tolist() == [[1.0, 2.0]]
    with pytest.raises(ValueError, match="configurations, parameters"):
        replay.run([[1, 0, 2]], **zeros, contention=contention)
    with pytest.raises(ValueError, match="configurations, buckets"):
        replay.run([[1, 0]], **{**zeros, "latency": np.zeros((1, 3))}, contention=contention)
    with pytest.raises(ValueError, match=r"configurations, 4"):
        replay.run([[1, 0]], **zeros, contention=np.zeros((1, 3)))
    with pytest.raises(ValueError, match="without costs"):
        replay.run([[2, 0]], **zeros, contention=contention)
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="finite and at least 0"):
            replay.run([[1, 0]], **{**zeros, "transfer": np.full((1, 2), wrong)}, contention=contention)
    with pytest.raises(BucketStateError, match="bucket 0"):
        replay.run([[1, 1]], **zeros, contention=contention)
