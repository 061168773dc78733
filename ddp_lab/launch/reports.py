"""What was recorded, as words on the terminal and as one page: the end of `ddp-lab run`, and `ddp-lab report`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..client.recorded_runs import RecordedRun, read_run

__all__ = ["show"]


def show(paths: Sequence[str | Path], page: Path, *, partial: bool = False) -> RecordedRun:
    """Prints what the files show, notices on stderr, and writes the page if there is a model to show.

    Args:
        paths: files or folders, see `read_run`.
        page: where the HTML page goes; those of further models stand beside it, with their numbers.
        partial: ranks without a file are no error.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the files can't be merged.

    Returns:
        What was merged.
    """
    run = read_run(paths, partial=partial)
    for notice in run.notices:
        print(f"ddp-lab: {notice}", file=sys.stderr)
    models = run.timeline.reducers()
    if not models:
        return run
    for model in models:
        if len(models) > 1:
            print(f"--- {model.module}, model {model.reducer} ---")
        print(run.timeline.summary(model.reducer))
    page.parent.mkdir(parents=True, exist_ok=True)
    for model in models:  # the most recently active is the last
        own = page if model is models[-1] else page.with_stem(f"{page.stem}-model{model.reducer}")
        run.timeline.report(own, model.reducer)
        print(f"wrote {own}")
    return run
