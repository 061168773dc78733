"""The cluster as a widget: the current state of each rank, and buttons to interrupt, rejoin, restart and export."""

from __future__ import annotations

import time
from typing import Any

import IPython.display
import traitlets

from ...control.ranks import Ranks
from ...errors import ClusterError
from ...output.status_table import html_table, text_table
from .. import bundle
from ..life import life_of
from ..live_widget import LiveWidget
from ..saved_picture import SavedTable
from .actions import ClusterActions
from .processes import ProcessWatch
from .rows import cluster_rows, rank_rows, row_texts

__all__ = ["ClusterPanel", "ProcessWatch", "rank_rows"]

_RATE = 8.0  # rounds per second
_LOOK_SECONDS = 0.5  # between two queries of the ranks
_ANSWER_SECONDS = 0.4
_AGAIN = "Start a new one with `%cluster start`, or this one with `lab.start()`."


class ClusterPanel(LiveWidget):
    """A live table of the ranks. Displayed in a notebook, it updates itself, even while a cell runs.

    While it is in view, a thread of its own queries the ranks twice per second; out of view, it has no thread. A saved
    notebook keeps the table as it was when it was displayed.

    Args:
        cluster: the cluster to show.
    """

    _esm = bundle.module_text("app/cluster_panel.js")
    _css = bundle.style_text("dashboard", "cluster_panel")
    ranks: Any = traitlets.List().tag(sync=True)
    about = traitlets.Dict().tag(sync=True)
    control = traitlets.Dict().tag(sync=True)

    def __init__(self, cluster: Ranks) -> None:
        self._cluster = cluster
        self._actions = ClusterActions(cluster)
        self._processes = ProcessWatch()
        self._next = 0.0
        super().__init__(self._tick, _RATE, "look")
        self._commands.on("cluster", self._actions.obey)
        self._saved = SavedTable(self.token)
        self._listen()

    # ---- for the user -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Queries the ranks now."""
        with self._lock:
            self._look()

    def close(self) -> None:
        """Removes the live view from the notebook."""
        self._refresher.stop()
        super().close()

    def __str__(self) -> str:
        titles, rows = row_texts(self.ranks)
        return text_table(titles, rows) if rows else self.about.get("why", "")

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the live view, with a table for viewers without widgets."""
        self.refresh()
        data, metadata = self._live(**kwargs)
        return {**data, "text/html": self._html(), "text/plain": str(self)}, metadata

    def _ipython_display_(self) -> None:
        """Displays the live view and, below it, the table that a saved notebook keeps (see `saved_picture`)."""
        self.refresh()
        data, metadata = self._live()
        publish: Any = IPython.display.publish_display_data
        publish({**data, "text/plain": "ddp_lab: the cluster, live; the table follows."}, metadata)
        self._saved.display(self._html(), str(self))

    def _html(self) -> str:
        titles, rows = row_texts(self.ranks)
        if not rows:
            return f"<p>{self.about.get('why', '')}</p>"
        return f"{html_table(titles, rows)}<p><small>Ranks at {time.strftime('%H:%M:%S')}.</small></p>"

    # ---- the thread -------------------------------------------------------------------------------------

    def _receive(self, widget: Any, content: dict[str, Any], buffers: Any) -> None:
        """Queues a message from the browser, on any thread."""
        self._next = 0.0
        super()._receive(widget, content, buffers)

    def _tick(self) -> bool:
        """One round of the thread; returns whether there was something to do."""
        with self._lock:
            busy = self._commands.obey()
            self._show({"control": self._actions.shown()})
            if self._actions.changing:
                return True
            now = time.monotonic()
            running = self._cluster.running
            if not running or (self._pages.any and (busy or now >= self._next)):
                self._look()
                self._next = time.monotonic() + _LOOK_SECONDS
            if not running or not self._pages.any:
                self._refresher.stop()
            return busy

    def _look(self) -> None:
        """Shows the state of the ranks."""
        cluster = self._cluster
        try:
            health, busy = cluster.health(_ANSWER_SECONDS), sorted(cluster.busy_ranks())
        except ClusterError as error:
            why = str(error) if cluster.running else _end_of(cluster)
            return self._tell([], {"running": False, "why": why})
        uses = self._processes.look([one.record for one in health])
        backends = {one.record.backend.rpartition(":")[2] for one in health if one.record.backend}
        about = {"running": True, "name": cluster.name, "backend": ", ".join(sorted(backends)), "busy": busy}
        # Always a different value, so that the page learns that the kernel is alive.
        self._tell(cluster_rows(health, cluster.timeline.ranks(), uses), {**about, "at": time.monotonic()})

    def _tell(self, ranks: list[dict[str, Any]], about: dict[str, Any]) -> None:
        """Sends both in one message."""
        with self.hold_sync():
            self._show({"ranks": ranks, "about": about})


def _end_of(cluster: Ranks) -> str:
    """The text for a cluster that is not running; code is between backquotes."""
    life = life_of(cluster, {})
    if life["adopt"]:
        return f"{life['what']}. Show it with `ddp_lab.current_cluster()`."
    return f"{life['what']}. {_AGAIN}" if life["remedy"] else f"{life['what']}."
