"""Noise checks of benchmark results: was the machine otherwise idle, and do the sets of processes agree?

[Note: too noisy to tell]
A result is the median over fresh sets of processes. A median is valid as long as most of its values are, so there are
two checks, and a result that fails one of them is not shown as a number:

- Did most of the sets have the machine to themselves? While a set runs, `Watch` measures the CPU time of the whole
  machine (user, nice, system and the time stolen by a hypervisor; not that of interrupts, which a benchmark of sockets
  causes itself) minus that of this process and its children. Load averages and "pressure" are not suitable: both count
  the benchmark's own ranks, especially if there are more ranks than processors. From `OTHERS` on, a set is disturbed.
- Do the sets agree? The `interval` contains the median of infinitely many sets with a probability of about 90 %,
  for any distribution; it does not assume a normal distribution, which times never have. For up to seven sets it is
  their range. If it reaches more than the tolerance (20 %) to each side, the result is too noisy. With fewer than
  three sets, only the first check applies.

Neither check sees another virtual machine that slows all sets alike without taking CPU time from this one (memory
bandwidth, clock rate). Reference lines (a copy, torch against itself) show that.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import comb
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = [
    "EXIT_CODE",
    "OTHERS",
    "TOLERANCE",
    "Figure",
    "Judge",
    "Watch",
    "count",
    "epilogue",
    "exit_code",
    "figure",
    "fresh_sets",
    "interval",
    "of_sets",
    "shown",
    "spread",
    "told",
]

Figure = dict[str, Any]
Judge = Callable[..., Figure]
"""`figure` for sets of processes and a tolerance that are the same for all."""

OTHERS = 0.05
"""Part of all processors' time; a set of processes beside which others took more is disturbed."""
TOLERANCE = 0.2
"""By which part of itself (or of the given scale) a figure may be uncertain to each side."""
EXIT_CODE = 4
"""Of a benchmark all of whose figures were too noisy."""

_STAT = Path("/proc/stat")
_COVERAGE = 0.9
_FEWEST = 3  # sets whose spread says something


def _processor_time() -> tuple[float, float] | None:
    """Seconds of all processors since the machine began: worked (without interrupts), and in all; None if untold."""
    try:
        first, *fields = _STAT.read_text().splitlines()[0].split()
    except OSError:
        return None
    if first != "cpu" or len(fields) < 8:
        return None
    ticks = [int(field) for field in fields[:8]]  # user nice system idle iowait irq softirq steal
    tick = float(os.sysconf("SC_CLK_TCK"))
    return (sum(ticks[:3]) + ticks[7]) / tick, sum(ticks) / tick


class Watch:
    """Measures which part of the machine other programs take while its block runs.

    Attributes:
        others: part of all processors' time, from 0 to 1; None if the system does not tell. Set at the block's end,
            when all children of this process that ran in it must have been waited for.
    """

    def __init__(self) -> None:
        self.others: float | None = None

    def __enter__(self) -> Watch:
        self._machine, self._own = _processor_time(), sum(os.times()[:4])
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        machine, own = _processor_time(), sum(os.times()[:4])
        if machine is None or self._machine is None or machine[1] <= self._machine[1]:
            return
        worked, passed = machine[0] - self._machine[0], machine[1] - self._machine[1]
        self.others = min(1.0, max(0.0, (worked - (own - self._own)) / passed))


def of_sets(sets: int, start: Callable[[int], Any]) -> tuple[list[Any], list[float | None]]:
    """Runs sets of processes one after the other.

    Args:
        sets: how many.
        start: runs the set of a number; it waits for every process that it begins, as `Watch` asks.

    Returns:
        What each returned, and what other programs took beside it.
    """
    found, others = [], []
    for number in range(sets):
        with Watch() as watch:
            found.append(start(number))
        others.append(watch.others)
    return found, others


def fresh_sets(count: int) -> str:
    """Returns how many sets of processes there were, in words."""
    return f"{count} fresh set{'' if count == 1 else 's'} of processes"


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Values between which the median of all sets lies; see [Note: too noisy to tell].

    Drops as many of the least and of the greatest samples as leaves 90 % of coverage; of up to seven none.
    """
    ordered, sets = sorted(samples), len(samples)
    dropped, beyond = 0, 2 / 2**sets  # probability that the median lies outside of what is left
    while True:
        beyond += 2 * comb(sets, dropped + 1) / 2**sets
        if beyond > 1 - _COVERAGE:
            return ordered[dropped], ordered[sets - 1 - dropped]
        dropped += 1


def figure(
    samples: Sequence[float],
    others: Sequence[float | None] = (),
    *,
    tolerance: float = TOLERANCE,
    scale: float | None = None,
) -> Figure:
    """Judges one figure.

    Args:
        samples: its value in each set of processes, at least one.
        others: of each set, the part of the machine that other programs took (`Watch.others`).
        tolerance: how far its uncertainty may reach to each side, as a part of the scale.
        scale: what to compare the uncertainty with; None for the figure itself. A difference of two times, which may
            be about 0, needs one.

    Returns:
        ``median``, ``low`` and ``high`` (the interval), ``samples``, ``noisy`` and ``why`` (short, ``""`` if not).
    """
    middle = statistics.median(samples)
    low, high = interval(samples)
    reach = (high - low) / 2 / max(abs(middle if scale is None else scale), 1e-12)
    disturbed = [one for one in others if one is not None and one > OTHERS]
    why = ""
    if disturbed and 2 * len(disturbed) >= len(others):
        why = f"others: {100 * statistics.median(disturbed):.0f} %"
    elif len(samples) >= _FEWEST and reach > tolerance:
        why = f"±{100 * reach:.0f} %"
    return {"median": middle, "low": low, "high": high, "samples": list(samples), "noisy": bool(why), "why": why}


def shown(one: Figure, text: str, keep: bool) -> str:
    """Returns the text of a figure, or that it was too noisy and why; kept all the same it has a question mark."""
    if not one["noisy"]:
        return text
    return f"{text}?" if keep else f"too noisy ({one['why']})"


def spread(one: Mapping[str, Any], digits: int) -> str:
    """Returns a figure's median, and its interval where there is one."""
    middle, low, high = (f"{one[end]:.{digits}f}" for end in ("median", "low", "high"))
    return middle if low == high else f"{middle} ({low} .. {high})"


def told(one: Figure | None, digits: int, keep: bool) -> str:
    """Returns the `spread` of a figure as `shown`, a dash where there is none."""
    return "-" if one is None else shown(one, spread(one, digits), keep)


def _figures(tree: Any) -> Iterator[Figure]:
    if isinstance(tree, dict):
        if "noisy" in tree:
            yield tree
        for below in tree.values():
            yield from _figures(below)
    elif isinstance(tree, list):
        for below in tree:
            yield from _figures(below)


def count(result: Any) -> tuple[int, int]:
    """Returns how many figures anywhere in a result are too noisy, and how many there are."""
    figures = list(_figures(result))
    return sum(one["noisy"] for one in figures), len(figures)


def epilogue(result: Any, keep: bool) -> list[str]:
    """Lines below a table: how many figures anywhere in a result were too noisy, why, and what to do about it."""
    reasons = [one["why"] for one in _figures(result) if one["noisy"]]
    if not reasons:
        return []
    lines = [f"{len(reasons)} of {count(result)[1]} values were too noisy" + (" (with a question mark)" * keep)]
    if any(why.startswith("others") for why in reasons):
        lines.append(f"  others: share of CPU time used by other programs (more than {OTHERS:.0%})")
    if not all(why.startswith("others") for why in reasons):
        lines.append("  ±: spread of the results of fresh processes, or of parts of the run")
    lines.append(
        "Run the benchmark alone on a quiet machine, or longer" + ("" if keep else "; --keep-noise shows them anyway")
    )
    return lines


def exit_code(result: Any, keep: bool) -> int:
    """Returns 0, or `EXIT_CODE` if there are figures in a result, all are too noisy, and none is to be shown."""
    noisy, figures = count(result)
    return EXIT_CODE if not keep and 0 < figures == noisy else 0
