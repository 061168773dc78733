"""Monitors gradients while a model trains: norms before and after averaging, and the source of NaN or Inf.

See [Note: watching gradients] in csrc/reduce/gradient_watch.h. Here, at the end of a monitored backward, the ranks
gather some numbers for each bucket; rank 0 of the group reports them to the timeline, and every rank derives the same
message.
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ... import recording
from ...formatting import label_of
from ..core import process_groups
from ..core.synchronizer import GradientSynchronizer

__all__ = ["GradientNorms", "GradientWatch", "NonFinite"]

_HEAD = 4  # position in the order of readiness, parameter, whether NaN, number of parameters


@dataclass(frozen=True)
class NonFinite:
    """The first NaN or Inf.

    Attributes:
        kind: ``"NaN"`` or ``"Inf"``.
        parameter: qualified name of the first parameter in the order of readiness whose gradient contains one; None:
            all gradients were finite, but their average is not.
        rank: the rank of that gradient.
        ranks: all ranks that had one.
        parameters: how many parameters had one on `rank`.
    """

    kind: str
    parameter: str | None
    rank: int
    ranks: tuple[int, ...]
    parameters: int


@dataclass(frozen=True)
class GradientNorms:
    """The gradients of one step, the same on all ranks.

    Attributes:
        step: the model's synchronised backward.
        before: by rank of the group, by bucket: Euclidean norm of that rank's own gradients; NaN if not sent.
        after: by bucket: norm of the average.
        nonfinite: None if all is finite.
        seconds: cost of monitoring this step on this rank, including the exchange.
    """

    step: int
    before: tuple[tuple[float, ...], ...]
    after: tuple[float, ...]
    nonfinite: NonFinite | None
    seconds: float


class GradientWatch:
    """The result of `watch_gradients`: `remove` ends it.

    Attributes:
        last: the newest monitored step; None before the first.
        steps: number of monitored steps.
        seconds: their total cost on this rank's host.
        nonfinite: the reaction to NaN or Inf.
    """

    def __init__(self, sync: GradientSynchronizer, every: int, nonfinite: Literal["warn", "raise"]) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if nonfinite not in ("warn", "raise"):
            raise ValueError(f'nonfinite must be "warn" or "raise", got {nonfinite!r}')
        self.last: GradientNorms | None = None
        self.steps = 0
        self.seconds = 0.0
        self.nonfinite: Literal["warn", "raise"] = nonfinite
        self._every = every
        self._sync = weakref.ref(sync)  # whose reducer holds this watch
        self.attach(sync)

    @property
    def every(self) -> int:
        """Interval in steps; 0 after `remove`."""
        return self._every

    def attach(self, sync: GradientSynchronizer) -> None:
        """Monitors the model's reducer: a new one after the model has changed."""
        if self._every:
            sync.reducer.watch_gradients(self._every, self._told)

    def remove(self) -> None:
        """Ends the monitoring."""
        self._every = 0
        sync = self._sync()
        if sync is not None:
            sync.reducer.watch_gradients(0, None)

    def _told(self, step: int, found: tuple[list[float], list[float], int, int, bool, int, int]) -> str:
        """Called by C++ at the end of a monitored backward, which raises the text that this returns."""
        begin = time.monotonic_ns()
        sync = self._sync()
        if sync is None:  # it is being destroyed
            return ""
        before, after, parameter, position, is_nan, count, host_ns = found
        mine = [float(position), float(parameter), float(is_nan), float(count), *before, *after]
        own = torch.tensor(mine, dtype=torch.float64, device=sync.device)
        rows = process_groups.gather_numbers(own, sync.group)
        nonfinite = _first(rows, sync)
        spent = (host_ns + time.monotonic_ns() - begin) / 1e9
        self.last = GradientNorms(
            step, tuple(tuple(row[_HEAD : _HEAD + len(after)]) for row in rows), tuple(after), nonfinite, spent
        )
        self.steps += 1
        self.seconds += spent
        if sync.group.rank() == 0:
            recording.describe_fleeting(_description(self.last, sync))
        if nonfinite is None:
            return ""
        text = _words(step, nonfinite)
        if self.nonfinite == "raise":
            return text
        warnings.warn(text, stacklevel=2)
        return ""


def _first(rows: list[list[float]], sync: GradientSynchronizer) -> NonFinite | None:
    ranks = process_groups.global_ranks(sync.group)
    bad = [(row[0], rank, row) for rank, row in zip(ranks, rows, strict=True) if row[0] >= 0]
    if bad:
        _, rank, row = min(bad)
        kind = "NaN" if row[2] else "Inf"
        return NonFinite(kind, sync.trained.names[int(row[1])], rank, tuple(one[1] for one in bad), int(row[3]))
    buckets = (len(rows[0]) - _HEAD) // 2
    for bucket in range(_HEAD, _HEAD + buckets):
        sent = any(math.isfinite(row[bucket]) for row in rows)
        averages = [row[bucket + buckets] for row in rows]
        if sent and not all(map(math.isfinite, averages)):
            return NonFinite("NaN" if any(map(math.isnan, averages)) else "Inf", None, ranks[0], (), 0)
    return None


def _description(found: GradientNorms, sync: GradientSynchronizer) -> dict[str, Any]:
    bad = found.nonfinite
    return {
        "type": "gradients",
        "reducer": sync.model_id,
        "step": found.step,
        "generation": sync.reducer.generation(),
        "ranks": process_groups.global_ranks(sync.group),
        "before": [[_short(norm) for norm in norms] for norms in found.before],
        "after": [_short(norm) for norm in found.after],
        "nonfinite": None if bad is None else {"kind": bad.kind, "parameter": bad.parameter, "rank": bad.rank},
        "seconds": found.seconds,
    }


def _short(norm: float) -> float | None:
    return float(f"{norm:.7g}") if math.isfinite(norm) else None


def _words(step: int, found: NonFinite) -> str:
    if found.parameter is None:
        return (
            f"Gradients are not finite in step {step}: each rank's own were, but their average is not. The sum over "
            "the ranks, or the comm hook, overflowed: lower the loss scale, or reduce in a wider dtype."
        )
    others = [rank for rank in found.ranks if rank != found.rank]
    also = f"; {label_of(others)} had some too" if others else "; those of the other ranks were finite"
    more = f" and {found.parameters - 1} more" if found.parameters > 1 else ""
    return (
        f"Gradients are not finite in step {step}: {found.kind} first in that of '{found.parameter}' (the first to be "
        f"ready{more}) on rank {found.rank}{also}. Check that rank's batch and loss; averaging spread it to all ranks."
    )
