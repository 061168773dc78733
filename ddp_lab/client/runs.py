"""The cells of one cluster: results by name, and which of them a new one has to wait for.

A rank runs one cell at a time, in the order in which they were sent. If one of them fails or is interrupted on a rank,
those that waited for it there are not run (`ddp_lab.engine.cell`), as in a notebook whose cells were queued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .cell_run import CellRun
from .results import CellResult

__all__ = ["Runs"]


class Runs(Mapping[str, "CellResult | CellRun"]):
    """Name -> `CellResult` of the last cell of that name, failed ones too; the `CellRun` as long as it runs."""

    def __init__(self) -> None:
        self._named: dict[str, CellResult | CellRun] = {}
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

    def __getitem__(self, name: str) -> CellResult | CellRun:
        if name not in self._named:
            known = f"there are {', '.join(self._named)}" if self._named else "no cell has been given a name"
            raise KeyError(f"{name!r}: {known} (`%%distributed --name NAME` names a cell)")
        found = self._named[name]
        if isinstance(found, CellRun) and found.done:
            found = self._named[name] = found.collected()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._named))

    def __len__(self) -> int:
        return len(self._named)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: {self[name]!r}" for name in self) + "}"
