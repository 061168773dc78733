"""How a cell is run and watched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ...output.board import Board
from ..processes.process_watch import ProcessWatch
from .doctor import Watch
from .stdin import Send

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
        interrupt: given ranks and this run's cell id, makes the ranks end the cell, or not begin it; returns at once.
        ended: given a rank, this run's cell id and whether it failed: the rank has said how the cell ended.
        lost_ranks: rank -> why, for ranks whose process is gone; cheap.
        end_silent: ends those of these ranks that answer nobody, so that they are lost; takes a second.
        last_words: the last lines that a rank whose process is gone wrote outside cells.
        timeout: seconds after which the ranks are interrupted; None for no limit.
        processes: looks after the processes between here and the ranks; None: nobody does.
        watch: says why the cell makes no progress; None: nobody looks.
        answer: sends a rank what the user typed for its `input()`; None: it gets no answer.
        on_axis: given a rank and a time of its host, that time on this machine's clock; None: it is the same.
        far: ranks among those of the cell that share no memory with this process.
        logs: folder for the logs of ranks that print much, see `cell_outputs`; None: all stays in memory.
        after: cells that were sent before to some of the same ranks and may not have ended: they are waited for.
    """

    label: str = "cell"
    name: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    board: Board | None = None
    interrupt: Callable[[Sequence[int], str], None] | None = None
    ended: Callable[[int, str, bool], None] | None = None
    lost_ranks: Callable[[], Mapping[int, str]] | None = None
    end_silent: Callable[[Sequence[int]], None] | None = None
    last_words: Callable[[int], str] | None = None
    timeout: float | None = None
    processes: ProcessWatch | None = None
    watch: Watch | None = None
    answer: Send | None = None
    on_axis: Callable[[int, int], int] | None = None
    far: Collection[int] = ()
    logs: Path | None = None
    after: Sequence[EarlierCell] = ()
