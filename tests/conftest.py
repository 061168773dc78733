"""The tests leave the machine as they found it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import leftovers

os.environ[leftovers.MARK] = str(os.getpid())


def nothing_more_than(before: leftovers.Belongings) -> Iterator[None]:
    yield
    try:
        leftovers.wait_until(lambda: not leftovers.look() - before, 3, "")
    except AssertionError:
        pytest.fail(f"left behind: {leftovers.look() - before}")


@pytest.fixture(autouse=True, scope="session")
def nothing_left_by_session() -> Iterator[None]:
    """Fails the session if a process, thread, socket, shared-memory segment or directory of a cluster is left."""
    yield from nothing_more_than(leftovers.look())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The same for one test; a folder whose tests share nothing lazily asks for it for all of them."""
    yield from nothing_more_than(leftovers.look())
