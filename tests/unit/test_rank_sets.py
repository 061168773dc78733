"""Sets of ranks as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.formatting import label_of, parse_ranks


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", [0]), ("0,2-3", [0, 2, 3]), ("3, 1", [1, 3]), ("[0-2]", [0, 1, 2]), ("1-1", [1])]
)
def test_ranks_are_parsed(text: str, ranks: list[int]) -> None:
    """Numbers and ranges that include both ends, sorted."""
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "0,", "1-", "-1", "3-1", "0.5"])
def test_what_names_no_ranks_is_refused(text: str) -> None:
    """The error repeats the text and says what is wrong with it."""
    with pytest.raises(ValueError, match=r"ranks|range"):
        parse_ranks(text)


def test_labels() -> None:
    """One rank by its number, neighbours as a range."""
    assert [label_of(ranks) for ranks in ([0], [1, 0], [0, 2, 3, 5])] == ["rank 0", "ranks 0–1", "ranks 0, 2–3, 5"]


@given(st.sets(st.integers(0, 40), min_size=1))
def test_labels_can_be_parsed(ranks: set[int]) -> None:
    """What is shown names the same ranks when typed in."""
    assert parse_ranks(label_of(ranks).split(" ", 1)[1]) == sorted(ranks)
