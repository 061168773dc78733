"""The dashboard: the live views of a `Timeline` as one widget with tabs, or a single view."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import traitlets

from ..errors import DdpLabError
from ..timeline.timeline import Timeline
from ..views import pictures, scenes
from ..views.catalogue import TABS, VIEWS
from ..views.model_map import cell_rows
from ..views.paint.scene_svg import empty_svg, framed
from ..views.step_frames import StepFrames
from . import bundle
from .cluster_panel.rows import rank_rows
from .controls.collectives import CollectiveStage, no_ranks
from .controls.controls import Controls
from .controls.inspection import Comparison
from .controls.what_if import WhatIfStage
from .life import REPLACED, CellEnds, life_of, name_of, nothing_yet, publish, successor_of
from .live_widget import LiveWidget
from .overhead import Overhead
from .saved_picture import SavedPicture
from .slow_facts import SlowFacts, bucket_gradients
from .step_feed import StepFeed

if TYPE_CHECKING:
    from ..control.ranks import Ranks
    from ..simulation.link_model import LinkModel
    from ..timeline.recorded.player import Player

__all__ = ["Dashboard", "DashboardStatistics", "of_recording"]

RATE = 30.0  # refreshes per second while events arrive
_RANKS_SECONDS = 0.5
_OVERHEAD_SECONDS = 1.0
_WORD_SECONDS = 0.5  # between two messages that tell a page that the kernel is alive
_CALM_SECONDS = 5.0  # without news, after which nothing is sent: servers cull idle kernels
_OF_STEPS = ("findings", "late", "readiness", "norms")  # traits about steps


@dataclass(frozen=True)
class DashboardStatistics:
    """What a dashboard sent to the browser.

    Attributes:
        updates: messages with steps (at most the last 1,000).
        steps: steps in all messages; a step that grew between two messages counts twice.
        bytes: size of the steps' arrays.
        median_ms: CPU time of one update, from reading the timeline to sending the message; None before the first.
    """

    updates: int
    steps: int
    bytes: int
    median_ms: float | None


class Dashboard(LiveWidget):
    """A live view of a timeline. Displayed in a notebook, it updates itself, even while a cell runs.

    It reads the timeline on a thread of its own and sends new steps to the browser, at most 30 times per second. The
    browser keeps the last 500 steps of each model, so choosing a step, zooming and the details of a bucket work
    without the kernel. A saved notebook keeps the last picture (see `saved_picture`).

    Args:
        timeline: the timeline to show.
        views: names of views (`ddp_lab.views.catalogue`), each in a tab of its own; None for all of them.
        status: returns a record for each rank (`Cluster.status`); called twice per second on the thread. None: use the
            states that the ranks reported to the timeline.
        request_inspection: requests norm and checksum of a reducer's gradients after a step, without waiting; the
            answers arrive through the timeline. None: gradients cannot be compared.
        link: returns the measured `LinkModel`, or None if it was not measured yet; it is compared with the gradient
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
    assignments = traitlets.Dict().tag(sync=True)
    ranks: Any = traitlets.List().tag(sync=True)
    tabs: Any = traitlets.List().tag(sync=True)
    inspection = traitlets.Dict().tag(sync=True)
    findings = traitlets.Dict().tag(sync=True)
    late = traitlets.Dict().tag(sync=True)
    readiness = traitlets.Dict().tag(sync=True)
    links = traitlets.Dict().tag(sync=True)
    collective = traitlets.Dict().tag(sync=True)
    overhead = traitlets.Dict().tag(sync=True)
    control = traitlets.Dict().tag(sync=True)
    stepping = traitlets.Dict().tag(sync=True)
    rehearsal = traitlets.Dict().tag(sync=True)
    reconfiguration = traitlets.Dict().tag(sync=True)
    watching = traitlets.Dict().tag(sync=True)
    norms = traitlets.Dict().tag(sync=True)
    prediction = traitlets.Dict().tag(sync=True)
    trial = traitlets.Dict().tag(sync=True)
    playback = traitlets.Dict().tag(sync=True)
    means = traitlets.Dict().tag(sync=True)
    kept = traitlets.Dict().tag(sync=True)
    life = traitlets.Dict().tag(sync=True)
    cluster = traitlets.Unicode().tag(sync=True)  # its name

    def __init__(
        self,
        timeline: Timeline,
        *,
        views: Sequence[str] | None = None,
        player: Player[Timeline] | None = None,
        **means: Any,
    ) -> None:
        if views is None:
            tabs = tuple(names for names in TABS if names != ("collectives",) or means.get("collectives") is not None)
        else:
            tabs = tuple((name,) for name in views)
        if not tabs or not {name for names in tabs for name in names} <= set(VIEWS):
            raise ValueError(f"views={list(views or ())} is not valid; choose from {', '.join(VIEWS)}")
        self.player = player
        self._word_at = 0.0
        self._active_at: float | None = time.monotonic()  # of the last news; None: nothing happens
        self._seconds: deque[float] = deque(maxlen=1_000)
        self._frozen = False
        super().__init__(self._tick, RATE, "here", tabs=[list(names) for names in tabs])
        self._picture = SavedPicture(self.token)
        self._cell_ends = CellEnds(self._after_cell)
        self._attach(timeline, **means)
        self._know_commands()
        self._listen()
        self._tick()
        self._refresher.start()

    def _attach(
        self,
        timeline: Timeline,
        *,
        status: Callable[[], Sequence[Any]] | None = None,
        request_inspection: Callable[[int, int], None] | None = None,
        link: Callable[[], LinkModel | None] | None = None,
        event_cost: Callable[[], float | None] | None = None,
        lost: Callable[[], Mapping[int, str]] | None = None,
        collectives: CollectiveStage | None = None,
        cluster: Ranks | None = None,
    ) -> None:
        """Switches to this timeline and these ranks."""
        self._timeline, self._cluster = timeline, cluster
        self._status, self._lost = status, lost
        self._comparison = Comparison(timeline, request_inspection)
        self._feed = StepFeed(timeline, lambda *message: self.send(*message))
        self._slow = SlowFacts(timeline)
        self._overhead = Overhead(timeline, event_cost)
        self._overhead_at = 0.0
        self._stage = collectives if collectives is not None else CollectiveStage(no_ranks, dict)
        self._link = link
        self._linked: object = None
        self._shown_version = -1
        self._saved_version = -1
        self._generations: object = None
        self._ranks_at = 0.0
        # The table of ranks and what has stopped; replaced by the code that queries them, shown by `_update`.
        self._rows: list[dict[str, Any]] = []
        self._life: dict[str, Any] = {}
        self._name = ""
        self._nothing = nothing_yet(timeline, cluster, self.player)
        means = {"compare": request_inspection, "link": link, "control": cluster}
        self.means = {**{name: one is not None for name, one in means.items()}, "nothing": self._nothing}
        training = None if cluster is None else cluster.training
        self._controls = Controls(timeline, cluster, self._refresher.wake)
        self._what_if = WhatIfStage(timeline, link, training, self._refresher.wake)

    # ---- for the user -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Sends new steps to the browser now."""
        spent = self._ask_ranks(force=True)
        with self._lock:
            self._overhead.spend(spent)
            self._update(time.monotonic(), force=True)

    def snapshot(self) -> None:
        """Updates the picture that the notebook keeps, wherever the dashboard is displayed.

        This happens automatically at the end of every notebook cell.
        """
        with self._lock:
            if not self._frozen:
                self._update(time.monotonic(), force=True)
            self._saved_version = self._timeline.version
            self._show(self._slow.update(force=True))
            self.kept = self._feed.newest()
        self._picture.replace(self.svg(), self._words())

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the live view, with a picture for viewers without widgets."""
        data, metadata = self._live(**kwargs)
        return {**data, "image/svg+xml": self.svg(), "text/plain": self._words()}, metadata

    def _ipython_display_(self) -> None:
        """Displays the live view and, below it, the picture that a saved notebook keeps ([Note: two outputs])."""
        self.refresh()
        publish(*self._live())
        self._picture.display(self.svg(), self._words())
        self._cell_ends.begin()
        self._controls.go_on()
        self._refresher.start()

    def _after_cell(self) -> None:
        """Updates the picture in the notebook."""
        if self._frozen:
            self._cell_ends.end()
        elif self._saved_version != self._timeline.version:
            self.snapshot()

    def stop(self) -> None:
        """Shows the last events and stops updating; the view remains, also in the saved notebook."""
        if self._frozen:
            return
        self.refresh()
        self.snapshot()
        self._frozen = True
        self._frames.freeze()
        self._controls.stop()
        self._show(self._controls.traits())
        self._refresher.stop()
        self._show({"playback": {}})  # a stopped dashboard has no replay controls
        self.send({"type": "word", "last": True})

    def close(self) -> None:
        """Stops, and removes the live view from the notebook."""
        self._frozen = True
        if "_controls" in self.__dict__:  # else its arguments were invalid
            self._controls.stop()
            self._refresher.stop()
            self._cell_ends.end()
        super().close()

    def statistics(self) -> DashboardStatistics:
        """Returns how much the dashboard has sent, and its CPU time."""
        with self._lock:
            seconds = sorted(self._seconds)
            return DashboardStatistics(
                updates=len(seconds),
                steps=self._feed.sent_steps,
                bytes=self._feed.sent_bytes,
                median_ms=seconds[len(seconds) // 2] * 1e3 if seconds else None,
            )

    def svg(self) -> str:
        """Returns the first view as a self-contained SVG picture; for the timeline, the newest complete step."""
        with self._lock:
            frame = self._frames.latest()
            if self.tabs[0][0] == "collectives":
                return pictures.collective_svg(self._stage.shown)
            if self.tabs[0][0] == "what_if":
                return framed(scenes.what_if_scene(self._what_if.snapshot()))
            control = self._controls.picture(self.tabs[0][0])
            if control is not None:
                return control
            if frame is None:
                return empty_svg(self._nothing)
            assignment = self._feed.assignment(frame.reducer, frame.generation)
            return pictures.picture(self.tabs[0][0], self._timeline, frame, assignment)

    def _words(self) -> str:
        """Returns the content of the picture as text."""
        if self.tabs[0][0] == "collectives":
            return str(self._stage.shown or pictures.NO_COLLECTIVE)
        if self.tabs[0][0] == "what_if":
            return scenes.what_if_words(self._what_if.snapshot())
        with self._lock:
            begun = bool(self._frames.reducers())
        return self._timeline.summary() if begun else self._nothing

    @property
    def _frames(self) -> StepFrames:
        return self._feed.frames

    # ---- the thread -------------------------------------------------------------------------------------

    def _tick(self) -> bool:
        """One round of the thread; returns whether there was something to do."""
        spent = self._ask_ranks()
        with self._lock:
            self._overhead.spend(spent)
            now = time.monotonic()
            busy = self._commands.obey() or self._stage.running
            if self.player is not None and not self._frozen:
                busy = self.player.advance() or busy
                self._show({"playback": self.player.told()})
            self._show({"collective": self._stage.told()})
            if self._comparison.pending:
                busy = True
                self._comparison.update(self._frames)
            self._show({"inspection": self._comparison.shown, **self._controls.traits(), **self._what_if.traits()})
            if not self._frozen:
                if self._cell_ends.gone:
                    # All widgets of a kernel are restored with a page: many large ones would take it too long.
                    self._show({"life": REPLACED, "kept": {}})
                    self._controls.rest()
                    self._refresher.stop()
                    return busy
                busy = self._update(now) or busy
                self._give_word(now, busy)
                return busy
            self._show(self._slow.update())
            if not busy and not self._feed.unsent:
                self._refresher.stop()
            self._feed.send()
            return busy

    def _update(self, now: float, force: bool = False) -> bool:
        """Reads new events from the timeline and sends them; returns whether there were any."""
        begin = time.thread_time()
        version = self._timeline.version
        changed = version != self._shown_version
        if changed:
            self._shown_version = version
            if self._feed.take():
                self._slow.forget()
                self._show({name: {} for name in _OF_STEPS})
            self._show_assignments()
        self._show({"ranks": self._rows, "life": self._life, "cluster": self._name})
        sent = self._feed.send(force)
        self._show(self._slow.update())
        spent = time.thread_time() - begin
        self._overhead.spend(spent + self._controls.take_spent())
        if sent:
            self._seconds.append(spent)
        if self._active_at is not None and now - self._overhead_at >= _OVERHEAD_SECONDS:
            self._overhead_at = now
            self._show({"overhead": self._overhead.read(self._feed.recent(20))})
        return sent or changed

    def _give_word(self, now: float, busy: bool) -> None:
        """Tells the pages in view that the kernel is alive, as long as something happens."""
        if busy or (self._cluster is not None and any(row.get("state") == "running" for row in self._rows)):
            self._active_at = now
        if self._active_at is None:
            return
        if now - self._active_at > max(_CALM_SECONDS, 2e-3 * (self.overhead.get("step") or 0.0)):  # two steps, in ms
            self._active_at = None
            self._show({"overhead": {**self.overhead, "kernel": None}})
            self.send({"type": "word", "last": True})
        elif self._pages.any and now - self._word_at >= _WORD_SECONDS:
            self._word_at = now
            self.send({"type": "word"})

    def _show_assignments(self) -> None:
        """Sends the bucket layouts, and the expected times of their all-reduces."""
        known = sorted(
            (one.reducer, generation) for one in self._timeline.reducers() for generation in one.generations[-3:]
        )
        if known != self._generations:
            self._generations = known
            described = {f"{of}:{generation}": self._feed.assignment(of, generation) for of, generation in known}
            self.assignments = {key: {**one, "cells": cell_rows(one)} for key, one in described.items() if one}
        link = self._link() if self._link is not None else None
        if link is not None and (link, known) != self._linked:
            self._linked = (link, known)
            self.links = {f"{of}:{generation}": self._feed.expected(of, generation, link) for of, generation in known}

    def _know_commands(self) -> None:
        """Registers the requests of the browser."""
        on = self._commands.on
        on("hello", lambda asked: self._feed.resend())
        on("look", self._look)
        on("compare", lambda asked: self._comparison.ask(int(asked["reducer"]), self._frames))
        on("gradients", self._send_gradients)
        on("collective", lambda asked: self._stage.ask(asked))
        on("adopt", self._adopt)
        on("what if", lambda asked: self._what_if.ask(asked))
        on("what if run", lambda asked: self._what_if.run(asked))
        if self.player is not None:
            on("player", self.player.obey)
        for kind in ("step", "fault", "reconfigure", "watch"):
            on(kind, lambda asked: self._controls.ask(asked))

    def _adopt(self, asked: dict[str, Any]) -> None:
        """Switches to the cluster that replaced this dashboard's, if there is one."""
        cluster = successor_of(self._cluster)
        if cluster is None:
            return
        self._controls.stop()
        self._attach(cluster.timeline, **cluster.dashboard_means())
        nothing: dict[str, Any] = {name: {} for name in (*_OF_STEPS, "assignments", "links", "inspection", "overhead")}
        self._show({**nothing, "life": {}})
        self.send({"type": "reset"})  # the page sends again which views it shows

    def _look(self, asked: dict[str, Any]) -> None:
        """Notes which views a page shows."""
        seen = (str(asked["id"]), asked["views"], asked.get("reducer"))
        self._slow.look(*seen)
        self._controls.look(*seen)
        self._what_if.look(*seen)

    def _send_gradients(self, asked: dict[str, Any]) -> None:
        """Sends when each gradient of a bucket was ready."""
        reducer, step, bucket = (int(asked[name]) for name in ("reducer", "step", "bucket"))
        self.send(bucket_gradients(self._timeline, reducer, step, bucket))

    def _ask_ranks(self, force: bool = False) -> float:
        """Queries the state of the ranks twice per second; returns seconds of CPU time.

        Does not hold the lock, which the user's cells need at their end, because an unresponsive rank takes time.
        """
        begin, now = time.thread_time(), time.monotonic()
        if self._frozen or (not force and now - self._ranks_at < _RANKS_SECONDS):
            return 0.0
        self._ranks_at = now
        try:
            records = self._status() if self._status is not None else ()
            lost = self._lost() if self._lost is not None else {}
            stopped = False
        except DdpLabError:
            records, lost, stopped = (), {}, True
        self._rows = rank_rows(self._timeline.ranks(), records, stopped=stopped, recorded=self._timeline.recorded)
        self._life = life_of(self._cluster, lost)
        self._name = name_of(self._cluster)
        return time.thread_time() - begin


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
