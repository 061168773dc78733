"""Fixtures of the tests that run on several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ranks.harness import RankPool, end_server

Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="session", autouse=True)
def _server() -> Iterator[None]:
    """The process from which ranks are forked is there until the session ends."""
    yield
    end_server()


@pytest.fixture(scope="session")
def _pools(_server: None) -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.hang_up()
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(_pools: dict[int, RankPool]) -> Ranks:
    """``ranks(n, function, *args)``: what ``function(rank, n, *args)`` returned in each of n processes."""

    def run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        return _pools.setdefault(size, RankPool(size)).run(function, *args)

    return run
