"""A rank's cells and groups, told events in any order: what is interrupted, and for which cell groups are shut down."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddp_lab.engine.cells.lifecycle import Action, CellLifecycle, Phase, Task


def tasks(actions: Sequence[Action]) -> list[tuple[Task, str]]:
    """Actions as pairs."""
    return [(action.task, action.cell_id) for action in actions]


def test_a_cell_that_fails_loses_the_groups() -> None:
    """It is shut down for until it is settled; what still waits is aborted once; joining makes the groups whole."""
    cells = CellLifecycle()
    assert (cells.phase, cells.open, cells.word) == (Phase.IDLE, None, "idle")
    assert cells.begin("a", "cell [1]", 5) == []
    assert (cells.phase, cells.open, cells.word) == (Phase.RUNNING, "a", "running")
    cells.fail("a")
    assert (cells.phase, cells.open, cells.word, cells.last_ended) == (Phase.FAILED, "a", "idle", ("a", True))
    assert tasks(cells.shut_down("a")) == [(Task.SHUT_DOWN, "a"), (Task.ABORT_REST, "a")]
    assert tasks(cells.shut_down("a")) == [(Task.SHUT_DOWN, "a")]
    cells.end("a", failed=True)
    assert (cells.open, cells.word, cells.unblocked and cells.unblocked.cause) == (None, "unblocked", "failed")
    cells.settle("a")
    assert cells.shut_down("a") == []
    cells.join()
    assert (cells.word, cells.unblocked) == ("idle", None)


def test_a_peer_that_failed() -> None:
    """Groups are lost to the running cell, by that peer; to a cell that has failed, they are lost without a thread."""
    cells = CellLifecycle()
    cells.begin("a", "", 0)
    assert not cells.explains("a")
    assert tasks(cells.unblock("a", 1)) == [(Task.UNBLOCK_WHEN_STILL, "a")]
    assert cells.explains("a")
    cells.fail("a")
    assert cells.unblock("a", 2) == [], "its own thread shuts down"
    assert cells.unblocked is not None
    assert cells.unblocked.cause == "rank 1", "the first counts"
    cells.end("a", failed=True)
    cells.join()
    assert cells.unblock("a", 2) == [], "it is settled"
    assert cells.unblocked is None


def test_messages_for_a_queued_cell() -> None:
    """It is interrupted, and its groups are shut down, when it begins; others that begin before it are left alone."""
    cells = CellLifecycle()
    cells.begin("a", "", 0)
    assert cells.interrupt(["c"]) == cells.unblock("c", 1) == []
    cells.end("a", failed=False)
    assert cells.begin("b", "", 0) == []
    cells.end("b", failed=False)
    assert tasks(cells.begin("c", "", 0)) == [(Task.UNBLOCK, "c"), (Task.INTERRUPT, "c")]
    assert cells.unblocked is not None
    assert (cells.unblocked.cell.id, cells.unblocked.cause) == ("c", "rank 1")


def test_a_signal_is_repeated_until_it_raises() -> None:
    """Until the cell's code has been interrupted, and again if Python drops that; never for another cell."""
    cells = CellLifecycle()
    cells.begin("a", "", 0)
    assert tasks(cells.interrupt(["a"])) == [(Task.INTERRUPT, "a")]
    assert cells.may_signal("a")
    cells.raise_interrupt()
    assert not cells.may_signal("a")
    cells.drop_interrupt()
    assert cells.may_signal("a")
    cells.fail("a")
    assert not cells.may_signal("a")
    cells.end("a", failed=True)
    cells.begin("b", "", 0)
    assert not cells.may_signal("a")


def test_what_cannot_happen_raises_with_the_story() -> None:
    """Only the cell that runs fails and ends, once, and no group joins meanwhile. A cell that begins during another one
    raises, and the next one begins."""
    cells = CellLifecycle()
    with pytest.raises(RuntimeError, match=r"a rank that has run no cell can't be told 'end a'"):
        cells.end("a", failed=False)
    cells.begin("a", "", 0)
    with pytest.raises(RuntimeError, match=r"a rank that runs a cell's own code can't be told 'join'"):
        cells.join()
    with pytest.raises(RuntimeError, match=r"can't be told 'fail b'"):
        cells.fail("b")
    cells.end("a", failed=False)
    with pytest.raises(
        RuntimeError, match=r"begin a \(IDLE\); join \(RUNNING\); fail b \(RUNNING\); end a \(RUNNING\)"
    ):
        cells.end("a", failed=False)
    cells.begin("b", "", 0)
    with pytest.raises(RuntimeError, match=r"can't be told 'begin c'"):
        cells.begin("c", "", 0)
    cells.fail("c")
    cells.end("c", failed=True)
    assert cells.begin("d", "", 0) == []


class _Rank(RuleBasedStateMachine):
    """A main thread that runs cells in order, and messages and threads that come at any time, also too late."""

    @initialize()
    def start(self) -> None:
        self.cells = CellLifecycle()
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.named: set[str] = set()  # cells that an interrupt has named
        self.interrupted: list[str] = []  # cells of which the agent was asked to interrupt them
        self.settled: set[str] = set()
        self.aborts: list[str] = []
        self.lost: tuple[str, int | None] | None = None
        self.blamed: dict[str, set[int | None]] = {}  # cell -> who was said to have failed in it

    @property
    def running(self) -> str | None:
        return self.begun[-1] if len(self.begun) > len(self.ended) else None

    def _any(self, data: st.DataObject) -> str:
        """A cell: earlier, present or queued."""
        last = len(self.begun)
        return str(data.draw(st.integers(max(1, last - 2), last + 3)))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            assert action.cell_id == self.running or action.task in (Task.SHUT_DOWN, Task.ABORT_REST)
            assert action.cell_id == self.begun[-1]
            if action.task is Task.INTERRUPT:
                assert action.cell_id in self.named
                self.interrupted.append(action.cell_id)
            elif action.task is Task.UNBLOCK:
                self._shut_down(action.cell_id)
            elif action.task is Task.SHUT_DOWN:
                assert action.cell_id not in self.settled, "a settled cell loses nothing"
            elif action.task is Task.ABORT_REST:
                self.aborts.append(action.cell_id)

    def _shut_down(self, cell_id: str) -> None:
        actions = self.cells.shut_down(cell_id)
        assert bool(actions) == (cell_id == self.begun[-1] and cell_id not in self.settled)
        self._do(actions)

    @precondition(lambda self: self.running is None)
    @rule()
    def begin(self) -> None:
        cell_id = str(len(self.begun) + 1)
        self.begun.append(cell_id)
        actions = self.cells.begin(cell_id, "", 0)
        assert (Task.INTERRUPT in [each.task for each in actions]) == (cell_id in self.named)
        self._do(actions)

    @precondition(lambda self: self.running)
    @rule()
    def fail(self) -> None:
        self.cells.fail(str(self.running))
        assert self.cells.last_ended == (self.running, True)

    @precondition(lambda self: self.running)
    @rule(failed=st.booleans())
    def end(self, failed: bool) -> None:
        cell_id = str(self.running)
        self.cells.end(cell_id, failed)
        self.ended.append(cell_id)
        assert self.cells.last_ended == (cell_id, failed)
        for wrong in (lambda: self.cells.end(cell_id, failed), lambda: self.cells.fail(cell_id)):
            with pytest.raises(RuntimeError, match=f"can't be told .* story: .*end {cell_id}"):
                wrong()

    @precondition(lambda self: self.running is None)
    @rule()
    def join(self) -> None:
        self.cells.join()
        self.settled.update(self.begun)
        self.lost = None
        assert (self.cells.unblocked, self.cells.word) == (None, "idle")

    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        cells = [self._any(data) for _ in range(data.draw(st.integers(1, 3)))]
        self.named.update(cells)
        self._do(self.cells.interrupt(cells))

    @rule(data=st.data(), by=st.sampled_from([None, 1, 2]), named=st.booleans())
    def unblock(self, data: st.DataObject, by: int | None, named: bool) -> None:
        cell_id = self._any(data) if named else None
        told = cell_id or (self.begun[-1] if self.begun else "")
        self.blamed.setdefault(told, set()).add(by)
        actions = self.cells.unblock(cell_id, by)
        assert not actions or (self.cells.explains(told) or self.lost is not None)
        self._do(actions)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        cell_id = self._any(data)
        self.cells.settle(cell_id)
        if cell_id in self.begun:
            self.settled.add(cell_id)

    @rule()
    def settle_all(self) -> None:
        self.cells.settle(None)
        if self.running is None:
            self.settled.update(self.begun)

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def thread_shuts_down(self, data: st.DataObject) -> None:
        self._shut_down(str(data.draw(st.sampled_from(self.begun))))

    @precondition(lambda self: self.interrupted)
    @rule(data=st.data(), dropped=st.booleans())
    def thread_signals(self, data: st.DataObject, dropped: bool) -> None:
        cell_id = str(data.draw(st.sampled_from(self.interrupted)))
        if self.cells.may_signal(cell_id):
            assert cell_id == self.running, "no other cell is interrupted"
            self.cells.raise_interrupt()
            assert not self.cells.may_signal(cell_id), "once is enough"
            if dropped:
                self.cells.drop_interrupt()
                assert self.cells.may_signal(cell_id)

    @invariant()
    def what_it_says(self) -> None:
        cells, running = self.cells, self.running
        assert cells.open == running
        assert (cells.word == "running") == (cells.phase is Phase.RUNNING)
        assert len(set(self.aborts)) == len(self.aborts), "what waits is aborted once for each cell"
        loss = cells.unblocked and (cells.unblocked.cell.id, cells.unblocked.by)
        assert self.lost in (None, loss), "lost groups stay lost to the same cell until a join"
        if loss is not None and self.lost is None:
            assert loss[0] == self.begun[-1]
            assert loss[1] is None or loss[1] in self.blamed[loss[0]], "only who was named is blamed"
        self.lost = loss
        for cell_id in self.begun:
            assert not cells.runs(cell_id) or cell_id == running
            assert not cells.explains(cell_id) or cell_id in self.named or (loss is not None and loss[0] == cell_id)


TestAnyOrder = _Rank.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
