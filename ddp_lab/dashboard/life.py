"""What a dashboard shows before the first step and after its cluster has stopped; how it learns that a cell ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import IPython
import IPython.display

from ..formatting import label_of

if TYPE_CHECKING:
    from ..control.ranks import Ranks

__all__ = ["REPLACED", "REPLACED_MODULE", "CellEnds", "life_of", "name_of", "nothing_yet", "publish", "successor_of"]

REPLACED = {
    "what": "The cell that showed this dashboard has run again",
    "remedy": "Display the dashboard again to continue.",
    "ended": False,
    "adopt": "",
}
"""Shown by a view that no longer updates, wherever it is still visible."""

REPLACED_MODULE = "export default { render({ el }) { el.textContent = 'Display this dashboard again to continue.'; } }"
"""The browser's part of a dashboard that is no longer displayed: small, because a page restores all widgets."""

_NOTHING = "No step recorded yet. Train with ddp_lab.DistributedDataParallel, or fully_shard, in a %%distributed cell."
_NOTHING_WITHOUT_RANKS = "No step recorded yet. Train with ddp_lab.DistributedDataParallel."
_NOTHING_PLAYED = "No step yet. The replay has not reached the first step."
_NOTHING_RECORDED = "No step was recorded."


def name_of(cluster: Any) -> str:
    """The cluster's name; "" if there is none, as for a run that is only followed."""
    return getattr(cluster, "name", None) or ""


def successor_of(cluster: Any) -> Ranks | None:
    """The cluster of this notebook that replaced one that is not running; None if there is none."""
    return None if cluster is None else cast("Ranks | None", cluster.successor())


def life_of(cluster: Any, lost: Mapping[int, str]) -> dict[str, Any]:
    """Returns ``what`` has failed or stopped, the ``remedy``, whether all ranks have ``ended``, and ``adopt``'s label.

    Args:
        cluster: the cluster of the displayed ranks; None if there is none.
        lost: rank -> how its process ended, for the ranks that failed.

    Returns:
        Empty if everything runs.
    """
    if cluster is None:
        return {}
    if not cluster.running:
        what, remedy = _end_of(cluster)
        successor = successor_of(cluster)
        if successor is not None:
            other = "" if successor.name == cluster.name else ", and another one is running"
            return {"what": what + other, "remedy": "", "ended": True, "adopt": "Show the running cluster"}
        return {"what": what, "remedy": remedy, "ended": True, "adopt": ""}
    if not lost:
        return {}
    ranks: dict[str, list[int]] = {}
    for rank, how in sorted(lost.items()):
        ranks.setdefault(how, []).append(rank)
    what = "; ".join(f"{label_of(of)} {_of_several(how) if len(of) > 1 else how}" for how, of in ranks.items())
    process = "the process" if len(lost) == 1 else "the processes"
    remedy = f"The next cell restarts {process}; the variables are lost."
    return {"what": what[:1].upper() + what[1:], "remedy": remedy, "ended": False, "adopt": ""}


def _end_of(cluster: Any) -> tuple[str, str]:
    """How a cluster stopped, and what to do if that sentence does not say it."""
    attached = {one.name: one.attached for one in cluster.detached()}
    if cluster.name not in attached:
        how = "was stopped" if cluster.timeline.ranks() else "is not running"
        return f"The cluster {how}", "Start another one with %cluster start; it can be shown here."
    if attached[cluster.name] == os.getpid():
        return f"This notebook was attached to the cluster {cluster.name} again", ""
    return f"This notebook no longer uses the cluster {cluster.name} (re-attach: %cluster attach {cluster.name})", ""


def _of_several(how: str) -> str:
    """`was killed` -> `were killed`."""
    return f"were{how[3:]}" if how.startswith("was ") else how


def nothing_yet(*, played: bool, recorded: bool, ranks: bool) -> str:
    """Returns the text of a dashboard without steps: of a replay, a recording, ranks, or a run that is followed."""
    if played:
        return _NOTHING_PLAYED
    if recorded:
        return _NOTHING_RECORDED
    return _NOTHING if ranks else _NOTHING_WITHOUT_RANKS


def publish(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Shows a widget, whose picture follows it ([Note: two outputs])."""
    live = {**data, "text/plain": "ddp_lab dashboard: the live view; its last picture follows."}
    show: Any = IPython.display.publish_display_data
    show(live, metadata)


class CellEnds:
    """Calls back at the end of every notebook cell, as long as the output of a cell shows the widget.

    Attributes:
        gone: whether all cells that displayed it have run again, so that it is no longer displayed.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._shell: Any = None
        self._cells: set[str | None] = set()  # that display it, by id; None: a cell without an id
        self._displayed = False  # in the running cell
        self.gone = False

    def begin(self) -> None:
        """Notes that the running cell displays the widget. Does nothing without IPython."""
        shell = IPython.get_ipython()  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
        self._displayed, self.gone = True, False
        if shell is not None and self._shell is None:
            shell.events.register("post_run_cell", self._after_cell)
            self._shell = shell

    def end(self) -> None:
        """Stops calling back."""
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
