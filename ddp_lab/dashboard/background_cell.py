"""A cell that runs in the background, or longer than a page is open: its progress, a stop button, its result."""

from __future__ import annotations

import html
import threading
import time
import uuid
from typing import Any

import anywidget
import traitlets

from ..output.display import FollowedCell, KernelDisplay, kernel_shell
from ..output.terminal import plain
from ..timeline.timeline import Timeline
from . import bundle
from .live_widget import receive_while_busy
from .saved_picture import SavedTable

__all__ = ["BackgroundCell"]

_SAVE_SECONDS = 5.0  # between two saved states of a running cell
_LATER = ". If it is still running, its result will appear here."  # for pages that were opened meanwhile
_ENDED = ("done", "failed", "interrupted", "not run")


class BackgroundCell(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
    """A status line above the outputs of a cell: see `ddp_lab.output.display.RunView`.

    A page that was opened or reloaded while the cell ran does not get the cell's output: there the widget also shows
    the end of the output. A saved notebook keeps the last state of the line; see [Note: two outputs].

    [Note: pages that come late] Such a page gets the state of widgets from Jupyter once the kernel's main thread is
    free, and nothing else from a running cell. A background cell appears there at once. A foreground cell blocks the
    main thread: until its end the page shows the saved line with the cell's state at that time, and then the widget
    with the end of the output. The page that ran the cell misses nothing and shows no line; when the cell has ended,
    its notebook keeps no line.

    Args:
        timeline: where the steps of the cell's models arrive.
        if_lost: what happens to the ranks if the kernel stops, in words.
        waited: whether it is a foreground cell.
    """

    _esm = bundle.module_text("app/background_cell.js")
    _css = bundle.style_text("dashboard", "background_cell")
    token = traitlets.Unicode().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    began = traitlets.Float().tag(sync=True)  # seconds since the epoch
    if_lost = traitlets.Unicode().tag(sync=True)
    waited = traitlets.Bool().tag(sync=True)
    status = traitlets.Dict().tag(sync=True)  # state, headline, step, now
    lines = traitlets.Unicode().tag(sync=True)

    def __init__(self, timeline: Timeline, if_lost: str, waited: bool = False) -> None:
        super().__init__(token=uuid.uuid4().hex[:12], began=time.time(), if_lost=if_lost, waited=waited)
        receive_while_busy(self)
        self._timeline = timeline
        self._events = self._recorded()
        self._run: FollowedCell | None = None
        self._saved = SavedTable(self.token)
        self._display = KernelDisplay(kernel_shell())
        self._lock = threading.Lock()  # the follower and the main thread may both show it
        self._saved_at = 0.0
        self.on_msg(self._receive)

    def show(self, run: FollowedCell) -> None:
        """See `RunView`."""
        with self._lock:
            first, self._run = self._run is None, run
            with self.hold_sync():
                self.label = run.label
                self.status = {"state": run.state, "headline": run.headline, "step": self._step(), "now": time.time()}
                self.lines = "\n".join(filter(None, (run.last_lines(), plain(run.report))))
            if first:
                bundle: tuple[dict[str, Any], dict[str, Any]] | None = super()._repr_mimebundle_()
                data, metadata = bundle or ({}, {})
                self._display.publish(f"{self.token}-live", {**data, "text/plain": ""}, metadata, False)
            self._save(first)
            if run.state == "failed" and run.report and not self.waited:
                self._display.error(type(run).__name__, run.headline, run.report.splitlines())

    def show_again(self) -> None:
        """See `RunView`."""
        with self._lock:
            self._saved_at = 0.0
            self._save(False)

    def _save(self, first: bool) -> None:
        """Saves the line for readers without a kernel."""
        now, ended = time.monotonic(), self.status["state"] in _ENDED
        if not first and not ended and now - self._saved_at < _SAVE_SECONDS:
            return
        self._saved_at = now
        if ended and self.waited:
            for one in ("live", "saved"):
                self._display.publish(f"{self.token}-{one}", {"text/plain": ""}, {}, True)
            return
        when = "" if ended else f" (at {time.strftime('%H:%M:%S')})"
        text = f"{self.label}: {self._words()}{when}{_LATER if self.waited else ''}"
        data = self._saved.bundle(f"<p>{html.escape(text)}</p>", text)
        self._display.publish(f"{self.token}-saved", data, {}, not first)

    def _words(self) -> str:
        headline, step = self.status["headline"], self.status["step"]
        return f"{headline}" if step is None else f"{headline}, step {step:,}"

    def _recorded(self) -> int:
        return sum(rank.events for rank in self._timeline.ranks())

    def _step(self) -> int | None:
        """The latest step recorded since the cell was sent; None if there is none."""
        if self._recorded() == self._events:
            return None
        return max((rank.step for rank in self._timeline.ranks() if rank.step >= 0), default=None)

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        """Handles the button's message, on any thread."""
        if self._run is not None and content == {"type": "interrupt"}:
            self._run.interrupt()
