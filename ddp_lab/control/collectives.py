"""Collectives step by step on a cluster's ranks: their records, and how they are requested."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..analysis.collectives import ALGORITHMS, CollectiveRun, Holds, impossible, schedule
from ..errors import ClusterError
from ..formatting import ms, size
from ..output.board import SilentBoard
from ..protocol.entry_points import DEMONSTRATE

if TYPE_CHECKING:
    import pandas as pd

    from .ranks import Ranks


DEFAULT_BYTES = 65_536
_MOST_BYTES = 64 * 1024 * 1024
_MOST_RANKS = 16
_ELEMENT = 8  # bytes of a float64
_REPEATS = 6  # the first is not timed
_IDLE_SECONDS = 1.0


class ShownCollective(CollectiveRun):
    """A collective that was run step by step on a cluster's ranks; times are medians of five runs."""

    def table(self) -> pd.DataFrame:
        """Which rank holds which part: a row for each step (0: before the first), rank and part.

        Columns: ``step``, ``rank``, ``part``, ``contributions`` (ranks whose numbers are in it), ``sent_bytes`` (by the
        rank in the step), ``ms`` (of the step; NaN for step 0).
        """
        import pandas as pd

        rows = []
        for number in range(len(self.steps) + 1):
            step = self.steps[number - 1] if number else None
            for rank, parts in enumerate(self.begin if step is None else step.holds):
                sent, took = (0, float("nan")) if step is None else (step.sent(rank), step.ms)
                rows += [(number, rank, part, holders, sent, took) for part, holders in enumerate(parts)]
        names = ["step", "rank", "part", "contributions", "sent_bytes", "ms"]
        frame: pd.DataFrame = pd.DataFrame(rows, columns=names)
        return frame

    def __str__(self) -> str:
        title = f"{self.collective} by {self.algorithm} over {self.ranks} ranks, {size(self.bytes)} on each"
        if not self.steps:
            return f"{title}: nothing needs to be sent."
        count = f"{len(self.steps)} step{'s' if len(self.steps) > 1 else ''} (α each)"
        busiest = f"{size(self.busiest_bytes)} = {self.busiest_bytes / self.bytes:.3g} × buffer"
        return f"{title}: {count}, {busiest} from the busiest ranks (β), {ms(self.ms)}."

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the browser; holders as numbers with a bit for each rank."""
        steps = [
            {
                "transfers": [[one.source, one.target, list(one.parts), list(one.places)] for one in step.transfers],
                "bytes": list(step.bytes),
                "holds": _bits(step.holds),
                "ms": step.ms,
                "adds": step.adds,
            }
            for step in self.steps
        ]
        about = {"collective": self.collective, "algorithm": self.algorithm, "ranks": self.ranks, "bytes": self.bytes}
        return {**about, "begin": _bits(self.begin), "steps": steps}


def choices(ranks: int) -> dict[str, dict[str, str]]:
    """collective -> algorithm -> why it can't run on this number of ranks, "" if it can."""
    return {
        name: {algorithm: impossible(algorithm, ranks) for algorithm in known} for name, known in ALGORITHMS.items()
    }


def run_collective(
    cluster: Ranks, collective: str = "all_reduce", algorithm: str | None = None, bytes: int = DEFAULT_BYTES
) -> ShownCollective:
    """Runs a collective on all ranks of a cluster; see `Cluster.animate_collective`."""
    ranks = cluster.world_size
    algorithm = algorithm or next(iter(ALGORITHMS.get(collective, {"ring": None})))
    schedule(collective, algorithm, ranks)  # raises before a rank is asked if there is no such algorithm
    if ranks > _MOST_RANKS:
        raise ValueError(f"collectives can be shown on at most {_MOST_RANKS} ranks, not {ranks}")
    if not 1 <= bytes <= _MOST_BYTES:
        raise ValueError(f"bytes must be from 1 to {_MOST_BYTES:,}, not {bytes:,}")
    _see_idle(cluster)
    numel = -(-int(bytes) // (_ELEMENT * ranks))
    options = {"part_numel": numel, "repeats": _REPEATS, "label": f"{collective} step by step", "board": SilentBoard()}
    made = cluster.run(DEMONSTRATE, collective, algorithm, **options).values[0]
    return ShownCollective(**vars(made))


def _see_idle(cluster: Ranks) -> None:
    """Raises if a cell is running: queued behind a training, this one would wait for hours without explanation."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while busy := sorted(cluster.busy_ranks()):
        if time.monotonic() > deadline:
            words = f"rank {busy[0]} is" if len(busy) == 1 else f"ranks {', '.join(map(str, busy))} are"
            raise ClusterError(f"{words} running a cell: wait until it ends, or interrupt it")
        time.sleep(0.02)


def _bits(holds: Holds) -> list[list[int]]:
    return [[sum(1 << rank for rank in holders) for holders in parts] for parts in holds]
