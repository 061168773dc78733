"""How a dashboard appears in a notebook: the live view and, below it, a picture that a saved notebook keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import IPython
import IPython.display

if TYPE_CHECKING:
    from ..timeline.timeline import Timeline

__all__ = ["CellEnds", "nothing_yet", "publish"]

_NOTHING = "No step recorded yet: train with ddp_lab.DistributedDataParallel in a %%distributed cell."
_NOTHING_WITHOUT_RANKS = "No step recorded yet: train with ddp_lab.DistributedDataParallel."
_NOTHING_PLAYED = "No step yet: the replay has not come to one."
_NOTHING_RECORDED = "No step was recorded."


def nothing_yet(timeline: Timeline, cluster: object, player: object) -> str:
    """Returns what a dashboard of these says while there is no step."""
    if player is not None:
        return _NOTHING_PLAYED
    if timeline.recorded:
        return _NOTHING_RECORDED
    return _NOTHING_WITHOUT_RANKS if cluster is None else _NOTHING


def publish(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Shows a widget, whose picture follows it ([Note: two outputs])."""
    live = {**data, "text/plain": "ddp_lab dashboard: the live view; its last picture follows."}
    show: Any = IPython.display.publish_display_data
    show(live, metadata)


class CellEnds:
    """Calls back at the end of every cell of the notebook, as long as an output of one shows the widget.

    Attributes:
        gone: whether each cell that displayed it has run again, and has other outputs now.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._shell: Any = None
        self._cells: set[str | None] = set()  # that display it, by the ids that the page gave them; None: it gave none
        self._displayed = False  # in the cell that runs
        self.gone = False

    def begin(self) -> None:
        """The cell that runs displays the widget. Without IPython nothing happens."""
        shell = IPython.get_ipython()  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
        self._displayed, self.gone = True, False
        if shell is not None and self._shell is None:
            shell.events.register("post_run_cell", self._after_cell)
            self._shell = shell

    def end(self) -> None:
        """Takes that back."""
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._after_cell)
            self._shell = None

    def _after_cell(self, result: Any = None) -> None:
        cell = getattr(getattr(result, "info", None), "cell_id", None)
        if self._displayed:
            self._displayed = False
            self._cells.add(cell)
        elif cell is not None:
            self._cells.discard(cell)
        self.gone = not self._cells
        if self.gone:
            self.end()
        else:
            self._call()
