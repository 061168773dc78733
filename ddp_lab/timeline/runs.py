"""A recorded run: its timeline, and what a reader of it should know."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from .recorded import merge
from .timeline import Timeline

__all__ = ["RecordedRun", "read_run"]


@dataclass(frozen=True)
class RecordedRun:
    """Files of one run, merged.

    Attributes:
        timeline: of all its ranks.
        notices: sentences on what a reader of the timeline should know: who is missing, who was killed, how the clocks
            were aligned, what is damaged.
        damage: those of them on what of the files is damaged or missing.
    """

    timeline: Timeline
    notices: tuple[str, ...]
    damage: tuple[str, ...] = ()


def read_run(paths: Sequence[str | os.PathLike[str]], *, partial: bool = False) -> RecordedRun:
    """Merges files that ranks wrote.

    Args:
        paths: files, or folders that hold them.
        partial: ranks without a file are said in a notice, and are no error.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is no recording or of another schema version; two are of the same rank, or of different
            runs; a rank of a model has none.
    """
    recorded = merge.read(paths, partial=partial)
    timeline = Timeline(max_events=max(1_000_000, recorded.events))
    more = recorded.fill(timeline)
    return RecordedRun(timeline, (*recorded.notices, *more), recorded.damage)
