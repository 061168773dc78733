"""Waiting in tests: one deadline for all of them.

It is a safety net, which no healthy run comes near, and never a measurement: a wait that takes longer has failed. On a
slow machine it grows with the processor time that a piece of Python takes there; ``DDP_LAB_TEST_PATIENCE=3 make test``
makes it three times as long. No test has another deadline: what a command may take is limited by the test's own limit
(`TEST_LIMIT_S`), at which pytest ends it and its child.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["DEADLINE_S", "TEST_LIMIT_S", "wait_until"]

Result = TypeVar("Result")

_BASE_S = 180.0
_REFERENCE_S = 0.05  # of the processor, for the loop below
_SLOWNESS = "DDP_LAB_TEST_SLOWNESS"  # measured once a run: workers and programs inherit it


def _slowness() -> float:
    """How many times the reference's time this machine's processor needs, 1 at least; the fastest of five tries."""
    if _SLOWNESS not in os.environ:
        tries = []
        for _ in range(5):
            begin = time.process_time()
            sum(number * number for number in range(500_000))
            tries.append(time.process_time() - begin)
        os.environ[_SLOWNESS] = f"{max(1.0, min(tries) / _REFERENCE_S):.2f}"
    return float(os.environ[_SLOWNESS])


DEADLINE_S = _BASE_S * _slowness() * float(os.environ.get("DDP_LAB_TEST_PATIENCE", "1"))
TEST_LIMIT_S = int(3 * DEADLINE_S)  # nbclient takes whole seconds alone


def wait_until(condition: Callable[[], Result], what: str | Callable[[], str]) -> Result:
    """Polls until `condition` returns something true, and returns it.

    Args:
        condition: is asked often at first, then ten times a second.
        what: what is waited for, for the error; a function of it is called when the wait has failed.

    Raises:
        AssertionError: it did not happen before the deadline.
    """
    begin, pause = time.monotonic(), 0.002
    while not (found := condition()):
        if time.monotonic() - begin > DEADLINE_S:
            raise AssertionError(f"{what if isinstance(what, str) else what()}: not within {DEADLINE_S:.0f} s")
        time.sleep(pause)
        pause = min(0.1, pause * 1.2)
    return found
