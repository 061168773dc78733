"""What a dashboard shows: one timeline, the ranks behind it, and what is computed from them for its views.

[Note: at most a fiftieth]
A round over the facts of the views takes some milliseconds (more with many ranks and parameters). The next one waits
fifty times as long, and at least a second. What no page shows is not computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..analysis.step_metrics import milliseconds, typical
from ..errors import DdpLabError
from ..timeline import steady_steps
from ..timeline.tables.span_columns import joined
from ..timeline.tables.step_table import STEP_FIELDS
from ..timeline.timeline import Timeline
from .cluster_panel import ProcessWatch, rank_rows
from .controls import CollectiveStage, Comparison, Controls, WhatIfStage, no_ranks
from .life import life_of, name_of, nothing_yet
from .paint.scene_svg import empty_svg
from .step_feed import StepFeed
from .views import FACTS, VIEWS, Selection, StepFrames, View, bucket_gradients_page, cell_rows, layout_words

if TYPE_CHECKING:
    from ..control.ranks import Ranks
    from ..simulation.link_model import CommModel
    from ..timeline.recorded.player import Player

__all__ = ["DashboardStatistics", "Overhead", "ShownTraining", "ViewFacts"]

_RANKS_SECONDS, _MEMORY_SECONDS = 0.5, 5.0
_OVERHEAD_SECONDS = 1.0
_SHARE, _LEAST_SECONDS = 50, 1.0
_WINDOW_SECONDS, _READINGS, _FEW_STEPS = 10.0, 20, 20  # of the overhead
_BEGIN, _END = map(STEP_FIELDS.index, ("backward_begin", "backward_end"))


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


def _asked() -> dict[str, View]:
    """What is asked of a timeline, by its name in the trait `facts`; other facts come with steps and controls."""
    return {name: one for name, one in {**VIEWS, **FACTS}.items() if not one.fed}


@dataclass(frozen=True)
class _Look:
    """What a page shows now."""

    views: frozenset[str] = frozenset()
    reducer: int | None = None
    between: tuple[int, int] | None = None
    step: int | None = None


class ViewFacts:
    """Keeps the facts of the views that are on a page up to date."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._looks: dict[str, _Look] = {}  # by page
        self._next = 0.0
        self._done: object = None

    def look(
        self,
        page: str,
        views: Sequence[str],
        reducer: int | None,
        between: tuple[int, int] | None = None,
        step: int | None = None,
    ) -> None:
        """Notes which views a page shows now, for which model, the first and last step that a reader chose, and the
        one that is shown (None: the newest)."""
        self._looks.pop(page, None)
        if views:
            self._looks[page] = _Look(frozenset(views), reducer, between, step)
        self._next = 0.0

    def forget(self) -> None:
        """Forgets what was returned: the timeline was cleared."""
        self._next, self._done = 0.0, None

    def update(self, *, force: bool = False, kept: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """Returns what has changed, by the name of the view.

        Args:
            force: compute now, whatever it costs.
            kept: views that need not be on a page.
        """
        seen = [VIEWS[name] for one in self._looks.values() for name in sorted(one.views & VIEWS.keys())]
        asked = _asked()
        wanted = asked.keys() & {*kept, *(name for view in seen for name in (view.name, *view.also))}
        last = next((one for one in reversed(self._looks.values()) if one.reducer is not None), _Look())
        key = (self._timeline.version, last, frozenset(wanted))
        if not wanted or key == self._done or (not force and time.monotonic() < self._next):
            return {}
        begin = time.thread_time()
        trained = [one.reducer for one in self._timeline.reducers() if one.last_step >= 0]
        model = next((one for one in reversed(trained) if last.reducer in (None, one)), None)
        made: dict[str, dict[str, Any]] = {}
        chosen = Selection(model, between=last.between, step=last.step)
        for name, view in asked.items():
            if name in wanted and not view.model:
                made[name] = dict(view.page(view.facts(self._timeline, Selection())))
            elif name in wanted and model is not None:
                made[name] = {"reducer": model, **view.page(view.facts(self._timeline, chosen))}
        if not made:
            return {}
        self._done = key
        self._next = time.monotonic() + max(_LEAST_SECONDS, _SHARE * (time.thread_time() - begin))
        return made


class Overhead:
    """Counts events and CPU time; `read` returns what the browser shows."""

    def __init__(self, timeline: Timeline, event_cost: Callable[[], float | None] | None) -> None:
        """`event_cost()` measures the cost of one event in ns on a rank, or returns None; it is called once."""
        self._timeline = timeline
        self._event_cost = event_cost
        self._ns: float | None = None
        self._samples: deque[tuple[float, float]] = deque()  # time, CPU time of the dashboard so far
        self._spent = 0.0
        # Events and last step, summed over the ranks, of readings since the newest model's first step.
        self._counts: deque[tuple[int, int]] = deque(maxlen=_READINGS)
        self._before = 0  # events until then

    def spend(self, seconds: float) -> None:
        """Adds CPU time of the dashboard."""
        self._spent += seconds

    def read(self) -> dict[str, Any]:
        """Returns events per step and rank, ns per event, ms per step of the model that trained last, the kernel's
        share of a core, and a sentence about old steps that were down-sampled."""
        now = time.monotonic()
        model = self._timeline.model()
        step_ms = None if model is None else self._step_ms(model.reducer)
        self._samples.append((now, self._spent))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        if step_ms and self._ns is None and self._event_cost is not None:
            self._ns, self._event_cost = self._event_cost(), None
        ranks = self._timeline.ranks()
        events, steps = sum(one.events for one in ranks), sum(one.step for one in ranks)
        if self._counts and steps < self._counts[-1][1]:  # another model trains
            self._before = self._counts[-1][0]
            self._counts.clear()
        if ranks and all(one.step >= 0 for one in ranks):
            self._counts.append((events, steps))
        return {
            "events": self._events_a_step(),
            "ns": self._ns,
            "step": step_ms,
            "kept": "" if model is None else str(self._timeline.kept(model.reducer)),
            "kernel": (self._spent - before) / (now - since) if now - since > 1.0 else None,
        }

    def _events_a_step(self) -> float | None:
        """Events per step and rank, over the last readings, or else since the model's first step."""
        if not self._counts:
            return None
        (first, step), (last, newest) = self._counts[0], self._counts[-1]
        if newest <= step or last <= first:
            ranks = len(self._timeline.ranks())
            few = len(self._counts) == 1 and newest < _FEW_STEPS * ranks
            if few or (not self._before and len(self._timeline.reducers()) > 1):
                return None  # many of these events may be those of the model's construction, or of another model
            first, step = self._before, -ranks
        return (last - first) / (newest - step) if newest > step and last > first else None

    def _step_ms(self, reducer: int) -> float | None:
        """A step of the model, as the overview tells it; its backward if no end of a previous step is known."""
        layout = self._timeline.analysis_layout(reducer)
        if layout is None:
            return None
        steps = layout.warm(steady_steps.WARM_UP, steady_steps.ANALYSED_STEPS)
        views = self._timeline.views_of(reducer, steps)
        number = joined([one.step for one in views])
        whole = joined([one.communication.step_ms(milliseconds(one.steps[:, _END], one.previous_end)) for one in views])
        backward = joined([milliseconds(one.steps[:, _END], one.steps[:, _BEGIN]) for one in views])
        found = [typical(number, ms) for ms in (whole, backward)]
        return next((ms for ms in found if ms == ms), None)


class ShownTraining:
    """A timeline and its ranks, as the views need them; a dashboard that switches to another cluster gets another one.

    The dashboard's thread calls it, and holds the dashboard's lock, except for `ask_ranks`.

    Args:
        timeline: the timeline to show.
        player: replays a recording into it, or None.
        send: sends a message to the pages.
        show: sends the traits that changed, and of those with a key for each part the parts that changed.
        wake: makes the dashboard's thread look again soon.
        status, request_inspection, link, event_cost, lost, collectives, cluster: see `Dashboard`.

    Attributes:
        frames: the steps that the timeline holds.
        means: what the browser may offer, and its text before the first step.
        commands: the requests of the browser, and what obeys them.
    """

    def __init__(
        self,
        timeline: Timeline,
        player: Player[Timeline] | None,
        *,
        send: Callable[..., None],
        show: Callable[[Mapping[str, Any]], None],
        wake: Callable[[], None],
        status: Callable[[], Sequence[Any]] | None = None,
        request_inspection: Callable[[int, int], None] | None = None,
        link: Callable[[], CommModel | None] | None = None,
        event_cost: Callable[[], float | None] | None = None,
        lost: Callable[[], Mapping[int, str]] | None = None,
        collectives: CollectiveStage | None = None,
        cluster: Ranks | None = None,
    ) -> None:
        self.timeline, self.cluster = timeline, cluster
        self._send, self._show = send, show
        self._status, self._lost, self._link = status, lost, link or (lambda: None)
        self._comparison = Comparison(timeline, request_inspection)
        self.feed = StepFeed(timeline, send)
        self._facts = ViewFacts(timeline)
        self._overhead = Overhead(timeline, event_cost)
        self._overhead_at = self._ranks_at = 0.0
        self.stage = collectives if collectives is not None else CollectiveStage(no_ranks, dict)
        self._linked: object = None
        self._generations: object = None
        self._version = -1  # of the timeline, when it was read last
        self._seconds: deque[float] = deque(maxlen=1_000)
        # The table of ranks and what has stopped; replaced by `ask_ranks`, shown by `update`.
        self._rows: list[dict[str, Any]] = []
        self._processes, self._memory, self._memory_at = ProcessWatch(), dict[int, dict[str, int]](), -_MEMORY_SECONDS
        self._life: dict[str, Any] = {}
        self._name = ""
        self.nothing = nothing_yet(played=player is not None, recorded=timeline.recorded, ranks=cluster is not None)
        means = {"compare": request_inspection, "link": link, "control": cluster}
        self.means = {**{name: one is not None for name, one in means.items()}, "nothing": self.nothing}
        self.controls = Controls(timeline, cluster, wake)
        self._what_if = WhatIfStage(timeline, self._link, None if cluster is None else cluster.training, wake)

    @property
    def frames(self) -> StepFrames:
        """The steps that were sent."""
        return self.feed.frames

    @property
    def commands(self) -> dict[str, Callable[[dict[str, Any]], object]]:
        """What a page may ask for, and what does it."""
        return {
            "hello": lambda asked: self.feed.resend(),
            "look": self._look,
            "between": lambda asked: self.feed.send_between(
                *(int(asked[name]) for name in ("reducer", "first", "last"))
            ),
            "compare": lambda asked: self._comparison.ask(int(asked["reducer"]), self.frames),
            "gradients": self._send_gradients,
            "collective": self.stage.ask,
            "what if": self._what_if.ask,
            "what if run": self._what_if.run,
            **dict.fromkeys(("step", "fault", "reconfigure", "watch"), self.controls.ask),
        }

    @property
    def any_running(self) -> bool:
        """Whether a rank runs a cell."""
        return self.cluster is not None and any(row.get("state") == "running" for row in self._rows)

    def statistics(self) -> DashboardStatistics:
        """Returns what was sent."""
        seconds = sorted(self._seconds)
        return DashboardStatistics(
            updates=len(seconds),
            steps=self.feed.sent_steps,
            bytes=self.feed.sent_bytes,
            median_ms=seconds[len(seconds) // 2] * 1e3 if seconds else None,
        )

    # ---- pictures -----------------------------------------------------------------------------------------

    def svg(self, name: str) -> str:
        """Returns a view as a self-contained SVG picture; for the timeline, a step that stands for the newest ones."""
        view = VIEWS[name]
        if view.model and self.frames.latest() is None:
            return empty_svg(self.nothing)
        return view.svg(self._facts_of(view))

    def words(self, name: str) -> str:
        """Returns the content of the picture as text."""
        view = VIEWS[name]
        if view.model and not self.frames.reducers():
            return self.nothing
        return view.words(self.timeline, self._facts_of(view)) or self.nothing

    def _facts_of(self, view: View) -> Any:
        """What a picture shows: of the control with the view's name if there is one, else of the timeline."""
        controls = {"collectives": lambda: self.stage.shown, "what_if": self._what_if.snapshot, **self.controls.facts}
        if view.name in controls:
            return controls[view.name]()
        frame = self.frames.latest()
        return view.facts(self.timeline, Selection(None if frame is None or not view.model else frame.reducer))

    # ---- the thread ---------------------------------------------------------------------------------------

    def ask_ranks(self, force: bool = False) -> float:
        """Queries the state of the ranks twice per second; returns seconds of CPU time.

        The lock, which the user's cells need at their end, is not held, because an unresponsive rank takes time.
        """
        begin, now = time.thread_time(), time.monotonic()
        if not force and now - self._ranks_at < _RANKS_SECONDS:
            return 0.0
        self._ranks_at = now
        try:
            records = self._status() if self._status is not None else ()
            lost = self._lost() if self._lost is not None else {}
            stopped = False
        except DdpLabError:
            records, lost, stopped = (), {}, True
        self._rows = rank_rows(self.timeline.ranks(), records, stopped=stopped, recorded=self.timeline.recorded)
        if now - self._memory_at >= _MEMORY_SECONDS:
            self._memory_at = now
            self._memory = {rank: {"memory": used.memory} for rank, used in self._processes.look(records).items()}
        self._rows = [row | self._memory.get(row["rank"], {}) for row in self._rows]
        self._life = life_of(self.cluster, lost)
        self._name = name_of(self.cluster)
        return time.thread_time() - begin

    def spend(self, seconds: float) -> None:
        """Counts CPU time of the dashboard."""
        self._overhead.spend(seconds)

    def answer(self) -> bool:
        """Shows the answers to requests; returns whether one is expected."""
        busy = self.stage.running or self._comparison.pending
        self._comparison.update(self.frames)
        answers = {"collectives": self.stage.told(), "inspection": self._comparison.shown}
        self._show({"control": self.controls.state(), "facts": answers | self.controls.shown() | self._what_if.shown()})
        return busy

    def update(self, force: bool = False, *, measure: bool = True) -> bool:
        """Reads new events from the timeline and sends them; returns whether there were any.

        Args:
            force: send also steps that have just begun.
            measure: show the overhead, once per second.
        """
        begin = time.thread_time()
        version = self.timeline.version  # before the batches are taken: a later one is seen in the next round
        changed = version != self._version
        with self.timeline.snapshot_of_events():
            if changed:
                self._version = version
                if self.feed.take():
                    self._facts.forget()
                    self._show({"facts": {name: {} for name, one in _asked().items() if one.model}})
                self._show_assignments()
            self._show({"ranks": self._rows, "status": {"life": self._life, "cluster": self._name}})
            sent = self.feed.send(force)
            self.update_facts()
            spent = time.thread_time() - begin
            self._overhead.spend(spent + self.controls.take_spent())
            if sent:
                self._seconds.append(spent)
            if measure and time.monotonic() - self._overhead_at >= _OVERHEAD_SECONDS:
                self._overhead_at = time.monotonic()
                self._show({"status": {"overhead": self._overhead.read()}})
        return sent or changed

    def update_facts(self, force: bool = False, kept: Collection[str] = ()) -> None:
        """Shows the facts of the views that are on a page, and of `kept` ones; `force`: now, whatever it costs."""
        self._show({"facts": self._facts.update(force=force, kept=kept)})

    def leave(self) -> None:
        """Ends the controls, and clears what only this training has."""
        self.controls.stop()
        self._show(
            {
                "facts": {name: {} for name in (*_asked(), "inspection")},
                "models": {"assignments": {}, "links": {}},
                "status": {"overhead": {}, "life": {}},
            }
        )

    def _show_assignments(self) -> None:
        """Sends the bucket layouts, and the expected times of their all-reduces."""
        known = sorted(
            (one.reducer, generation) for one in self.timeline.reducers() for generation in one.generations[-3:]
        )
        if known != self._generations:
            self._generations = known
            described = {f"{of}:{generation}": self.feed.assignment(of, generation) for of, generation in known}
            words = {key: layout_words(one).as_dict() for key, one in described.items()}
            layouts = {
                key: {**one, "cells": cell_rows(one), "words": words[key]} for key, one in described.items() if one
            }
            self._show({"models": {"assignments": layouts}})
        link = self._link()
        if link is not None and (link, known) != self._linked:
            self._linked = (link, known)
            links = {f"{of}:{generation}": self.feed.expected(of, generation, link) for of, generation in known}
            self._show({"models": {"links": links}})

    def _look(self, asked: dict[str, Any]) -> None:
        """Notes which views a page shows."""
        seen = (str(asked["id"]), asked["views"], asked.get("reducer"))
        ends = asked.get("between")
        between = (int(ends[0]), int(ends[1])) if ends else None
        self._facts.look(*seen, between, None if asked.get("step") is None else int(asked["step"]))
        self.controls.look(*seen)
        self._what_if.look(*seen)

    def _send_gradients(self, asked: dict[str, Any]) -> None:
        """Sends when each gradient of a bucket was ready."""
        reducer, step, bucket = (int(asked[name]) for name in ("reducer", "step", "bucket"))
        self._send(bucket_gradients_page(self.timeline, reducer, step, bucket))
