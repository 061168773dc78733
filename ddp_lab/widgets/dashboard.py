"""The dashboard: bucket timeline, gradient sync and ranks of a `Timeline` as one live widget."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anywidget
import IPython
import IPython.display
import traitlets

from ..client.timeline import Timeline
from ..errors import DdpLabError
from . import esm
from .inspections import Comparison
from .live import Refresher, receive_while_busy
from .messages import encode_steps
from .rank_rows import rank_rows
from .saved_picture import SavedPicture
from .step_store import StepFrame, StepStore
from .svg import empty_svg, step_svg

__all__ = ["Dashboard", "DashboardStatistics"]

RATE = 20.0  # refreshes a second while events arrive
_RANKS_SECONDS = 0.25
_MESSAGE_BYTES = 128 << 10
_KEPT_BYTES = 256 << 10
_NOTHING = "No step recorded yet: train with ddp_lab.DistributedDataParallel in a %%distributed cell."


@dataclass(frozen=True)
class DashboardStatistics:
    """What a dashboard sent to the browser.

    Attributes:
        updates: messages with steps (of the last 1,000).
        steps: steps in all messages; one that grew between two messages counts twice.
        bytes: of the steps' arrays.
        median_ms: processor time of one update, from reading the timeline until the message is handed over; None
            before the first.
    """

    updates: int
    steps: int
    bytes: int
    median_ms: float | None


class Dashboard(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
    """A live view of a timeline: display it in a notebook, it refreshes itself, also while a cell runs.

    It reads the timeline by cursor on a thread of its own and sends what is new to the browser, at most 20 times a
    second. The browser keeps the last 500 steps of each model: choosing a step, zooming and the details of a bucket
    need no kernel. A saved notebook keeps the last picture (see `saved_picture`).

    Args:
        timeline: what to show.
        status: returns a record for each rank (`Cluster.status`); called four times a second on the thread. None: what
            the ranks themselves reported to the timeline.
        request_inspection: asks the ranks for norm and checksum of a reducer's gradients after a step, and returns at
            once; the answers come through the timeline. None: gradients can't be compared.
    """

    _esm = esm.module_text()
    _css = esm.style_text()
    token = traitlets.Unicode().tag(sync=True)
    assignments = traitlets.Dict().tag(sync=True)
    ranks: Any = traitlets.List().tag(sync=True)
    inspection = traitlets.Dict().tag(sync=True)
    notice = traitlets.Unicode().tag(sync=True)
    kept = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        timeline: Timeline,
        *,
        status: Callable[[], Sequence[Any]] | None = None,
        request_inspection: Callable[[int, int], None] | None = None,
    ) -> None:
        self._timeline = timeline
        self._status = status
        self._lock = threading.RLock()
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._comparison = Comparison(timeline, request_inspection)
        self._cursor = 0
        self._store = StepStore(self._assignment)
        self._unsent: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._last_steps: dict[int, int] = {}
        self._sent = (0, 0)
        self._seconds: deque[float] = deque(maxlen=1_000)
        self._frozen = False
        self._shown_version = -1
        self._saved_version = -1
        self._generations: object = None
        self._ranks_at = 0.0
        super().__init__(token=uuid.uuid4().hex[:12])
        receive_while_busy(self)
        self._picture = SavedPicture(self.token)
        self._hooked: Any = None
        self.on_msg(self._receive)
        self._refresher = Refresher(self._tick, self._fail, RATE)
        self._tick()
        self._refresher.start()

    # ---- for the user -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Sends what is new to the browser now."""
        with self._lock:
            self._update(time.monotonic(), force=True)

    def snapshot(self) -> None:
        """Replaces the picture that the notebook keeps by the present state, wherever the dashboard is displayed.

        Happens by itself at the end of every cell of the notebook.
        """
        with self._lock:
            if not self._frozen:
                self.refresh()
            self._saved_version = self._timeline.version
            self.kept = self._newest_steps()
        self._picture.replace(self.svg(), self._words())

    def stop(self) -> None:
        """Takes the last events and stops following; the view stays as it is, also in the saved notebook."""
        if self._frozen:
            return
        self.snapshot()
        self._frozen = True
        self._refresher.stop()

    def close(self) -> None:
        """Stops, and removes the live view from the notebook."""
        self._frozen = True
        self._refresher.stop()
        self._unhook()
        super().close()

    def statistics(self) -> DashboardStatistics:
        """Returns what the dashboard sent so far and what that took."""
        with self._lock:
            seconds = sorted(self._seconds)
            return DashboardStatistics(
                updates=len(seconds),
                steps=self._sent[0],
                bytes=self._sent[1],
                median_ms=seconds[len(seconds) // 2] * 1e3 if seconds else None,
            )

    def svg(self) -> str:
        """Returns the newest complete step as a self-contained SVG picture."""
        with self._lock:
            frame = self._store.latest()
            if frame is None:
                return empty_svg(_NOTHING)
            assignment = self._assignment(frame.reducer, frame.generation) or {}
            name = assignment.get("module")
            return step_svg(frame, f"{name}, " if name else "")

    # ---- display ----------------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the live view, with the picture for who can't show it."""
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        words = self._words()
        return {**data, "image/svg+xml": self.svg(), "text/plain": words}, metadata

    def _ipython_display_(self) -> None:
        """Displays the live view and, below it, the picture that a saved notebook keeps ([Note: two outputs])."""
        self.refresh()
        data, metadata = super()._repr_mimebundle_() or ({}, {})
        live = {**data, "text/plain": "ddp_lab dashboard: the live view; its last picture follows."}
        publish: Any = IPython.display.publish_display_data
        publish(live, metadata)
        self._picture.display(self.svg(), self._words())
        self._hook()

    def _words(self) -> str:
        """Returns what the picture shows in words."""
        return self._timeline.summary() if self._store.reducers() else _NOTHING

    def _hook(self) -> None:
        """Asks IPython to call `_after_cell` at the end of every cell."""
        shell = IPython.get_ipython()  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
        if shell is not None and self._hooked is None:
            shell.events.register("post_run_cell", self._after_cell)
            self._hooked = shell

    def _unhook(self) -> None:
        """Takes that back."""
        if self._hooked is not None:
            self._hooked.events.unregister("post_run_cell", self._after_cell)
            self._hooked = None

    def _after_cell(self, result: Any = None) -> None:
        """Keeps the notebook's picture up to date."""
        if self._frozen:
            self._unhook()
        elif self._saved_version != self._timeline.version:
            self.snapshot()

    # ---- the thread -------------------------------------------------------------------------------------

    def _receive(self, widget: Any, content: dict[str, Any], buffers: Any) -> None:
        """Takes a message of the browser, on whatever thread: it is only queued."""
        self._commands.put(content)
        self._refresher.start()
        self._refresher.wake()

    def _tick(self) -> bool:
        """One round of the thread; returns whether there was something to do."""
        with self._lock:
            now = time.monotonic()
            busy = self._obey()
            if self._comparison.pending:
                busy = True
                self._comparison.update(self._store)
            if self._comparison.shown != self.inspection:
                self.inspection = self._comparison.shown
            if not self._frozen:
                return self._update(now) or busy
            if not busy and not self._unsent:
                self._refresher.stop()
            self._send_steps()
            return busy

    def _update(self, now: float, force: bool = False) -> bool:
        """Takes what is new in the timeline and sends it; returns whether there was anything."""
        begin = time.thread_time()
        version = self._timeline.version
        changed = version != self._shown_version
        if changed:
            self._shown_version = version
            self._take()
        if force or now - self._ranks_at >= _RANKS_SECONDS:
            self._ranks_at = now
            self._show_ranks()
        sent = self._send_steps()
        if sent:
            self._seconds.append(time.thread_time() - begin)
        return sent or changed

    def _take(self) -> None:
        """Reads the timeline from the cursor on."""
        reducers = self._timeline.reducers()
        steps = {one.reducer: one.last_step for one in reducers}
        if any(steps.get(reducer, -2) < step for reducer, step in self._last_steps.items()):
            self._forget_steps()  # the timeline was cleared
            self.send({"type": "reset"})
        self._last_steps = steps
        chunks, self._cursor, _ = self._timeline.since(self._cursor)
        self._store.extend(chunks)
        for frame in self._store.take_dirty():
            self._mark_unsent(frame)
        known = [(one.reducer, one.generations) for one in reducers]
        if known != self._generations:
            self._generations = known
            self.assignments = {
                f"{reducer}:{generation}": self._timeline.assignment(reducer, generation)
                for reducer, generations in known
                for generation in generations[-3:]
            }

    def _send_steps(self) -> bool:
        """Sends the newest steps that fit into one message; the others follow with the next ones."""
        chosen: list[StepFrame] = []
        size = 0
        while self._unsent and size < _MESSAGE_BYTES:
            key, _ = self._unsent.popitem()
            frame = self._store.frame(*key)
            if frame is not None:
                chosen.append(frame)
                size += frame.times_ns.nbytes
        if chosen:
            header, body = encode_steps(reversed(chosen))
            self.send(header, [body])
            self._sent = (self._sent[0] + len(chosen), self._sent[1] + len(body))
        return bool(chosen)

    def _mark_unsent(self, frame: StepFrame) -> None:
        """Notes that the browser lacks this state of a step."""
        key = (frame.reducer, frame.step)
        self._unsent[key] = None
        self._unsent.move_to_end(key)

    def _obey(self) -> bool:
        """Does what the browser asked for since the last round; returns whether it asked for anything."""
        asked = False
        while not self._commands.empty():
            asked = True
            command = self._commands.get()
            if command.get("type") == "hello":
                for frame in self._store.frames():
                    self._mark_unsent(frame)
            elif command.get("type") == "compare":
                self._comparison.ask(int(command["reducer"]), self._store)
        return asked

    def _show_ranks(self) -> None:
        """Sends the table of ranks if it changed."""
        try:
            records = self._status() if self._status is not None else ()
            stopped = False
        except DdpLabError:
            records, stopped = (), True
        rows = rank_rows(self._timeline.ranks(), records, stopped=stopped)
        if rows != self.ranks:
            self.ranks = rows

    def _fail(self, error: BaseException) -> None:
        """Shows why the thread ended."""
        self.notice = f"The dashboard stopped refreshing: {type(error).__name__}: {error}"

    # ---- helpers ----------------------------------------------------------------------------------------

    def _forget_steps(self) -> None:
        """Begins with nothing."""
        self._cursor = 0
        self._store = StepStore(self._assignment)
        self._unsent.clear()

    def _assignment(self, reducer: int, generation: int) -> dict[str, Any] | None:
        """Returns which parameters the buckets hold, None as long as no rank said so."""
        try:
            return self._timeline.assignment(reducer, generation)
        except ValueError:
            return None

    def _newest_steps(self) -> dict[str, Any]:
        """Returns the last steps of each model as one message, for a page that has no kernel to ask."""
        chosen: list[StepFrame] = []
        for reducer in self._store.reducers():
            size = 0
            for frame in reversed(self._store.frames(reducer)):
                size += frame.times_ns.nbytes
                if size > _KEPT_BYTES and chosen:
                    break
                chosen.append(frame)
        if not chosen:
            return {}
        header, body = encode_steps(reversed(chosen))
        return {"header": header, "body": body}
