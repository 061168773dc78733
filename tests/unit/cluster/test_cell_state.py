"""The state of a cell run, told events in any order: which ranks are given up, and what is shown and interrupted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddp_lab.cluster.cells import failures as reports
from ddp_lab.cluster.cells.state import (
    ANNOUNCE_S,
    GRACE_S,
    UNBLOCKED_S,
    Action,
    Announce,
    Begin,
    CellState,
    Interrupt,
    Lose,
    Phase,
    TimeOut,
)
from ddp_lab.protocol.messages import CellReport

LIMIT_S = 10.0
DONE = CellReport(True)


def failed(time_ns: int = 0, name: str = "ValueError", consequence: bool = False) -> CellReport:
    """The report of a rank on which the cell raised."""
    return CellReport(False, name=name, time_ns=time_ns, consequence=consequence)


def test_a_queued_cell_begins_once() -> None:
    """The first rank that begins it is news, the second is not; the time limit counts from the first."""
    state = CellState([0, 1], LIMIT_S)
    state.send(100.0, queued=True)
    assert (state.phase, state.begun(), state.words()) == (Phase.QUEUED, None, {0: "queued", 1: "queued"})
    assert state.look_at_limit(100.0 + 2 * LIMIT_S) == []
    assert state.begin(1, 130.0) == [Begin()]
    assert state.begin(0, 131.0) == []
    assert (state.phase, state.begun()) == (Phase.RUNNING, 130.0)


def test_the_time_limit() -> None:
    """The ranks that have not ended are interrupted once, and given up if that does not help."""
    state = CellState([0, 1], LIMIT_S)
    state.send(100.0, queued=False)
    state.report(0, DONE, 101.0)
    assert state.look_at_limit(110.0) == [Interrupt((1,))]
    assert state.look_at_limit(110.0 + GRACE_S) == []
    assert state.look_at_limit(110.1 + GRACE_S) == [TimeOut(1)]
    assert state.timed_out == (1,)


def test_a_lost_rank() -> None:
    """Its peers may end by themselves; those that have not after a moment are interrupted, once."""
    state = CellState([0, 1, 2])
    state.send(100.0, queued=False)
    assert state.look_for_lost(101.0, {2: "was killed", 7: "was killed"}) == [Lose(2, "was killed")]
    state.give_up(reports.lost(2, "was killed"), 101.0)
    assert state.next_s == 101.0 + UNBLOCKED_S
    assert state.look_for_lost(101.0 + UNBLOCKED_S / 2, {2: "was killed"}) == []
    state.report(0, failed(consequence=True), 101.1)
    assert state.look_for_lost(101.0 + UNBLOCKED_S, {2: "was killed"}) == [Interrupt((1,))]
    assert state.look_for_lost(109.0, {2: "was killed"}) == []
    state.report(1, failed(consequence=True), 110.0)
    assert state.ends() == {0: "unblocked", 1: "unblocked", 2: "failed"}


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_failure_is_announced(interrupted: bool) -> None:
    """Once others have run on for a moment, the first cause is announced; not if an interrupt is why ranks end."""
    state = CellState([0, 1, 2])
    state.send(100.0, queued=False)
    state.report(1, failed(), 101.0)
    if interrupted:
        assert state.interrupt() == [Interrupt((0, 2))]
    assert state.look_for_failures(101.1, {0, 2}) == []
    assert state.look_for_failures(101.0 + ANNOUNCE_S, {1}) == [], "the others' code has ended"
    said = state.look_for_failures(101.0 + ANNOUNCE_S, {0, 1})
    assert [(one.failure.rank, one.others) for one in said if isinstance(one, Announce)] == (
        [] if interrupted else [(1, [0])]
    )
    assert state.look_for_failures(120.0, {0}) == []


def test_what_cannot_happen_raises_with_the_story() -> None:
    """A run is not sent twice, has no other ranks, and does not end while ranks are open, unless it is abandoned."""
    state = CellState([0, 1])
    with pytest.raises(RuntimeError, match=r"a cell run that is not sent can't be told 'begun on rank 0'"):
        state.begin(0, 1.0)
    state.send(100.0, queued=True)
    with pytest.raises(RuntimeError, match=r"can't be told 'sent'"):
        state.send(101.0, queued=False)
    with pytest.raises(RuntimeError, match=r"can't be told 'report of rank 2'"):
        state.report(2, DONE, 101.0)
    state.begin(1, 102.0)
    with pytest.raises(RuntimeError) as caught:
        state.end(103.0)
    assert str(caught.value).endswith("2.000 s begun on rank 1 (QUEUED); 3.000 s ended (RUNNING)")
    assert state.abandon(104.0) == [Interrupt((0, 1))]
    assert state.end(105.0)
    assert (state.silent, state.phase, state.ended_s) == ((0, 1), Phase.ENDED, 105.0)
    state.report(0, DONE, 106.0)
    assert not state.end(107.0), "it has ended"
    assert state.abandon(108.0) == []


class _Run(RuleBasedStateMachine):
    """Ranks, a clock and a user, in any order."""

    @initialize(size=st.integers(1, 4), queued=st.booleans(), limit=st.none() | st.just(LIMIT_S))
    def send(self, size: int, queued: bool, limit: float | None) -> None:
        self.state = CellState(range(size), limit)
        self.now, self.limit, self.by_user = 100.0, limit, False
        self.interrupts: list[str] = []
        self.announced, self.begins = 0, 0
        self.lost: dict[int, str] = {}
        self.ends: dict[int, str] = {}
        self.state.send(self.now, queued)

    def _rank(self, data: st.DataObject) -> int:
        return int(data.draw(st.sampled_from(self.state.open())))

    def _do(self, why: str, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Interrupt):
                assert set(action.ranks) <= set(self.state.open())
                self.interrupts.append(why)
            elif isinstance(action, Begin):
                self.begins += 1
            elif isinstance(action, Announce):
                assert not self.interrupts
                assert action.failure.rank not in action.others
                self.announced += 1
            elif isinstance(action, Lose):
                self.state.give_up(reports.lost(action.rank, action.why), self.now)
            else:
                self.state.give_up(reports.timed_out(action.rank, LIMIT_S, 0), self.now)

    @precondition(lambda self: self.state.open())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self._do("", self.state.begin(self._rank(data), self.now))

    @precondition(lambda self: self.state.open())
    @rule(
        data=st.data(), report=st.sampled_from([DONE, failed(1), failed(2, "KeyboardInterrupt"), failed(3, "E", True)])
    )
    def report(self, data: st.DataObject, report: CellReport) -> None:
        self.state.report(self._rank(data), report, self.now)

    @precondition(lambda self: self.state.open())
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.lost[self._rank(data)] = "was killed"

    @rule()
    def interrupt(self) -> None:
        self._do("asked", self.state.interrupt())

    @precondition(lambda self: self.state.phase is not Phase.ENDED)
    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, LIMIT_S, GRACE_S + 0.1]), running=st.sets(st.integers(0, 3)))
    def look(self, seconds: float, running: set[int]) -> None:
        self.now += seconds
        self._do("lost", self.state.look_for_lost(self.now, self.lost))
        self._do("", self.state.look_for_failures(self.now, running))
        self._do("limit", self.state.look_at_limit(self.now))
        begun = self.state.begun()
        assert not set(self.lost).intersection(self.state.open()), "a lost rank is given up"
        if self.limit is not None and begun is not None and self.now - begun > self.limit + GRACE_S:
            self._do("limit", self.state.look_at_limit(self.now))
            assert not self.state.open(), "after the limit and the grace no rank is waited for"

    @precondition(lambda self: self.state.phase is not Phase.ENDED)
    @rule()
    def abandon(self) -> None:
        self.by_user = True
        self._do("user", self.state.abandon(self.now))

    @precondition(lambda self: not self.state.open() or self.by_user)
    @rule()
    def end(self) -> None:
        left = self.state.open()
        if self.state.end(self.now):
            assert self.state.silent == left

    @invariant()
    def nothing_is_undone(self) -> None:
        words = self.state.words()
        for rank, word in self.ends.items():
            assert words[rank] == word or word == "failed", "how a rank has ended stays"
        self.ends = {rank: word for rank, word in words.items() if self.state[rank].ended}
        assert self.announced <= 1
        assert self.begins <= 1
        assert max(self.interrupts.count("lost"), self.interrupts.count("limit")) <= 1
        assert (self.state.phase is Phase.QUEUED) <= (self.state.begun() is None)
        assert self.state.phase is not Phase.ENDED or self.by_user or not self.state.open()


TestAnyOrder = _Run.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
