"""Runs the cells of one cluster, one after the other on each rank, and keeps what became of them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..control.interrupts import held_back
from ..control.records import CellText
from ..errors import CellError
from ..output.board import Board, default_board
from ..output.run_view import RunView
from ..protocol.entry_points import RankFunction
from .cells.failures import replaced_text
from .cells.named_runs import Runs
from .cells.options import CellOptions
from .cells.run import CellResult, CellRun

if TYPE_CHECKING:
    from .session import Session

__all__ = ["CellRunner"]

_clients = itertools.count(time.time_ns())  # ranks remember cells by their ids: no later client may use one again


class CellRunner:
    """The cells of one cluster; they outlive its sessions.

    Args:
        world_size: how many ranks the cluster has.
        shared: whether other processes may run cells on the same ranks.

    Attributes:
        results: name -> the last cell of that name.
        last_result: of the last cell that was waited for and did not fail.
    """

    def __init__(self, world_size: int, shared: bool) -> None:
        self.results = Runs()
        self.last_result: CellResult | None = None
        self._world_size = world_size
        self._client = f"{os.getpid()}-{next(_clients)}" if shared else str(os.getpid())
        self._numbers = itertools.count(1)

    def run(
        self,
        session: Session,
        code: str | CellText | Callable[..., Any] | RankFunction,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        ranks: Sequence[int],
        wait: bool,
        timeout: float | None,
        label: str | None,
        board: Board | None,
        view: RunView | None,
        new_view: Callable[[bool], RunView | None],
        tick: Callable[[], None] | None,
        watch_seconds: float | None,
    ) -> CellResult | CellRun:
        """See `Cluster.run`.

        Args:
            session: whose ranks.
            ranks: which of them, checked.
            new_view: given whether the cell is waited for, makes what shows how far it is.
            watch_seconds: see `Cluster`.
        """
        members = session.members
        idle = members.suspect  # then the ranks are waited for
        replaced = members.ensure_whole()
        number = next(self._numbers)
        name = code.name if isinstance(code, CellText) else label or ""
        if replaced:
            board = board or default_board(ranks)
            board.announce(sorted(replaced), replaced_text(replaced, self._world_size))
        label = label or f"cell {number}"
        if isinstance(code, RankFunction):
            name = ""
        elif not wait:
            name, view = name or label, view or new_view(False)
        options = CellOptions(
            label=label,
            name=name,
            args=args,
            kwargs=kwargs,
            board=board,
            timeout=timeout,
            watch_seconds=watch_seconds,
            after=() if idle else self.results.ahead(members.busy().intersection(ranks)),
        )
        cell_id = f"{self._client}-{number}"
        cell_run = CellRun(session, code, ranks, cell_id=cell_id, options=options)
        with held_back():
            members.begin(cell_id, ranks)
            self.results.add(cell_run.submit(None if wait else view), name)
            if not wait:
                return cell_run.follow()
            late = (lambda: new_view(True)) if isinstance(code, CellText) else None
            self.last_result = _wait(cell_run, session, tick, late)
            session.wire.wait_for(cell_id, ranks)
            return self.last_result

    def give_up(self, why: str) -> None:
        """Ends all cells that run: their ranks are being ended."""
        self.results.give_up(dict.fromkeys(range(self._world_size), why))


def _wait(
    cell_run: CellRun, session: Session, tick: Callable[[], None] | None, late: Callable[[], RunView | None] | None
) -> CellResult:
    """Waits for a cell; after a failure the ranks are, too, before anything else is said."""
    try:
        return cell_run.wait(tick, late)
    except (CellError, KeyboardInterrupt):
        session.members.suspect = True
        session.members.settle()
        raise
