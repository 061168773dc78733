"""Numbers with units, lists and sets of ranks, formatted for sentences; ranks as users write them: `0,2-3`."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<=[\]\d]) #\d+$")
_PART = re.compile(r"(\d+)(?:\s*[-–:]\s*(\d+))?$")


def ms(value: float | None) -> str:
    """Milliseconds with two decimals below 1, one above; microseconds where these are 0; ``"? ms"`` for None."""
    if value is None:
        return "? ms"
    if 0 < abs(value) < 0.005:
        return f"{value * 1000:.1f} µs"
    return f"{value:.2f} ms" if abs(value) < 1 else f"{value:.1f} ms"


def duration(seconds: float) -> str:
    """``"0.4 s"``, ``"61 s"``, ``"2 min 14 s"``, ``"3 h 5 min"``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(count: float) -> str:
    """Bytes in the largest unit that fits (powers of 1,024, as in `bucket_cap_mb`), as the dashboard has them."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            digits = 2 if count < 10 * factor else 1
            return f"{count / factor:.{digits}f}".rstrip("0").removesuffix(".") + f" {unit}"
    return f"{count:.0f} B"


def rate(gb_s: float) -> str:
    """GB/s (10⁹ bytes), below 0.01 in the largest unit that fits."""
    units = (("GB/s", 0.01, 1.0), ("MB/s", 1e-3, 1e-3), ("kB/s", 1e-6, 1e-6), ("B/s", 0.0, 1e-9))
    return next(f"{gb_s / factor:.3g} {unit}" for unit, least, factor in units if gb_s >= least)


def counted(count: int, noun: str) -> str:
    """``"1 element"``, ``"2,464 elements"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ordinal(count: int) -> str:
    """``"1st"``, ``"2nd"``, ``"11th"``."""
    ending = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count:,}{ending}"


def enumeration(parts: Sequence[str]) -> str:
    """Parts with commas, and "and" before the last."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def names(found: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = len(found) - most
    return ", ".join(found[:most]) + (f" and {more} more" if more > 0 else "")


def ending(name: str, most: int = 16) -> str:
    """A name with room for so many characters: the end of a module's name says more than its begin."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def step_range(numbers: Sequence[int]) -> str:
    """``"step 5"``, ``"steps 5–1,099"``, or with gaps ``"100 of steps 5–1,099"``; ascending numbers."""
    if len(numbers) == 1:
        return f"step {numbers[0]:,}"
    first, last = numbers[0], numbers[-1]
    gaps = "" if last - first + 1 == len(numbers) else f"{len(numbers):,} of "
    return f"{gaps}steps {first:,}–{last:,}"


def line_name(file: str, line: int | None) -> str:
    """A line of a program: ``"%%distributed [3] line 4"`` of the file ``"<cell %%distributed [3]>"``, else
    ``"train.py:4"``. A number that a rank gives to a second cell of a label is left out: another rank's may differ."""
    return f"{_NUMBER.sub('', file[6:-1])} line {line}" if file.startswith("<cell ") else f"{file}:{line}"


def label_of(ranks: Iterable[int]) -> str:
    """`"rank 0"`, `"ranks 0–3"` or `"ranks 0, 2–3"`."""
    return label_of_ranges(range(rank, rank + 1) for rank in sorted(ranks))


def label_of_ranges(ranges: Iterable[range]) -> str:
    """The same for ordered ranges of any number of ranks."""
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
        >>> parse_ranks("0,2-3")
        [0, 2, 3]
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


def exit_words(code: int) -> str:
    """An exit code as subprocess counts it: ``ended with exit code 1``, ``was killed by SIGKILL (signal 9)``."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a signal"
    return f"was killed by {name} (signal {-code})"
