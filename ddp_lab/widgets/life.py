"""What a dashboard says before the first step, and of what has ended; and how it knows that its cell has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import IPython
import IPython.display

from ..formatting import label_of

if TYPE_CHECKING:
    from ..control.ranks import Ranks
    from ..timeline.timeline import Timeline

__all__ = ["REPLACED", "CellEnds", "life_of", "name_of", "nothing_yet", "publish", "successor_of"]

REPLACED = {
    "what": "The cell that showed this has run again",
    "remedy": "Display the dashboard once more to follow.",
    "ended": False,
    "adopt": "",
}
"""What a view says, wherever it is still seen, that follows no more."""

_NOTHING = "No step recorded yet: train with ddp_lab.DistributedDataParallel in a %%distributed cell."
_NOTHING_WITHOUT_RANKS = "No step recorded yet: train with ddp_lab.DistributedDataParallel."
_NOTHING_PLAYED = "No step yet: the replay has not come to one."
_NOTHING_RECORDED = "No step was recorded."


def name_of(cluster: Any) -> str:
    """The cluster's name; "" without one: a run that is followed has none."""
    return getattr(cluster, "name", None) or ""


def successor_of(cluster: Any) -> Ranks | None:
    """The cluster of this notebook that took the place of one that does not run; None if there is none."""
    return None if cluster is None else cast("Ranks | None", cluster.successor())


def life_of(cluster: Any, lost: Mapping[int, str]) -> dict[str, Any]:
    """Returns ``what`` has ended, the ``remedy``, whether all ranks have ``ended``, and what ``adopt`` is called.

    Args:
        cluster: whose ranks are shown; None: there are none.
        lost: rank -> how its process ended, for those that have.

    Returns:
        Empty as long as there is nothing to say.
    """
    if cluster is None:
        return {}
    if not cluster.running:
        what, remedy = _end_of(cluster)
        successor = successor_of(cluster)
        if successor is not None:
            other = "" if successor.name == cluster.name else ", and another one runs"
            return {"what": what + other, "remedy": "", "ended": True, "adopt": "Show the cluster that runs"}
        return {"what": what, "remedy": remedy, "ended": True, "adopt": ""}
    if not lost:
        return {}
    ranks: dict[str, list[int]] = {}
    for rank, how in sorted(lost.items()):
        ranks.setdefault(how, []).append(rank)
    what = "; ".join(f"{label_of(of)} {_of_several(how) if len(of) > 1 else how}" for how, of in ranks.items())
    given = "it a new process" if len(lost) == 1 else "them new processes"
    remedy = f"The next cell gives {given}, without the variables."
    return {"what": what[:1].upper() + what[1:], "remedy": remedy, "ended": False, "adopt": ""}


def _end_of(cluster: Any) -> tuple[str, str]:
    """How a cluster that does not run came to its end, and the remedy where that does not name it."""
    attached = {one.name: one.attached for one in cluster.detached()}
    if cluster.name not in attached:
        how = "was stopped" if cluster.timeline.ranks() else "does not run"
        return f"The cluster {how}", "%cluster start starts another one, which can be shown here."
    if attached[cluster.name] == os.getpid():
        return f"This notebook was attached to the cluster {cluster.name} again", ""
    return f"This notebook no longer uses the cluster {cluster.name} (%cluster attach {cluster.name} does again)", ""


def _of_several(how: str) -> str:
    """`was killed` -> `were killed`."""
    return f"were{how[3:]}" if how.startswith("was ") else how


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
