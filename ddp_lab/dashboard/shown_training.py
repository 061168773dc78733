"""What a dashboard shows: one timeline, the ranks behind it, and what is computed from them for its views."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DdpLabError
from ..timeline.timeline import Timeline
from .cluster_panel.processes import ProcessWatch
from .cluster_panel.rows import rank_rows
from .controls.collectives import CollectiveStage, no_ranks
from .controls.controls import Controls
from .controls.inspection import Comparison
from .controls.what_if import WhatIfStage
from .life import life_of, name_of, nothing_yet
from .overhead import Overhead
from .paint.scene_svg import empty_svg, framed
from .slow_facts import SlowFacts, bucket_gradients
from .step_feed import StepFeed
from .views import pictures, scenes
from .views.model_map import cell_rows
from .views.step_frames import StepFrames
from .views.timeline_scene import step_to_draw

if TYPE_CHECKING:
    from ..control.ranks import Ranks
    from ..simulation.link_model import CommModel
    from ..timeline.recorded.player import Player

__all__ = ["DashboardStatistics", "ShownTraining"]

_RANKS_SECONDS, _MEMORY_SECONDS = 0.5, 5.0
_OVERHEAD_SECONDS = 1.0
_OF_STEPS = (
    "overview",
    "strip",
    "findings",
    "late",
    "parts",
    "readiness",
    "norms",
    "parameter_groups",
)  # traits about steps
# Traits that another training has anew.
_OF_ONE = (*_OF_STEPS, "groups", "assignments", "links", "inspection", "overhead")


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


class ShownTraining:
    """A timeline and its ranks, as the views need them; a dashboard that switches to another cluster gets another one.

    The dashboard's thread calls it, and holds the dashboard's lock, except for `ask_ranks`.

    Args:
        timeline: the timeline to show.
        player: replays a recording into it, or None.
        send: sends a message to the pages.
        show: sends the traits that changed.
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
        self._slow = SlowFacts(timeline)
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
        return self.feed.frames

    @property
    def commands(self) -> dict[str, Callable[[dict[str, Any]], object]]:
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

    def svg(self, view: str) -> str:
        """Returns a view as a self-contained SVG picture; for the timeline, a step that stands for the newest ones."""
        frame = self.frames.latest()
        if view == "collectives":
            return pictures.collective_svg(self.stage.shown)
        if view == "what_if":
            return framed(scenes.what_if_scene(self._what_if.snapshot()))
        if view == "groups":
            return framed(scenes.SCENES[view](self.timeline, None, None))
        control = self.controls.picture(view)
        if control is not None:
            return control
        if frame is None:
            return empty_svg(self.nothing)
        if view == "timeline" and (step := step_to_draw(self.timeline, frame.reducer)[0]) is not None:
            frame = self.frames.frame(frame.reducer, step) or frame
        return pictures.picture(view, self.timeline, frame, self.feed.assignment(frame.reducer, frame.generation))

    def words(self, view: str) -> str:
        """Returns the content of the picture as text."""
        if view == "collectives":
            return str(self.stage.shown or pictures.NO_COLLECTIVE)
        if view == "what_if":
            return scenes.what_if_words(self._what_if.snapshot())
        if view == "groups":
            return self.timeline.group_summary() or self.nothing
        return self.timeline.summary() if self.frames.reducers() else self.nothing

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
        self._show({"collective": self.stage.told()})
        self._comparison.update(self.frames)
        self._show({"inspection": self._comparison.shown, **self.controls.traits(), **self._what_if.traits()})
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
        with self.timeline.taken_once():
            if changed:
                self._version = version
                if self.feed.take():
                    self._slow.forget()
                    self._show({name: {} for name in _OF_STEPS})
                self._show_assignments()
            self._show({"ranks": self._rows, "life": self._life, "cluster": self._name})
            sent = self.feed.send(force)
            self.update_facts()
            spent = time.thread_time() - begin
            self._overhead.spend(spent + self.controls.take_spent())
            if sent:
                self._seconds.append(spent)
            if measure and time.monotonic() - self._overhead_at >= _OVERHEAD_SECONDS:
                self._overhead_at = time.monotonic()
                self._show({"overhead": self._overhead.read()})
        return sent or changed

    def update_facts(self, force: bool = False) -> None:
        """Shows the results of slow computations; `force`: now, whatever it costs."""
        self._show(self._slow.update(force=force))

    def leave(self) -> None:
        """Ends the controls, and clears what only this training has."""
        self.controls.stop()
        self._show({**{name: {} for name in _OF_ONE}, "life": {}})

    def _show_assignments(self) -> None:
        """Sends the bucket layouts, and the expected times of their all-reduces."""
        known = sorted(
            (one.reducer, generation) for one in self.timeline.reducers() for generation in one.generations[-3:]
        )
        if known != self._generations:
            self._generations = known
            described = {f"{of}:{generation}": self.feed.assignment(of, generation) for of, generation in known}
            layouts = {key: {**one, "cells": cell_rows(one)} for key, one in described.items() if one}
            self._show({"assignments": layouts})
        link = self._link()
        if link is not None and (link, known) != self._linked:
            self._linked = (link, known)
            links = {f"{of}:{generation}": self.feed.expected(of, generation, link) for of, generation in known}
            self._show({"links": links})

    def _look(self, asked: dict[str, Any]) -> None:
        """Notes which views a page shows."""
        seen = (str(asked["id"]), asked["views"], asked.get("reducer"))
        ends = asked.get("between")
        between = (int(ends[0]), int(ends[1])) if ends else None
        self._slow.look(*seen, between, None if asked.get("step") is None else int(asked["step"]))
        self.controls.look(*seen)
        self._what_if.look(*seen)

    def _send_gradients(self, asked: dict[str, Any]) -> None:
        """Sends when each gradient of a bucket was ready."""
        reducer, step, bucket = (int(asked[name]) for name in ("reducer", "step", "bucket"))
        self._send(bucket_gradients(self.timeline, reducer, step, bucket))
