"""Cases in the style of torch's tests of process groups written in Python, which its wheel does not hold."""

from __future__ import annotations

from tests.torch_suite.running import OURS, Listed, Suites


def test_ranks_that_are_threads(suites: Suites) -> None:
    """The case passes with torch's class and with ours."""
    found = suites.run(Listed("plain", 2, "Threads::test_threads_average"))
    assert found.outcome == "passed", found.text + found.log
    makers = {made.by.split(".")[0] for made in found.constructed}
    assert makers == ({"ddp_lab"} if suites.cls == OURS else {"torch"})
