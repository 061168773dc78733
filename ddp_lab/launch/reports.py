"""A recording as text on the terminal and as an HTML page: the end of `ddp-lab run`, and `ddp-lab report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..command_line import tell
from ..diagnosis.detector import PROGRESS_AGAIN
from ..printable import printable_lines
from ..timeline.timeline import RecordedRun, read_run

__all__ = ["HANGS", "hangs_of", "read", "write_pages"]

HANGS = "hangs.txt"  # in a run's folder: why its ranks made no progress, a line each


def read(paths: Sequence[str | Path], *, partial: bool = False) -> RecordedRun:
    """Reads a recording and prints its summary, and notices on stderr.

    Args:
        paths: files or folders, see `read_run`.
        partial: whether to accept missing files of some ranks.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the files can't be merged.

    Returns:
        The merged run.
    """
    run = read_run(paths, partial=partial)
    run = replace(run, hangs=hangs_of([Path(path) for path in paths]))
    failure = run.timeline.failure
    if failure is not None and run.hangs and not run.hangs[-1].endswith(PROGRESS_AGAIN):
        # the ranks were stuck: that has been told
        run.timeline.failure = failure = replace(failure, cause=None) if failure.ends else None
    if failure is not None and failure.cause is not None:
        tell(printable_lines(f"{'' if failure.ends else 'no rank failed, but '}{failure.cause.brief}"))
    told = failure.cause.sentence if failure is not None and failure.cause is not None else ""
    for notice in run.notices:
        if notice not in told:
            tell(printable_lines(notice))
    models = run.timeline.reducers()
    for model in models:
        if len(models) > 1:
            print(f"--- {model.module}, model {model.reducer} ---")
        print(run.timeline.summary(model.reducer))
    groups = len(run.timeline.groups())
    if groups > 1 or (groups and not models):  # the only group of a model has no more to say
        print(*(["--- process groups ---"] if models else []), run.timeline.group_summary(), sep="\n")
    return run


def hangs_of(paths: Sequence[Path]) -> tuple[str, ...]:
    """What the doctor has said of the runs in these folders while they ran."""
    files = [path / HANGS for path in paths if (path / HANGS).is_file()]
    return tuple(line for file in files for line in file.read_text(encoding="utf-8").splitlines())


def write_pages(run: RecordedRun, page: Path) -> None:
    """Writes a page for each model, and prints its path.

    Args:
        run: the merged run.
        page: path of the page; those of further models are next to it, with their numbers.

    Raises:
        OSError: one can't be written.
    """
    models = run.timeline.reducers()
    if not models and run.timeline.groups():
        page.parent.mkdir(parents=True, exist_ok=True)
        run.timeline.report(page, hangs=run.hangs)
        print(f"wrote {page}")
    for model in models:  # the most recently active is the last
        page.parent.mkdir(parents=True, exist_ok=True)
        own = page if model is models[-1] else page.with_stem(f"{page.stem}-model{model.reducer}")
        run.timeline.report(own, model.reducer, hangs=run.hangs)
        print(f"wrote {own}")
