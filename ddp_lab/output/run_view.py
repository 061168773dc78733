"""What shows how far a cell is that nobody waits for, and what it shows."""

from __future__ import annotations

from typing import Protocol

__all__ = ["FollowedCell", "RunView"]


class FollowedCell(Protocol):
    """What is shown of a cell that runs or has run: see `ddp_lab.cluster.cells.run.CellRun`."""

    @property
    def label(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def headline(self) -> str: ...
    @property
    def report(self) -> str: ...
    @property
    def done(self) -> bool: ...
    @property
    def waits_for(self) -> tuple[str, ...]: ...
    def last_lines(self) -> str: ...
    def interrupt(self) -> None: ...


class RunView(Protocol):
    """Shows how far a cell is that nobody waits for."""

    def show(self, run: FollowedCell) -> None:
        """Shows the run's state, from before it is sent to its end; each time on the thread that follows the cell."""

    def show_again(self) -> None:
        """Shows the last state once more, for front ends that missed what came between two cells."""
