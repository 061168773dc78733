"""The switch between the views of cells' outputs: merged, tabs, side by side. One widget for all cells of a kernel."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from ..output.by_rank import VIEWS, KeptCells
from . import bundle
from .live_widget import receive_while_busy

__all__ = ["OutputViews"]


class OutputViews(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
    """Draws a switch in the place of each cell, and sends the output by rank of the cells for which a page asks.

    It is never displayed: its script runs in every page with this kernel. The chosen views are traits, so a page that
    is loaded again has them. They end with the kernel. See [Note: views of a cell's output].

    Args:
        cells: whose outputs can be shown.

    Attributes:
        token: of the kernel, in the places of its cells; ``""`` until it listens to pages.
        view: with which cells begin: the view that was chosen last.
        views: cell -> its view, where it is not the one with which it began.
    """

    _esm = bundle.module_text("app/output_views.js")
    _css = bundle.style_text("dashboard", "output_views")
    token = traitlets.Unicode().tag(sync=True)
    view = traitlets.Enum(VIEWS, VIEWS[0]).tag(sync=True)
    views = traitlets.Dict().tag(sync=True)

    def __init__(self, cells: KeptCells) -> None:
        self._cells = cells
        super().__init__()
        receive_while_busy(self)
        self.on_msg(self._receive)
        # Only now: what pages send before is lost, and it may arrive while this is made on another thread.
        self.token = cells.token

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        """Handles the request of a page for a cell's output, on any thread; an empty message needs no answer."""
        if "cell" not in content:
            return
        name = str(content["cell"])
        cell = self._cells.get(name)
        if cell is None:
            self.send({"cell": name, "kept": False})
        else:
            cell.open(lambda found: self.send({"cell": name, "kept": True, **found}))

    @traitlets.observe("views")
    def _close_merged(self, change: Any) -> None:
        """Nothing more is sent for cells of which all pages show the merged output."""
        for name, view in change["new"].items():
            cell = self._cells.get(name)
            if view == VIEWS[0] and cell is not None:
                cell.close()
