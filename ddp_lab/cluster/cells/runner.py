"""Runs the cells of one cluster and keeps their results: by name, and those that a new cell must wait for.

A rank runs one cell at a time, in the order in which they were sent. If one of them fails or is interrupted on a rank,
those that waited for it there are not run (`ddp_lab.engine.cells.cell`), as in a notebook whose cells were queued.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...control.interrupts import interrupts_deferred
from ...errors import CellError
from ...output.board import SilentBoard, default_board
from ...output.display import RunView
from ...protocol.entry_points import RankFunction
from ...protocol.messages import CellText
from .failures import replaced_text
from .run import CellOptions, CellResult, CellRun

if TYPE_CHECKING:
    from ..session import Session


_clients = itertools.count(time.time_ns())  # ranks remember cells by their ids, so later clients must not reuse them


class Runs(Mapping[str, CellRun]):
    """Name -> `CellRun` of the last cell of that name: while it runs and after it has ended, in whatever way."""

    def __init__(self) -> None:
        self._named: dict[str, CellRun] = {}
        self._open: list[CellRun] = []

    def add(self, run: CellRun, name: str) -> None:
        """Notes a cell that has been sent; `name` may be empty."""
        self._open = [*(each for each in self._open if not each.done), run]
        if name:
            self._named.pop(name, None)  # the newest is last
            self._named[name] = run

    def pending_cells(self, ranks: Iterable[int]) -> tuple[CellRun, ...]:
        """The cells that these ranks may still run, in their order."""
        wanted = set(ranks)
        return tuple(run for run in self._open if not run.done and wanted.intersection(run.ranks))

    def give_up(self, why: Mapping[int, str]) -> None:
        """Ends the cells that run on ranks whose processes have ended or are being ended: rank -> why."""
        for run in self._open:
            run.give_up(why)

    def __getitem__(self, name: str) -> CellRun:
        if name not in self._named:
            known = f"there are {', '.join(self._named)}" if self._named else "no cell has a name"
            raise KeyError(f"{name!r}: {known} (`%%distributed --name NAME` names a cell)")
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._named))

    def __len__(self) -> int:
        return len(self._named)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: {self[name]!r}" for name in self) + "}"


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
        self._sending = threading.Lock()  # cells of several threads reach all ranks in one order

    def run(
        self,
        session: Session,
        code: str | CellText | Callable[..., Any] | RankFunction,
        ranks: Sequence[int],
        options: CellOptions,
        wait: bool,
        new_view: Callable[[bool], RunView | None],
    ) -> CellResult | CellRun:
        """See `Cluster.run`.

        Args:
            session: whose ranks.
            code: what to run.
            ranks: which of them, checked.
            options: the cell's options.
            wait: whether to wait for its end.
            new_view: makes the view of the cell's progress; its argument: whether the cell is waited for.
        """
        members = session.members
        idle = members.groups_uncertain  # then wait for the ranks
        replaced = members.restore_groups()
        number = next(self._numbers)
        name, view = code.name if isinstance(code, CellText) else options.label or "", options.view
        board, label = options.board, options.label or f"cell {number}"
        if replaced:
            board = board or default_board(ranks)
            board.announce(sorted(replaced), replaced_text(replaced, self._world_size))
        if isinstance(code, RankFunction):
            name = ""
        elif not wait:
            name, view = name or label, view or new_view(False)
        after = () if idle else self.results.pending_cells(members.busy().intersection(ranks))
        options = replace(options, label=label, name=name, board=board, after=after)
        cell_id = f"{self._client}-{number}"
        cell_run = CellRun(session, code, ranks, cell_id=cell_id, options=options)
        with interrupts_deferred():
            with self._sending:
                members.begin(cell_id, ranks)
                self.results.add(cell_run.submit(None if wait else view), name)
            if not wait:
                return cell_run.follow()
            shown = isinstance(code, CellText) and not isinstance(board, SilentBoard)
            late = (lambda: new_view(True)) if shown else None
            try:
                self.last_result = cell_run.wait(options.tick, late)
            except (CellError, KeyboardInterrupt):  # wait for the ranks too before reporting anything else
                members.groups_uncertain = True
                members.verify_groups()
                raise
            session.wire.wait_for(cell_id, ranks)
            return self.last_result

    def give_up(self, why: str) -> None:
        """Ends all running cells: their ranks are being terminated."""
        self.results.give_up(dict.fromkeys(range(self._world_size), why))
