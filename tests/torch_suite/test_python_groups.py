"""Cases in the style of torch's tests of process groups written in Python, which its wheel does not hold."""

from __future__ import annotations

import pytest

from tests.torch_suite.running import OURS, Listed, Suites


@pytest.mark.parametrize("test", ["test_threads_average", "test_lonely_group"])
def test_passes(test: str, suites: Suites) -> None:
    """Ranks that are threads, and a group and works in Python: the case passes with torch's class and with ours."""
    found = suites.run(Listed("plain", 2, f"Threads::{test}"))
    assert found.outcome == "passed", found.text + found.log
    makers = {made.by.split(".")[0] for made in found.constructed}
    assert makers == ({"ddp_lab"} if suites.cls == OURS else {"torch"})
