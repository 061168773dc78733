"""torch's own tests of DistributedDataParallel, run against ours.

    pytest tests/torch_suite -k no_sync                       some of them
    DDP_LAB_TORCH_SUITE_CLASS=stock pytest tests/torch_suite  against torch's own class, as a control
    DDP_LAB_TORCH_SUITE_START=spawn pytest tests/torch_suite  ranks started as torch starts them (slower)

The lists (`lists/*.txt`) name the tests: every test of the class that torch's wheel holds and that passes with torch's
own class on a CPU. `make test` runs the public ones that no test of ours repeats, `make soak` all others. How they run:
[Note: how torch's tests run].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.torch_suite.running import OURS, Listed, Outcome, Suites, read_list

LISTS_ARE_FOR = "2.13"
SOAK = [pytest.mark.soak]
LISTS: dict[str, list[pytest.MarkDecorator]] = {"public": [], "more": SOAK, "long": SOAK}


def _params() -> list[Any]:
    return [
        pytest.param(
            listed,
            id=f"{listed.id}-{name}",
            marks=SOAK if listed.soak else marks,
        )
        for name, marks in LISTS.items()
        for listed in read_list(name)
    ]


@pytest.mark.parametrize("listed", _params())
def test_passes(listed: Listed, suites: Suites, record_property: Callable[[str, object], None]) -> None:
    """A test that torch ships for its DistributedDataParallel passes with ours, and no process constructed torch's."""
    found = suites.run(listed)
    for _ in range(listed.attempts - 1):
        if found.outcome == "failed":
            record_property("ran again", found.text.strip().splitlines()[-1])
            found = suites.run(listed)
    _report(listed, found)
    by_torch = {made for made in found.constructed if made.by.split(".")[0] == "torch"}
    assert suites.cls != OURS or not by_torch


def _report(listed: Listed, found: Outcome) -> None:
    print(found.log)
    if found.outcome == "missing" and not torch.__version__.startswith(LISTS_ARE_FOR):
        pytest.skip(found.text)
    if found.outcome != "passed":
        pytest.fail(f"{listed.test} {found.outcome}:\n{found.text}", pytrace=False)
