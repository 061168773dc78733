"""Tools that ask the ranks of a running cluster, and the one that runs a cell on them.

They may be called on any thread, also while the notebook's main thread waits for a cell that hangs: ranks answer beside
their cells (`ddp_lab.engine.agent`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field

from ..cluster.cells.run import CellRun
from ..cluster.cluster import Cluster
from ..control.records import RankHealth
from ..diagnosis.report import HangReport
from ..errors import CellError, ClusterError
from ..formatting import duration, enumeration, label_of
from ..output.board import Board
from ..output.display import RunView
from ..output.status_table import text_table
from ..output.terminal import plain
from ..protocol.messages import CellText
from . import answers
from .answers import Answer, CellOutcome, Hang, Status
from .timeline_tools import models_of

__all__ = ["CellTool", "ClusterTools"]

_ANSWER_SECONDS = 1.0
_LONGEST = 20_000  # characters of each text of a rank
_LIMIT_S = 3600.0
_ENDED = "the notebook no longer serves assistants (`%cluster mcp` starts that again)"
_COLUMNS = ("rank", "state", "cell", "for s", "in flight", "device", "host", "pid")


class ClusterTools:
    """Tools for a cluster.

    Args:
        cluster: gives the cluster, running or not; may raise `DdpLabError`.
    """

    def __init__(self, cluster: Callable[[], Cluster]) -> None:
        self._cluster = cluster

    def all(self) -> list[Callable[..., Answer[Any]]]:
        """The tools."""
        return [self.cluster_status, self.doctor]

    def cluster_status(self) -> Answer[Status]:
        """Shows every rank as it is now, also while a cell runs.

        state is idle, running (a cell), unblocked (its process groups were destroyed so that pending collectives
        returned), silent (no answer within 1 second) or lost (its process exited). Times are in seconds. Also lists
        the cells that have not ended and the models that train.
        """
        cluster = self._cluster()
        if not cluster.running:
            made = Status(cluster.name or "", False, [], [], models_of(cluster.timeline))
            return Answer(f"cluster {cluster.name} is stopped; its timeline can still be read", made)
        ranks = [_rank(one) for one in cluster.health(_ANSWER_SECONDS)]
        cells = [run.label for run in cluster.results.pending_cells(range(cluster.world_size))]
        return _status(Status(cluster.name or "", True, ranks, cells, models_of(cluster.timeline)))

    def doctor(self) -> Answer[Hang]:
        """Diagnoses why ranks make no progress: what each rank does, which rank waits for which, and how to fix it.

        Works while a cell hangs and does not stop it. Ranks that only compute are not stuck: ask again after some
        seconds if in doubt.
        """
        report = self._cluster().doctor()
        return Answer(str(report), _hang(report))


class CellTool:
    """The tool that runs a cell.

    Args:
        cluster: gives the cluster; may raise `DdpLabError`.
        shown: gives what shows a cell of these ranks, with this text, to the user: its outputs and its progress.
    """

    def __init__(
        self,
        cluster: Callable[[], Cluster],
        shown: Callable[[Sequence[int], str], tuple[Board, RunView]],
    ) -> None:
        self._cluster, self._shown = cluster, shown
        self._lock = threading.Lock()  # guards the number and serves one call at a time
        self._number = 0
        self._closing = threading.Event()

    def close(self) -> None:
        """Interrupts the cell that runs, and refuses further ones."""
        self._closing.set()

    def run_cell(
        self,
        code: Annotated[str, Field(description="Python code; the value of its last expression is returned")],
        ranks: Annotated[list[int] | None, Field(description="the ranks that run it; null: all")] = None,
        timeout_s: Annotated[
            float, Field(gt=0, le=_LIMIT_S, description="the ranks are interrupted after this many seconds")
        ] = 60.0,
    ) -> Answer[CellOutcome]:
        """Runs a cell on the ranks, in the namespace of the notebook's %%distributed cells, and waits until it ends.

        It may change variables and train models; the notebook shows the code and the outcome. rank and world_size are
        defined. Collectives must be entered by all ranks. Refused while the ranks run another cell.
        """
        with self._lock:
            if self._closing.is_set():
                raise ClusterError(_ENDED)
            cluster = self._cluster()
            busy = cluster.busy_ranks()
            if busy:
                cells = [run.label for run in cluster.results.pending_cells(busy)]
                which = f" {enumeration(cells)}" if cells else " a cell"
                raise ClusterError(f"{label_of(busy)} run{'s' if len(busy) == 1 else ''}{which}: wait until it ends")
            chosen = sorted(set(range(cluster.world_size) if ranks is None else ranks))
            self._number += 1
            label = f"assistant [{self._number}]"
            board, view = self._shown(chosen, code)
            text = CellText(code, name=label)
            run = cluster.run(text, ranks=chosen, wait=False, timeout=timeout_s, label=label, board=board, view=view)
            return self._outcome(run)

    def _outcome(self, run: CellRun) -> Answer[CellOutcome]:
        error: Exception | None = None
        try:
            run.wait(self._tick)
        except CellError as raised:
            error = raised
        except _Closed:
            run.interrupt()
            raise ClusterError(f"{run.label} was interrupted: {_ENDED}") from None
        words, values = run.status().ranks, run.values
        ranks = [
            answers.RankOutcome(
                rank,
                words.get(rank, ""),
                "" if rank in run.failures or values.get(rank) is None else _cut(repr(values[rank])),
                _cut(plain(run.text(rank))),
                _cut(plain(run.failures[rank].traceback)) if rank in run.failures else "",
            )
            for rank in run.ranks
        ]
        made = CellOutcome(run.label, run.state, run.seconds, ranks)
        return Answer("\n".join([f"{run.label}: {made.state} in {duration(made.seconds)}", *_lines(made, error)]), made)

    def _tick(self) -> None:
        if self._closing.is_set():
            raise _Closed


class _Closed(Exception):
    """The server is being stopped."""


def _rank(one: RankHealth) -> answers.RankState:
    record = one.record
    return answers.RankState(
        rank=record.rank,
        state=record.word,
        cell=one.label,
        cell_seconds=one.cell_seconds,
        silent_seconds=one.silent_seconds,
        in_flight=one.in_flight,
        device=record.device,
        host=record.host,
        pid=record.pid,
        exit_code=record.exit_code,
    )


def _status(made: Status) -> Answer[Status]:
    rows = [
        [
            str(one.rank),
            one.state,
            one.cell or "",
            "" if one.cell_seconds is None else f"{one.cell_seconds:.1f}",
            one.in_flight,
            one.device,
            one.host,
            str(one.pid),
        ]
        for one in made.ranks
    ]
    lines = [f"cluster {made.cluster}", text_table(_COLUMNS, rows)]
    if made.pending_cells:
        lines.append(f"cells that have not ended: {', '.join(made.pending_cells)}")
    lines += [
        f"model {one.model} ({one.module}) on {label_of(one.ranks)}: newest step {one.newest_step}"
        for one in made.models
    ]
    return Answer("\n".join(lines), made)


def _hang(report: HangReport) -> Hang:
    found = report.diagnosis
    return Hang(
        kind=found.kind,
        stuck=found.stuck,
        cause=found.sentence,
        suggested_fix=found.remedy,
        processes=list(report.processes),
        ranks=[
            answers.RankActivity(
                one.rank,
                str(one),
                one.seconds,
                one.in_flight,
                [f"{place} in {place.function}: {place.text}" for place in reversed(one.stack) if place.users],
            )
            for one in report.ranks
        ],
    )


def _lines(made: CellOutcome, error: Exception | None) -> list[str]:
    """What each rank showed, its value included, and how it failed."""
    lines = [] if error is None else [str(error)]
    for one in made.ranks:
        lines += [f"[rank {one.rank}] {line}" for line in one.output.splitlines()]
        lines += [f"[rank {one.rank}] {line}" for line in one.error.splitlines()]
    return lines


def _cut(text: str) -> str:
    left = len(text) - _LONGEST
    return text if left <= 0 else f"{text[:_LONGEST]}… ({left:,} more characters)"
