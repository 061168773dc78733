"""How a cell is run and watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...output.board import Board

__all__ = ["CellOptions", "EarlierCell"]


class EarlierCell(Protocol):
    """A cell that was sent before."""

    @property
    def cell_id(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def done(self) -> bool: ...


@dataclass(frozen=True)
class CellOptions:
    """How a cell is run and watched.

    Attributes:
        label: the cell's name in tracebacks and errors.
        name: under which `Cluster.results` has it; "" for none.
        args: arguments of the function, where a function is run.
        kwargs: its keyword arguments.
        board: shows the outputs; None for the one that fits this process.
        timeout: seconds after which the ranks are interrupted; None for no limit.
        watch_seconds: without progress, after which the cell says why; None: it never does.
        after: cells that were sent before to some of the same ranks and may not have ended: they are waited for.
    """

    label: str = "cell"
    name: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    board: Board | None = None
    timeout: float | None = None
    watch_seconds: float | None = None
    after: Sequence[EarlierCell] = ()
