"""The controls of the dashboard: changes, faults, breakpoints, monitoring. They send the browser's requests to ranks.

[Note: controls have a thread of their own]
A request waits up to some seconds for an unresponsive rank, and the dashboard continues to draw meanwhile. The
dashboard's thread queues the browser's requests and reads what to show. The controls' thread sends the requests to the
ranks and queries their state: eight times per second while they pause, once per second while a control is in view,
every other second while they train, so that active faults and pauses are shown whoever requested them.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import DdpLabError
from ..live_widget import Refresher
from .buckets import BucketControl, Comparing
from .collectives import CollectiveStage, no_ranks
from .control import Control, FaultControl, WatchControl
from .inspection import Comparison
from .stepping import StepControl
from .what_if import WhatIfStage

if TYPE_CHECKING:
    from ...control.ranks import Ranks
    from ...timeline.timeline import Timeline

__all__ = ["CollectiveStage", "Comparison", "Controls", "WhatIfStage", "no_ranks"]

_VIEWS = {"step", "fault_injection", "buckets", "gradients"}
_RATE = 8.0
_LOOKED_AT_SECONDS, _TRAINING_SECONDS, _TROUBLE_SECONDS = 1.0, 2.0, 3.0
_NOBODY = (
    "This dashboard shows a recording, or a job that it only follows. Controls need a running cluster in this notebook."
)
_STOPPED = "The cluster is not running. Start one with %cluster start."
_FROZEN = "This dashboard was stopped. Show a new one with lab.dashboard()."


class Controls:
    """Takes the browser's requests, and keeps the state that it shows."""

    def __init__(self, timeline: Timeline, cluster: Ranks | None, changed: Callable[[], None]) -> None:
        """`changed()` is called on the controls' thread when there is something new to show; cluster None: no ranks."""
        self._timeline = timeline
        self._cluster = cluster
        self._changed = changed
        # From the clock of events to the time of day, for ranks on this machine.
        self._shift = None if cluster is None else round(time.time() - time.monotonic_ns() / 1e9, 3)
        self._why = _NOBODY if cluster is None else ""
        self._asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._heard: list[str] = []
        self._looks: dict[str, tuple[set[str], int | None]] = {}
        self._comparing = Comparing(timeline)
        self._comparison: dict[str, Any] = {}
        self._next = 0.0
        self._frozen = False
        self._spent = 0.0
        self._seen_version = -1
        self._living: list[int] = []  # models that exist on the ranks, the most recently active last
        self._living_version = -1  # of the timeline from which this was read
        self._parts: dict[str, Control] = {}
        self._refresher = Refresher(self._round, self._fail, _RATE)
        if cluster is not None:
            self._parts["step"] = StepControl(cluster.training)
            self._parts["fault"] = FaultControl(cluster.training)
            self._parts["reconfigure"] = BucketControl(cluster.training, timeline, changed)
            self._parts["watch"] = WatchControl(cluster.training)
            self._refresher.start()

    # ---- for the dashboard's thread ---------------------------------------------------------------------

    def ask(self, command: dict[str, Any]) -> None:
        """Takes ``{"type": "step" | "fault" | "reconfigure" | "watch", "id": ..., ...}``; returns at once."""
        self._asked.put(command)
        if self._cluster is None or self._frozen:
            self._hear()
        else:
            self._refresher.start()
            self._refresher.wake()

    def look(self, page: str, views: list[str], reducer: int | None) -> None:
        """Notes which views a page shows now, and for which model."""
        self._looks.pop(page, None)
        seen = _VIEWS & set(views)
        if seen:
            self._looks[page] = (seen, reducer)
            self._next = 0.0
            if not self._frozen:
                self._refresher.start()
                self._refresher.wake()

    def state(self) -> dict[str, Any]:
        """Returns whether the ranks can be controlled, else why not, and which requests were taken."""
        control = {"live": not self._why, "why": self._why, "heard": list(self._heard), "shift": self._shift}
        control["living"] = self._living
        control["stopped"] = self._why == _STOPPED
        return control

    def shown(self) -> dict[str, dict[str, Any]]:
        """Returns the state of each control to show."""
        shown = {name: part.shown for name, part in self._parts.items()}
        return {
            "step": shown.get("step", {}),
            "fault_injection": shown.get("fault", {}),
            "watching": shown.get("watch", {}),
            "reconfiguration": {**shown.get("reconfigure", {}), "compared": self._comparison},
        }

    def take_spent(self) -> float:
        """Returns seconds of CPU time since the last call, for the dashboard's overhead."""
        spent, self._spent = self._spent, 0.0
        return spent

    @property
    def facts(self) -> dict[str, Callable[[], Any]]:
        """What pictures of the controls show, by the name of the view."""
        step, fault = self._parts.get("step"), self._parts.get("fault")
        return {
            "step": lambda: step.last if isinstance(step, StepControl) else None,
            "fault_injection": lambda: (self._timeline, fault.shown["faults"] if fault is not None else ()),
        }

    def rest(self) -> None:
        """Stops querying the ranks until the next request, until a page shows a control, or until `go_on`."""
        if self._asked.empty():
            self._refresher.stop(timeout=0)

    def go_on(self) -> None:
        """Resumes after `rest`."""
        if self._cluster is not None and not self._frozen:
            self._refresher.start()

    def stop(self) -> None:
        """Stops querying the ranks; breakpoints and faults stay as they are."""
        self._frozen = True
        self._refresher.stop()
        self._why = self._why or _FROZEN

    # ---- on its own -------------------------------------------------------------------------------------

    def _round(self) -> bool:
        """One round of the thread; returns whether there was something to do."""
        begin = time.thread_time()
        try:
            return self._work()
        finally:
            self._spent += time.thread_time() - begin

    def _work(self) -> bool:
        compared = self._compare()
        if self._cluster is None:
            return compared
        if not self._cluster.running:
            self._hear()
            self._lose(_STOPPED)
            return compared
        self._why = "" if not self._frozen else self._why
        busy = not self._asked.empty()
        before = [self._living, *(part.shown for part in self._parts.values())]
        if self._timeline.version != self._living_version:
            self._living_version = self._timeline.version
            self._living = [one.reducer for one in self._timeline.living()]
        while not self._asked.empty():
            command = self._asked.get()
            self._carry_out(command)
            self._heard = [*self._heard[-9:], str(command.get("id"))]
        version = self._timeline.version
        active = self._active
        if time.monotonic() >= self._next and (active or self._looks or version != self._seen_version):
            self._seen_version = version
            self._look_around()
        if busy or before != [self._living, *(part.shown for part in self._parts.values())]:
            self._changed()
        return busy or self._active

    def _compare(self) -> bool:
        """Compares the steps before and after the last change, while that view is on a page."""
        if "buckets" not in {view for seen, _ in list(self._looks.values()) for view in seen}:
            return False
        found = self._comparing.update(self._reducer)
        if found is not None:
            self._comparison = found
            self._changed()
        return found is not None

    def _carry_out(self, command: dict[str, Any]) -> None:
        part = self._parts.get(str(command.get("type")))
        if part is None:
            return
        try:
            part.obey(command)
        except (DdpLabError, ValueError, TypeError, KeyError) as error:
            part.fail(str(error) if not isinstance(error, KeyError) else f"the request lacks {error}")

    def _look_around(self) -> None:
        wait = _LOOKED_AT_SECONDS if self._looks else _TRAINING_SECONDS
        for part in self._parts.values():
            try:
                if self._timeline.reducers() or not part.of_model:
                    self._look_with(part)
            except (DdpLabError, ValueError):
                # No model exists, or a rank failed, so there is no state to show. A request reports why.
                wait = _TROUBLE_SECONDS
                part.forget()
        hurry = self._parts["step"].active and self._looked_at("step")
        self._next = time.monotonic() + (0.0 if hurry else wait)

    def _look_with(self, part: Control) -> None:
        """Updates a control: of a view for the displayed model, else for a model that still exists."""
        if part.view is None:
            part.look(self._reducer if self._reducer in self._living else None)
        elif self._looked_at(part.view):
            part.look(self._reducer)

    @property
    def _active(self) -> bool:
        return any(part.active for part in self._parts.values())

    def _looked_at(self, view: str) -> bool:
        return any(view in seen for seen, _ in list(self._looks.values()))

    @property
    def _reducer(self) -> int | None:
        """The model that was displayed last, None if there is none."""
        looked_at = [model for _, model in list(self._looks.values()) if model is not None]
        return looked_at[-1] if looked_at else None

    def _hear(self) -> None:
        """Discards requests, because there are no ranks."""
        while not self._asked.empty():
            self._heard = [*self._heard[-9:], str(self._asked.get().get("id"))]

    def _lose(self, why: str) -> None:
        if self._why != why:
            self._why = why
            for part in self._parts.values():
                part.forget()
            self._changed()

    def _fail(self, error: BaseException) -> None:
        """Shows why the thread ended."""
        self._why = f"The controls stopped: {type(error).__name__}: {error}"
        self._changed()
