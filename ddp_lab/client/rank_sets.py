"""Sets of ranks as people write them: `0,2-3` in, `ranks 0, 2–3` out."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["label_of", "label_of_ranges", "parse_ranks"]

_PART = re.compile(r"(\d+)(?:\s*[-–:]\s*(\d+))?$")


def label_of(ranks: Iterable[int]) -> str:
    """`"rank 0"`, `"ranks 0–3"` or `"ranks 0, 2–3"`."""
    return label_of_ranges(range(rank, rank + 1) for rank in sorted(ranks))


def label_of_ranges(ranges: Iterable[range]) -> str:
    """The same of ranges in order, however many ranks they hold."""
    joined: list[tuple[int, int]] = []
    for one in ranges:
        if joined and one.start == joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], one.stop - 1)
        else:
            joined.append((one.start, one.stop - 1))
    parts = [f"{first}–{last}" if last > first else f"{first}" for first, last in joined]
    return f"rank{'' if len(joined) == 1 and joined[0][0] == joined[0][1] else 's'} {', '.join(parts)}"


def parse_ranks(text: str) -> list[int]:
    """The ranks that `text` names: numbers and ranges that include both ends, separated by commas.

    Raises:
        ValueError: the text is not of that form.

    Example:
        parse_ranks("0,2-3")    # [0, 2, 3]
    """
    ranks: set[int] = set()
    for part in text.strip("[] ").split(","):
        match = _PART.match(part.strip())
        if match is None:
            raise ValueError(f"{text!r} does not name ranks: write numbers and ranges, for example 0,2-3")
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if last < first:
            raise ValueError(f"{text!r}: the range {part.strip()} ends before it begins")
        ranks.update(range(first, last + 1))
    return sorted(ranks)
