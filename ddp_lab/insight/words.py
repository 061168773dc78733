"""Numbers with units, and lists, as they stand in sentences."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["binary_size", "counted", "duration", "enumeration", "ms", "names", "rate", "size", "step_range"]


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
    """Bytes in the largest unit that fits (powers of 1,000)."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def binary_size(count: float) -> str:
    """Bytes in the largest unit that fits (powers of 1,024)."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count:.0f} B"


def rate(gb_s: float) -> str:
    """GB/s (10⁹ bytes), below 0.01 in the largest unit that fits: as the dashboard's table has it."""
    return f"{gb_s:.3g} GB/s" if gb_s >= 0.01 else f"{size(1e9 * gb_s)}/s"


def counted(count: int, noun: str) -> str:
    """``"1 element"``, ``"2,464 elements"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def enumeration(parts: Sequence[str]) -> str:
    """Parts with commas, and "and" before the last."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def names(found: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = len(found) - most
    return ", ".join(found[:most]) + (f" and {more} more" if more > 0 else "")


def step_range(numbers: Sequence[int]) -> str:
    """``"step 5"``, ``"steps 5–1,099"``, or with gaps ``"100 of steps 5–1,099"``; ascending numbers."""
    if len(numbers) == 1:
        return f"step {numbers[0]:,}"
    first, last = numbers[0], numbers[-1]
    gaps = "" if last - first + 1 == len(numbers) else f"{len(numbers):,} of "
    return f"{gaps}steps {first:,}–{last:,}"
