"""Ranks whose processes go on recording what groups communicate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.conftest import Ranks
from tests.ranks.harness import RankPool


@pytest.fixture(scope="module")
def recording_ranks() -> Iterator[Ranks]:
    """As `ranks`, with processes of their own: recording stays on in a process."""
    pools: dict[int, RankPool] = {}
    yield lambda size, *given: pools.setdefault(size, RankPool(size)).run(*given)
    for pool in pools.values():
        pool.close()
