"""tqdm's progress bars as ranks print them, and one line for the same bar of several ranks.

[Note: the same bar]
A bar is identified by its initial description and total: ranks whose bars began alike share a line, even if their
descriptions change later. Numbers that differ are shown as ``min..max``; times and rate are those of the slowest rank,
because the others will wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .terminal import Line, plain

__all__ = ["Bar", "Began", "bar_of", "began_as", "merged", "parse"]

Began = tuple[str, str]

_COUNT = r"\d[\d.,]*[kMGTPEZY]?"
_TIMES = r"\[(?P<elapsed>[^<,\]]+)(?:<(?P<remaining>[^,\]]+))?, (?P<rate>[^,\]]+)(?P<postfix>(?:, .*)?)\]\s*$"
_WITH_TOTAL = re.compile(
    rf"(?P<desc>.*?)\s*(?P<percent>\d+)%\|(?P<bar>.*)\|\s*(?P<n>{_COUNT})/(?P<total>{_COUNT})\s*{_TIMES}"
)
_WITHOUT_TOTAL = re.compile(rf"(?P<desc>.*?)(?P<n>{_COUNT})(?P<unit> ?[^\d\s\[\]]*) {_TIMES}")
_NUMBER = re.compile(r"(?<!\w)-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|\d+(?:\.\d+)?")
_LONGEST = 1_000  # characters; a longer line is no bar
_SCALES = {letter: 1000.0**power for power, letter in enumerate("kMGTPEZY", start=1)}


@dataclass(frozen=True)
class Bar:
    """One state of one rank's bar.

    Attributes:
        text: as the rank printed it.
        desc: the description, with what separates it from the rest.
        n: how far it is.
        n_text: `n` as it was printed.
        total: as it was printed; "" if the bar has none.
        unit: what is counted, of a bar without a total.
        width: of the drawn bar, in characters.
        elapsed: printed time since it began.
        remaining: printed time that it expects to take; "" without a total.
        rate: how fast it is.
        postfix: what follows, with its comma.
    """

    text: str
    desc: str
    n: float
    n_text: str
    total: str
    unit: str
    width: int
    elapsed: str
    remaining: str
    rate: str
    postfix: str


def parse(text: str) -> Bar | None:
    """The bar that `text` shows; None if it is not one of tqdm's own format."""
    printed = plain(text).rstrip() if len(text) <= _LONGEST else ""
    if not printed.endswith("]"):
        return None
    found = _WITH_TOTAL.match(printed) or _WITHOUT_TOTAL.match(printed)
    if found is None:
        return None
    parts = found.groupdict()
    n = _value(parts["n"])
    if n is None:
        return None
    return Bar(
        text=text.rstrip(),
        desc=parts["desc"],
        n=n,
        n_text=parts["n"],
        total=parts.get("total") or "",
        unit=parts.get("unit") or "",
        width=len(parts.get("bar") or ""),
        elapsed=parts["elapsed"],
        remaining=parts["remaining"] or "",
        rate=parts["rate"],
        postfix=parts["postfix"],
    )


def bar_of(line: Line) -> Bar | None:
    """The bar that a line shows now; None if it shows none."""
    return parse(line.text) if line.rewritten else None


def began_as(line: Line, bar: Bar) -> Began:
    """What a line's bar is known by. See [Note: the same bar]."""
    first = parse(line.first) or bar
    return (first.desc, first.total)


def merged(bars: Mapping[int, Bar]) -> str:
    """One line for the same bar of several ranks."""
    states = [bars[rank] for rank in sorted(bars)]
    if len({plain(each.text) for each in states}) == 1:
        return states[0].text
    last, first = min(states, key=lambda each: each.n), max(states, key=lambda each: each.n)
    count = last.n_text if last.n == first.n else f"{last.n_text}..{first.n_text}"
    desc, postfix = _alike([each.desc for each in states]), _alike([each.postfix for each in states])
    if not last.total:
        return f"{desc}{count}{last.unit} [{last.elapsed}, {last.rate}{postfix}]"
    total = _value(last.total) or 1.0
    done, most = min(1.0, last.n / total), min(1.0, first.n / total)
    drawn = _drawn(done, most, last.width)
    space = " " if desc else ""
    times = f"[{last.elapsed}<{last.remaining}, {last.rate}{postfix}]"
    return f"{desc}{space}{100 * done:3.0f}%|{drawn}| {count}/{last.total} {times}"


def _drawn(low: float, high: float, width: int) -> str:
    """A bar that all ranks have filled up to `low`, and one of them up to `high`."""
    whole, some = int(low * width), int(high * width)
    return ("█" * whole + "▒" * (some - whole)).ljust(width)


def _alike(texts: Sequence[str]) -> str:
    """`texts` as one: numbers that differ as ``min..max``, "…" where more than numbers differs."""
    if len(set(texts)) == 1:
        return texts[0]
    shapes = {_NUMBER.sub("#", text) for text in texts}
    if len(shapes) > 1:
        return ", …" if texts[0].startswith(", ") else "…:"
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    ranges = iter([_range(column) for column in columns])
    return _NUMBER.sub(lambda _: next(ranges), texts[0])


def _range(numbers: Sequence[str]) -> str:
    low, high = min(numbers, key=float), max(numbers, key=float)
    return low if float(low) == float(high) else f"{low}..{high}"


def _value(text: str) -> float | None:
    scale = _SCALES.get(text[-1], 1.0)
    try:
        return float(text.rstrip("kMGTPEZY").replace(",", "")) * scale
    except ValueError:
        return None
