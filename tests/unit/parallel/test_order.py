"""out_of_place: how far the order of arrival has drifted from that of the buckets."""

from __future__ import annotations

import pytest

from ddp_lab.parallel.core.buckets import OrderFollower, out_of_place


@pytest.mark.parametrize(
    ("arrived", "share"),
    [([0, 1, 2, 3], 0.0), ([1, 2, 3, 0], 0.25), ([3, 0, 1, 2], 0.25), ([3, 2, 1, 0], 0.75), ([], 0.0)],
)
def test_the_share_that_has_to_move(arrived: list[int], share: float) -> None:
    """One late gradient counts once, however late; a reversed order leaves one in place."""
    assert out_of_place(arrived, sorted(arrived)) == share


def test_arguments_are_checked() -> None:
    """A threshold that is no share, or a period below one, raises ValueError."""
    with pytest.raises(ValueError, match="threshold"):
        OrderFollower(1.5, 20)
    with pytest.raises(ValueError, match="every"):
        OrderFollower(0.5, 0)
