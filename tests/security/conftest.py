"""A cluster whose walls are tried: see SECURITY.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.conftest import Lab
from tests.leftovers import nothing_more_than_before


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_module() -> Iterator[None]:
    """Nothing is left of what a module's tests share."""
    yield from nothing_more_than_before()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two ranks with a model, for all tests of a module."""
    with Lab(2) as cluster:
        cluster.run("model = ddp_lab.DistributedDataParallel(torch.nn.Linear(2, 2))")
        yield cluster
