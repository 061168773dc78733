"""Messages of ranks in display order, without lines that arrive faster than anyone can read.

Lines that a board can't show need not be placed: of many lines that a rank has printed since the last refresh, only the
first and the last ones are passed on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Message", "in_turns", "thinned"]

Message = tuple[int, str, Mapping[str, Any]]  # rank, IOPub type, content


def in_turns(messages: Iterable[Message]) -> list[Message]:
    """Every rank's first message, then every rank's second, and so on: small differences in time mean nothing, and
    equal outputs become neighbours."""
    counts: Counter[int] = Counter()
    turns = []
    for rank, kind, content in messages:
        counts[rank] += 1
        turns.append((counts[rank], rank, kind, content))
    return [turn[1:] for turn in sorted(turns, key=lambda turn: turn[:2])]


def thinned(messages: Sequence[Message], head: int, tail: int) -> Iterator[tuple[int, str, Mapping[str, Any], int]]:
    """The messages, without the middle of each stream that has more than `head` and `tail` lines in them.

    Yields:
        Rank, type and content of each message, and how many lines after its beginning were taken out of it.
    """
    totals: Counter[tuple[int, str]] = Counter()
    for rank, kind, content in messages:
        if kind == "stream":
            totals[rank, content["name"]] += content["text"].count("\n")
    seen: Counter[tuple[int, str]] = Counter()
    for rank, kind, content in messages:
        key = (rank, str(content.get("name")))
        if kind != "stream" or totals[key] <= head + tail:
            yield rank, kind, content, 0
            continue
        lines = content["text"].split("\n")
        first = max(1, head - seen[key])  # the first one ends a line that may have begun before
        last = max(first, min(totals[key] - tail - seen[key], len(lines) - 1))
        seen[key] += len(lines) - 1
        if first >= last:
            yield rank, kind, content, 0
            continue
        yield rank, kind, {**content, "text": "\n".join([*lines[:first], ""])}, last - first
        yield rank, kind, {**content, "text": "\n".join(lines[last:])}, 0
