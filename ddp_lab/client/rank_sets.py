"""Sets of ranks as people write them: `0,2-3` in, `ranks 0, 2–3` out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

__all__ = ["label_of", "parse_ranks"]

_PART = re.compile(r"(\d+)(?:\s*[-–:]\s*(\d+))?$")


def label_of(ranks: Iterable[int]) -> str:
    """`"rank 0"`, `"ranks 0–3"` or `"ranks 0, 2–3"`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    parts = []
    for _, run in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(f"{members[0]}–{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return "ranks " + ", ".join(parts)


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
