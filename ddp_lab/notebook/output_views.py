"""Where `%%distributed` cells get the switch between the views of their output, and with which view they begin."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..output.board import Board, OutputBoard, default_board
from ..output.by_rank import VIEWS, KeptCells, OutputByRank, SwitchableBoard
from ..output.display import KernelDisplay, kernel_shell

if TYPE_CHECKING:
    from ..widgets.output_views import OutputViews

__all__ = ["board_of", "choose", "chosen"]

_cells = KeptCells()
_widget: OutputViews | None = None
_making = threading.Lock()


def board_of(ranks: Sequence[int], quiet: bool, view: str | None) -> Board:
    """The board of a cell, with the switch where it makes sense.

    Args:
        ranks: where the cell runs.
        quiet: show nothing.
        view: one of `VIEWS`; None for the view that was chosen last.
    """
    shell = kernel_shell()
    if quiet or shell is None or len(ranks) < 2:
        return default_board(ranks, quiet)
    display = KernelDisplay(shell)

    def place(cell: OutputByRank) -> None:
        name = _cells.add(cell)
        named = {"kernel": _cells.token, "cell": name, "view": view or chosen()}
        attributes = "".join(f' data-{key}="{value}"' for key, value in named.items())
        element = f"<ddp-lab-output{attributes}></ddp-lab-output>"
        display.publish(f"ddp_lab-{name}", {"text/html": element, "text/plain": ""}, {}, False)
        if _widget is None:  # 0.2 s for its libraries, for which no cell waits
            threading.Thread(target=_the_widget, name="ddp_lab output views", daemon=True).start()

    return SwitchableBoard(OutputBoard(display), OutputByRank(ranks), place)


def chosen() -> str:
    """The view with which further cells begin."""
    return VIEWS[0] if _widget is None else str(_widget.view)


def choose(view: str) -> None:
    """Begins further cells with this view."""
    _the_widget().view = view


def _the_widget() -> OutputViews:
    """The widget, made at the first call."""
    global _widget
    with _making:
        if _widget is None:
            from ..widgets.output_views import OutputViews

            _widget = OutputViews(_cells)
        return _widget
