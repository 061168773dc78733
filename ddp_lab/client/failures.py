"""Which rank failed first, which ones only followed, and how to say it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import CellError, RankFailure
from .rank_sets import label_of

__all__ = [
    "LOST",
    "announcement",
    "cell_error",
    "failure_of",
    "in_order",
    "interrupt_report",
    "lost",
    "timed_out",
    "timeout_error",
]

LOST = "RankLost"
TIMEOUT = "Timeout"
_LONGEST_MESSAGE = 300
_NEW_RANKS = "`%cluster restart` gives new ranks"
_HELP = "`%cluster interrupt` tries again, `%cluster restart` replaces the processes"

# What a collective of torch says when its peers are gone or were freed (Gloo, NCCL, TCPStore).
_COMMUNICATION = re.compile(
    r"gloo|connection (?:closed|reset|refused)|broken pipe|socket closed|nccl|process ?group|\bstore\b|"
    r"aborted|freed|timed out waiting",
    re.IGNORECASE,
)
_SOURCE_PLACE = re.compile(r"^\[[^\]\s]+:\d+\]\s*")
_ADDRESS = re.compile(r" \[[\d.:a-f]+\]:\d+")
_COMMUNICATION_NAMES = {"DistBackendError", "DistNetworkError", "DistStoreError", "RankFreedError"}


def failure_of(rank: int, report: Mapping[str, Any]) -> RankFailure:
    """The failure that rank `rank` reported (see `ddp_lab.engine.cell.run`)."""
    return RankFailure(
        rank=rank,
        name=str(report["name"]),
        message=str(report["message"]),
        traceback="\n".join(report["traceback"]),
        time_ns=int(report["time_ns"]),
        consequence=bool(report["consequence"]),
    )


def lost(rank: int, why: str) -> RankFailure:
    """The failure of a rank whose process is gone: the cause of whatever its peers report."""
    return RankFailure(rank, LOST, why, "", 0, False)


def timed_out(rank: int, seconds: float, time_ns: int) -> RankFailure:
    """The failure of a rank that did not end in time and does not answer the interrupt."""
    return RankFailure(rank, TIMEOUT, f"did not end within {seconds:g} s", "", time_ns, False)


def in_order(failures: Sequence[RankFailure]) -> dict[int, RankFailure]:
    """Failures by rank: causes first, each group by time; later communication errors become consequences."""
    by_time = sorted(failures, key=lambda each: (each.consequence, each.time_ns))
    marked = by_time[:1] + [
        each if each.consequence or not _is_communication(each) else replace(each, consequence=True)
        for each in by_time[1:]
    ]
    if marked and _is_communication(marked[0]):
        # The clocks of two ranks that fail within a microsecond do not tell who was first; what failed does.
        causes = [each for each in marked[1:] if not _is_communication(each) and not each.consequence]
        if causes and not marked[0].consequence:
            marked = [*causes, replace(marked[0], consequence=True), *(m for m in marked[1:] if m not in causes)]
    marked.sort(key=lambda each: each.consequence)
    return {each.rank: each for each in marked}


def cell_error(failures: Mapping[int, RankFailure], label: str) -> CellError:
    """The error of a cell with these failures.

    Args:
        failures: rank -> failure, the first cause first (see `in_order`).
        label: the cell's name.
    """
    first = next(iter(failures.values()))
    same = [each for each in failures.values() if _same(each, first)]
    who = label_of(each.rank for each in same)
    if first.name == LOST:
        message = f"{who} {_headline(first)}"
        lines = [f"\x1b[1;31m{message}\x1b[0m during cell {label}"]
        lines.append(_NEW_RANKS)
    else:
        message = f"{who} failed: {_headline(first)}"
        lines = [f"\x1b[1;31m{who} failed\x1b[0m in cell {label}"]
        lines += first.traceback.splitlines() or [_headline(first)]
    lines += _folded([each for each in failures.values() if each not in same], first)
    return CellError(message, failures, "\n".join(lines))


def timeout_error(failures: Mapping[int, RankFailure], ranks: Sequence[int], label: str, seconds: float) -> CellError:
    """The error of a cell whose `ranks` had not ended after `seconds` and were interrupted."""
    message = f"{label_of(ranks)} did not end within {seconds:g} s"
    lines = [f"\x1b[1;31m{message}\x1b[0m in cell {label} and {'was' if len(ranks) == 1 else 'were'} interrupted"]
    silent = [rank for rank in ranks if rank in failures and failures[rank].name == TIMEOUT]
    lines += _where(failures, silent)
    return CellError(message, failures, "\n".join(lines))


def announcement(failure: RankFailure, others: Sequence[int]) -> str:
    """One line for a cell that goes on after a rank failed."""
    verb = "go on" if len(others) > 1 else "goes on"
    return f"✗ {_headline(failure)} ({label_of(others)} {verb}; interrupt the cell to stop)"


def interrupt_report(failures: Mapping[int, RankFailure], silent: Sequence[int], label: str) -> list[str]:
    """What a notebook shows for a cell that the user interrupted: where each rank was."""
    lines = [f"\x1b[1;31mKeyboardInterrupt\x1b[0m: cell {label} was interrupted"]
    return lines + _where(failures, silent)


def _where(failures: Mapping[int, RankFailure], silent: Sequence[int]) -> list[str]:
    """Where interrupted ranks were, equal places once, with the cell's own lines."""
    lines: list[str] = []
    places: dict[str, list[int]] = {}
    for rank in sorted(failures):
        failure = failures[rank]
        if failure.name == TIMEOUT:
            continue
        if failure.name == "KeyboardInterrupt" or failure.consequence or _is_communication(failure):
            places.setdefault(_cell_lines_of(failure.traceback), []).append(rank)
        else:
            lines.append(f"rank {rank} failed: {_headline(failure)}")
    if not failures and not silent:
        lines.append("it ended on every rank without an error")
    for place, ranks in places.items():
        verb = "was" if len(ranks) == 1 else "were"
        lines.append(f"{label_of(ranks)} {verb} " + ("here:" if place else "outside the cell's own lines"))
        lines += place.splitlines()
    if silent:
        lines.append(f"\x1b[31m{label_of(silent)} did not answer the interrupt\x1b[0m: {_HELP}")
    return lines


def _is_communication(failure: RankFailure) -> bool:
    if failure.name in _COMMUNICATION_NAMES:
        return True
    return failure.name in ("RuntimeError", "KeyboardInterrupt") and bool(_COMMUNICATION.search(failure.message))


def _same(one: RankFailure, other: RankFailure) -> bool:
    return (one.name, one.message, one.consequence) == (other.name, other.message, other.consequence)


def _headline(failure: RankFailure) -> str:
    """Name and first line of the message; of a collective's error, what happened without the C++ file name."""
    lines = failure.message.strip().splitlines()
    text = lines[0] if lines else ""
    if _is_communication(failure):
        text = _ADDRESS.sub("", _SOURCE_PLACE.sub("", text).split(". ")[0])
    if len(text) > _LONGEST_MESSAGE:
        text = text[:_LONGEST_MESSAGE] + "…"
    if failure.name in (LOST, TIMEOUT):
        return text
    return f"{failure.name}: {text}" if text else failure.name


def _folded(failures: Sequence[RankFailure], first: RankFailure) -> list[str]:
    """One line for the ranks that waited and say the same, one for each other failure."""
    lines = []
    freed: dict[str, list[int]] = {}
    for failure in failures:
        if failure.consequence:
            freed.setdefault(_headline(failure), []).append(failure.rank)
        else:
            later = (failure.time_ns - first.time_ns) / 1e6 if first.time_ns else 0.0
            when = f" {later:.0f} ms later" if later >= 1 else " too"
            lines.append(f"rank {failure.rank} failed{when}: {_headline(failure)}")
    for headline, ranks in freed.items():
        verb = "was" if len(ranks) == 1 else "were"
        lines.append(f"{label_of(ranks)} waited for rank {first.rank} and {verb} freed ({headline})")
    return lines


_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def _cell_lines_of(traceback: str) -> str:
    """The frames of a rendered traceback that are in a cell, the innermost cell's last; "" if there is none."""
    frames = [frame for frame in traceback.split("\n\n") if _ANSI.sub("", frame).lstrip("-\n ").find("Cell ") >= 0]
    kept = []
    for frame in frames:
        lines = frame.splitlines()
        first = next((n for n, line in enumerate(lines) if _ANSI.sub("", line).startswith("Cell ")), None)
        if first is not None:
            kept += lines[first:]
    return "\n".join(kept)
