"""The cells of one cluster: results by name, and which of them a new one has to wait for.

A rank runs one cell at a time, in the order in which they were sent. If one of them fails or is interrupted on a rank,
those that waited for it there are not run (`ddp_lab.engine.cells.cell`), as in a notebook whose cells were queued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .run import CellRun

__all__ = ["Runs"]


class Runs(Mapping[str, CellRun]):
    """Name -> `CellRun` of the last cell of that name: while it runs, and when it has ended, however it did."""

    def __init__(self) -> None:
        self._named: dict[str, CellRun] = {}
        self._open: list[CellRun] = []

    def add(self, run: CellRun, name: str) -> None:
        """Notes a cell that has been sent; `name` may be empty."""
        self._open = [*(each for each in self._open if not each.done), run]
        if name:
            self._named.pop(name, None)  # the last one comes last
            self._named[name] = run

    def ahead(self, ranks: Iterable[int]) -> tuple[CellRun, ...]:
        """The cells that these ranks may still run, in their order."""
        wanted = set(ranks)
        return tuple(run for run in self._open if not run.done and wanted.intersection(run.ranks))

    def give_up(self, why: Mapping[int, str]) -> None:
        """Ends the cells that run on ranks whose processes have ended or are being ended: rank -> why."""
        for run in self._open:
            run.give_up(why)

    def __getitem__(self, name: str) -> CellRun:
        if name not in self._named:
            known = f"there are {', '.join(self._named)}" if self._named else "no cell has been given a name"
            raise KeyError(f"{name!r}: {known} (`%%distributed --name NAME` names a cell)")
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._named))

    def __len__(self) -> int:
        return len(self._named)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: {self[name]!r}" for name in self) + "}"
