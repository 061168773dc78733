"""How a rank's agent tells the end of a cell that failed, while its other threads hear of peers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ddp_lab.engine.agent import Agent
from ddp_lab.engine.cells.cell import CellEnd
from ddp_lab.protocol.messages import Interrupt, Message, Status, Unblock
from tests.waiting import DEADLINE_S


class _Kept:
    """In place of `Telemetry`, so that threads meet in one order.

    It keeps the last status, as that does between two drains, and lets the one of the cell's end come late.
    """

    def __init__(self) -> None:
        self.last = Status("idle")
        self.unblocked = threading.Event()

    def on_control(self, kind: type[Message], answer: Callable[[Any], Any]) -> None: ...

    def flush(self, cell: str | None = None) -> bool:
        return True

    def send_status(self, status: Status) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.last = status
            self.unblocked.set()
        elif status.ended:
            self.unblocked.wait(0.3)
            self.last = status


def test_that_groups_were_shut_down_is_told() -> None:
    """The status of a cell's end does not replace the newer one, which has the client unblock this rank's peers."""
    channel = _Kept()
    agent = Agent(channel, 0)
    agent._before_cell("1", "cell 1")
    threading.Thread(target=agent._shut_down_unless_settled, args=("1",)).start()
    agent._on_done(CellEnd("1", "cell 1", ValueError("on purpose")))
    assert channel.unblocked.wait(DEADLINE_S)
    assert channel.last.unblocked == "1"


class _NoRoom(_Kept):
    """One to which the end of a failed cell can't be told: there is no memory for it."""

    def send_status(self, status: Status) -> None:
        if status.ended and threading.current_thread() is threading.main_thread():
            raise MemoryError
        super().send_status(status)


def test_a_failure_that_cannot_be_told_unblocks_the_peers() -> None:
    """Whatever goes wrong with telling that a cell has failed, the ranks that wait for this one are unblocked."""
    channel = _NoRoom()
    agent = Agent(channel, 0)
    agent._before_cell("1", "cell 1")
    with pytest.raises(MemoryError):
        agent._on_failure(CellEnd("1", "cell 1", ValueError("on purpose")))
    assert channel.unblocked.wait(DEADLINE_S)
    assert channel.last.unblocked == "1"


def test_an_error_that_no_line_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of a cell has no text, on a rank whose groups were shut down meanwhile: that is told, no other error.
    An interrupted peer closes the connection first; the word that says why is heeded while the rank waits for it."""
    agent = Agent(_Kept(), 0)
    agent._before_cell("1", "cell 1")
    agent._answer_unblock(Unblock(by=1, cell="1"))
    end = CellEnd("1", "cell 1", RuntimeError("displaying the value failed"))
    agent._on_failure(end)
    assert (end.consequence, str(end.error)) == (True, "displaying the value failed")
    agent = Agent(_Kept(), 0)
    agent._before_cell("1", "cell 1")

    def told(error: RuntimeError) -> str:
        agent._answer_interrupt(Interrupt(["1"]))
        return "all_reduce"

    monkeypatch.setattr(agent, "_waited_in", told)
    end = CellEnd("1", "cell 1", RuntimeError("Connection closed by peer"))
    agent._on_failure(end)
    assert isinstance(end.error, KeyboardInterrupt)
