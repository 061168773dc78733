"""Interrupts wait where something would be left half done, and arrive where a thread only waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ddp_lab.control.interrupts import interrupts_allowed, interrupts_deferred
from tests.waiting import DEADLINE_S


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Python's own handler before and after each test."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(block: Callable[[], object]) -> KeyboardInterrupt:
    """What ended the block."""
    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    return caught.value


def test_an_interrupt_waits_until_the_block_ends() -> None:
    """Also when blocks are nested. An error that came while an interrupt waited is the interrupt's context."""
    done = []

    def outer() -> None:
        with interrupts_deferred():
            with interrupts_deferred():
                interrupt()
                done.append(1)
            done.append(2)

    interrupted(outer)
    assert done == [1, 2]

    def fail() -> None:
        with interrupts_deferred():
            interrupt()
            raise ValueError("meanwhile")

    assert isinstance(interrupted(fail).__context__, ValueError)


def test_an_interrupt_is_let_through() -> None:
    """One that waited is raised where it is let through, before the thread sleeps; what was held stays held."""
    done = []

    def sleep() -> None:
        with interrupts_allowed():
            done.append("slept")

    def be_woken() -> None:
        with interrupts_allowed():
            threading.Timer(0.05, interrupt).start()
            threading.Event().wait(DEADLINE_S)

    with interrupts_deferred():
        interrupt()
        interrupted(sleep)
        interrupted(be_woken)
        with interrupts_deferred():
            interrupt()
        interrupted(sleep)
    assert not done


def test_other_handlers_and_threads() -> None:
    """A program's own handler gets its signal, once, and is put back. A block in another thread changes nothing for the
    main thread, which gets its interrupt at once."""
    got: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
    try:
        with interrupts_deferred():
            interrupt()
            interrupt()
            assert not got
        assert got == [signal.SIGINT]
        interrupt()
        assert len(got) == 2
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts_deferred(), interrupts_allowed():
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with interrupts_deferred(), interrupts_allowed():
            inside.set()
            leave.wait(DEADLINE_S)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(DEADLINE_S)

    def be_interrupted() -> None:
        interrupt()
        time.sleep(30)

    interrupted(be_interrupted)
    leave.set()
    thread.join()
