"""torch's own tests of collectives, groups and point-to-point operations, run with the backend "shm".

    pytest tests/torch_suite/test_torchs_collectives.py -m ""           all of them
    DDP_LAB_TORCH_SUITE_BACKEND=gloo pytest tests/torch_suite/test_torchs_collectives.py   with Gloo, as a control

The lists name every test of torch's wheel that makes no DistributedDataParallel, sends something, and passes with Gloo
on a CPU. How they run: [Note: tests of one backend with another] and [Note: how torch's tests run].
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.torch_suite.running import OURS, Listed, Suites, read_list
from tests.torch_suite.test_torchs_tests import _report

BACKEND = os.environ.get("DDP_LAB_TORCH_SUITE_BACKEND", "shm")
START = os.environ.get("DDP_LAB_TORCH_SUITE_START", "fork")
SOAK = [pytest.mark.soak]


def _params(lists: dict[str, list[pytest.MarkDecorator]]) -> list[Any]:
    return [
        pytest.param(listed, id=f"{listed.id}-{name}", marks=marks)
        for name, marks in lists.items()
        for listed in read_list(name)
    ]


@pytest.fixture(scope="module")
def collectives() -> Iterator[Suites]:
    """Runs torch's tests with the backend."""
    suites = Suites("stock", START, BACKEND)
    yield suites
    suites.close()


@pytest.fixture(scope="module")
def ours() -> Iterator[Suites]:
    """The same, with our DistributedDataParallel."""
    suites = Suites(OURS, START, BACKEND)
    yield suites
    suites.close()


@pytest.mark.parametrize(
    "listed", _params({"collectives": SOAK, "collectives_more": SOAK, "collectives_not_gloos": SOAK})
)
def test_passes(listed: Listed, collectives: Suites) -> None:
    """What torch tests of Gloo holds for the backend, and no group was made of another one."""
    found = collectives.run(listed)
    _report(listed, found)
    assert found.backends == {BACKEND}


@pytest.mark.parametrize("listed", _params({"public": SOAK, "more": SOAK}))
def test_our_class_passes(listed: Listed, ours: Suites) -> None:
    """torch's tests of DistributedDataParallel pass with ours on the backend, too."""
    found = ours.run(listed)
    _report(listed, found)
    assert found.backends <= {BACKEND}
    assert not {made for made in found.constructed if made.by.split(".")[0] == "torch"}
