"""The dashboard: the live views of a `Timeline` as one widget with tabs, or a single view."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from ..timeline.timeline import Timeline
from . import bundle
from .life import REPLACED, REPLACED_MODULE, CellEnds, publish, successor_of
from .live import DashboardStatistics, ShownTraining
from .live_widget import LiveWidget
from .saved_picture import SavedPicture
from .views import VIEWS, tabs

if TYPE_CHECKING:
    from ..timeline.recorded.player import Player

__all__ = ["Dashboard", "of_recording"]

RATE = 30.0  # refreshes per second while events arrive
_OF_PARTS = {"facts", "models", "status"}  # traits with a key for each part
_WORD_SECONDS = 0.5  # between two messages that tell a page that the kernel is alive
_CALM_SECONDS = 5.0  # without news, after which nothing is sent: servers cull idle kernels


class Dashboard(LiveWidget):
    """A live view of a timeline. Displayed in a notebook, it updates itself, even while a cell runs.

    It reads the timeline on a thread of its own and sends new steps to the browser, at most 30 times per second. The
    browser keeps the last 500 steps of each model, so choosing a step, zooming and the details of a bucket work
    without the kernel. A saved notebook keeps the last picture (see `saved_picture`).

    Args:
        timeline: the timeline to show.
        views: names of views (`ddp_lab.dashboard.views`), each in a tab of its own; None for all of them.
        status: returns a record for each rank (`Cluster.status`); called twice per second on the thread. None: use the
            states that the ranks reported to the timeline.
        request_inspection: requests norm and checksum of a reducer's gradients after a step, without waiting; the
            answers arrive through the timeline. None: gradients cannot be compared.
        link: returns the measured `CommModel`, or None if it was not measured yet; it is compared with the gradient
            sync. None: no comparison.
        event_cost: measures the cost of recording an event on a rank, in ns; called once, for the overhead line.
        lost: returns rank -> how its process ended, for the ranks that failed.
        collectives: runs collectives on the ranks; None if there are no ranks.
        cluster: the cluster that the controls act on (reconfigure, step through, fault injection); None: the controls
            are not available.
        player: replays a recording into the timeline; None if nothing is replayed.

    Attributes:
        player: the player, or None.

    Raises:
        ValueError: there is no such view.
    """

    _esm = bundle.module_text("app/dashboard.js")
    _css = bundle.style_text("dashboard")
    tabs: Any = traitlets.List().tag(sync=True)
    facts = traitlets.Dict().tag(sync=True)  # by view or control; see `send_state`
    models = traitlets.Dict().tag(sync=True)  # their bucket layouts, and the times that the link needs for each bucket
    ranks: Any = traitlets.List().tag(sync=True)
    status = traitlets.Dict().tag(sync=True)  # overhead, playback, the cluster's name and end, what ranks can do
    control = traitlets.Dict().tag(sync=True)
    kept = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        timeline: Timeline,
        *,
        views: Sequence[str] | None = None,
        player: Player[Timeline] | None = None,
        **means: Any,
    ) -> None:
        if views is None:
            shown = tuple(
                names for names in tabs() if names != ("collectives",) or means.get("collectives") is not None
            )
            if not means and timeline.groups() and not timeline.reducers():  # a recording without anything else to see
                shown = tuple(sorted(shown, key=lambda names: names != ("groups",)))
        else:
            shown = tuple((name,) for name in views)
        if not shown or not {name for names in shown for name in names} <= set(VIEWS):
            raise ValueError(f"views={list(views or ())} is not valid; choose from {', '.join(VIEWS)}")
        self.player = player
        self._word_at = 0.0
        self._active_at: float | None = time.monotonic()  # of the last news; None: nothing happens
        self._frozen = False
        self._facts_sent: dict[str, Any] = {}
        super().__init__(self._tick, RATE, "here", tabs=[list(names) for names in shown])
        self._picture = SavedPicture(self.token)
        self._cell_ends = CellEnds(self._after_cell)
        self._attach(timeline, means)
        self._commands.on("adopt", self._adopt)
        if self.player is not None:
            self._commands.on("player", self.player.obey)
        self._listen()
        self._tick()
        self._refresher.start()

    def _attach(self, timeline: Timeline, means: dict[str, Any]) -> None:
        """Switches to this timeline and these ranks."""

        def send(*message: Any) -> None:
            self.send(*message)

        wake = self._refresher.wake
        self._shown = ShownTraining(timeline, self.player, send=send, show=self._show, wake=wake, **means)
        self._saved_version = -1
        self._show({"status": {"means": self._shown.means}})
        for kind, obey in self._shown.commands.items():
            self._commands.on(kind, obey)

    # ---- traits with a key for each part ----------------------------------------------------------------

    def _show(self, traits: Mapping[str, Any]) -> None:
        """Sends traits that changed; of those in `_OF_PARTS` only these parts change, and equal ones stay the same."""

        def joined(known: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
            return {**known, **{part: one for part, one in new.items() if part not in known or known[part] != one}}

        super()._show(
            {name: joined(getattr(self, name), new) if name in _OF_PARTS else new for name, new in traits.items()}
        )

    def send_state(self, key: Any = None) -> None:
        """Sends traits to the pages; of `facts` only those of the views that changed, as a message for each.

        A synced trait is sent whole. A page takes the message into its own copy of the trait; a page that opens
        later gets the whole. What is binary (``body``) travels as the message's buffer.
        """
        if key != "facts":
            super().send_state(key)
            return
        known, self._facts_sent = self._facts_sent, self.facts
        for name, facts in self.facts.items():
            if known.get(name) is not facts:
                body = [facts["body"]] if "body" in facts else []
                head = {field: value for field, value in facts.items() if field != "body"}
                self.send({"type": "facts", "view": name, "facts": head}, body)

    # ---- for the user -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Sends new steps to the browser now."""
        spent = 0.0 if self._frozen else self._shown.ask_ranks(force=True)
        with self._lock:
            self._shown.spend(spent)
            self._update(force=True)

    def snapshot(self) -> None:
        """Updates the picture that the notebook keeps, wherever the dashboard is displayed.

        This happens automatically at the end of every notebook cell.
        """
        with self._lock:
            if not self._frozen:
                self._update(force=True)
            self._saved_version = self._shown.timeline.version
            names = [name for names in self.tabs for name in names if VIEWS[name].kept]
            self._shown.update_facts(force=True, kept=names)
            self.kept = self._shown.feed.newest()
        self._picture.replace(self.svg(), self._words())

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the live view, with a picture for viewers without widgets."""
        data, metadata = self._live(**kwargs)
        return {**data, "image/svg+xml": self.svg(), "text/plain": self._words()}, metadata

    def _ipython_display_(self) -> None:
        """Displays the live view and, below it, the picture that a saved notebook keeps ([Note: two outputs])."""
        self._cell_ends.begin()
        with self._lock:
            self._show({"_esm": bundle.module_text("app/dashboard.js")})  # it may have been replaced
        self.refresh()
        publish(*self._live())
        self._picture.display(self.svg(), self._words())
        self._shown.controls.go_on()
        self._refresher.start()

    def _after_cell(self) -> None:
        """Updates the picture in the notebook."""
        if self._frozen:
            self._cell_ends.end()
        elif self._saved_version != self._shown.timeline.version:
            self.snapshot()

    def stop(self) -> None:
        """Shows the last events and stops updating; the view remains, also in the saved notebook."""
        if self._frozen:
            return
        self.refresh()
        self.snapshot()
        self._frozen = True
        self._shown.frames.freeze()
        self._shown.controls.stop()
        self._show({"control": self._shown.controls.state(), "facts": self._shown.controls.shown()})
        self._refresher.stop()
        self._show({"status": {"playback": {}}})  # a stopped dashboard has no replay controls
        self.send({"type": "word", "last": True})

    def close(self) -> None:
        """Stops, and removes the live view from the notebook."""
        self._frozen = True
        if "_shown" in self.__dict__:  # else its arguments were invalid
            self._shown.controls.stop()
            self._refresher.stop()
            self._cell_ends.end()
        super().close()

    def statistics(self) -> DashboardStatistics:
        """Returns how much the dashboard has sent, and its CPU time."""
        with self._lock:
            return self._shown.statistics()

    def svg(self) -> str:
        """Returns the first view as a self-contained SVG picture; of the timeline, a step that stands for all."""
        with self._lock:
            return self._shown.svg(self.tabs[0][0])

    def _words(self) -> str:
        """Returns the content of the picture as text."""
        with self._lock:
            return self._shown.words(self.tabs[0][0])

    # ---- the thread -------------------------------------------------------------------------------------

    def _tick(self) -> bool:
        """One round of the thread; returns whether there was something to do."""
        spent = 0.0 if self._frozen else self._shown.ask_ranks()
        with self._lock:
            self._shown.spend(spent)
            busy = self._commands.obey()
            if self.player is not None and not self._frozen:
                busy = self.player.advance() or busy
                self._show({"status": {"playback": self.player.told()}})
            busy = self._shown.answer() or busy
            if self._frozen:
                self._shown.update_facts()
                if not busy and not self._shown.feed.unsent:
                    self._refresher.stop()
                self._shown.feed.send()
            elif self._cell_ends.gone:
                # All widgets of a kernel are restored with a page: many large ones would take it too long.
                self._show({"status": {"life": REPLACED}, "kept": {}, "_esm": REPLACED_MODULE})
                self._shown.controls.rest()
                self._refresher.stop()
            else:
                busy = self._update() or busy
                self._give_word(time.monotonic(), busy)
            return busy

    def _update(self, force: bool = False) -> bool:
        """Sends new events; returns whether there were any."""
        return self._shown.update(force, measure=self._active_at is not None)

    def _give_word(self, now: float, busy: bool) -> None:
        """Tells the pages in view that the kernel is alive, as long as something happens."""
        if busy or self._shown.any_running:
            self._active_at = now
        if self._active_at is None:
            return
        overhead = self.status.get("overhead", {})
        if now - self._active_at > max(_CALM_SECONDS, 2e-3 * (overhead.get("step") or 0.0)):  # two steps, in ms
            self._active_at = None
            self._show({"status": {"overhead": {**overhead, "kernel": None}}})
            self.send({"type": "word", "last": True})
        elif self._pages.any and now - self._word_at >= _WORD_SECONDS:
            self._word_at = now
            self.send({"type": "word"})

    def _adopt(self, asked: dict[str, Any]) -> None:
        """Switches to the cluster that replaced this dashboard's, if there is one."""
        cluster = successor_of(self._shown.cluster)
        if cluster is None:
            return
        self._shown.leave()
        self._attach(cluster.timeline, cluster.dashboard_means())
        self.send({"type": "reset"})  # the page sends again which views it shows


def of_recording(timeline: Timeline, views: Sequence[str] = (), player: Player[Timeline] | None = None) -> Dashboard:
    """Returns a dashboard of a timeline without controllable ranks: a recording, or a job that is only followed.

    Args:
        timeline: the timeline to show.
        views: names of views, each in a tab of its own; if empty, those that need no ranks.
        player: replays a recording into the timeline; None if nothing is replayed.
    """
    made = Dashboard(timeline, views=views or None, player=player)
    if not views:
        made.tabs = [names for names in made.tabs if not VIEWS[names[0]].ranks]
    return made
