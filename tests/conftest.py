"""The tests leave the machine as they found it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import leftovers

os.environ[leftovers.MARK] = str(os.getpid())


def nothing_more_than_before(sockets: bool = True) -> Iterator[None]:
    """Fails if there is more when it is resumed than there was when it was started."""
    before = leftovers.look(sockets)
    yield
    try:
        leftovers.wait_until(lambda: not leftovers.look(sockets) - before, 3, "")
    except AssertionError:
        pytest.fail(f"left behind: {leftovers.look(sockets) - before}")


@pytest.fixture(autouse=True, scope="session")
def nothing_left_by_session() -> Iterator[None]:
    """Fails the session if a process, thread, socket, shared-memory segment or directory of a cluster is left."""
    yield from nothing_more_than_before()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The same for one test, but for sockets; a folder whose tests share nothing lazily asks for it for all of them."""
    yield from nothing_more_than_before(sockets=False)
