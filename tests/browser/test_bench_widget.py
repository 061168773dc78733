"""The benchmark of the dashboard in the browser."""

from __future__ import annotations

import pytest

from tests.benchmarks import widget


@pytest.mark.soak
@pytest.mark.usefixtures("nothing_shared")
@pytest.mark.parametrize("senders", [0, 4])
def test_updates_are_counted(senders: int) -> None:
    """Of ranks that train, and of replayed ones: updates came, and pictures were drawn."""
    found = widget.measure(ranks=2, buckets=4, seconds=5.0, senders=senders)
    assert found["updates_per_second"] > 0
    assert found["shape"][0] >= (senders or 2)
