"""Widgets that stay live while a cell blocks the kernel's main thread: a thread, and messages that reach it."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import traitlets

__all__ = ["LiveWidget", "Refresher", "receive_while_busy"]

_log = logging.getLogger(__name__)
_PAGE_SECONDS = 20.0  # after its last message a page counts as closed
Command = dict[str, Any]


def receive_while_busy(widget: Any) -> bool:
    """Lets the front end's messages reach `widget` while a cell runs; returns whether anything had to be done.

    ipykernel ≥ 7.1 handles the messages of widgets on a thread of their own (a subshell). 7.4.0 routes the replies to
    published data to the thread that published last: the main one, which is busy. This restores the front end's own
    choice. With other versions nothing changes, and messages wait for the end of the cell.
    """
    comm = getattr(widget, "comm", None)
    if comm is None or not hasattr(comm, "_reply_subshell_for"):
        return False
    comm._reply_subshell_for = lambda data, default: default
    return True


class Refresher:
    """A daemon thread that calls `action` at most `rate` times per second, as long as the action's object exists.

    The action returns whether there was something to do; after two seconds without work it is called five times per
    second. There is a pause between two calls, however long they take. An exception ends the thread and is passed to
    `failed`.
    """

    _IDLE_SECONDS = 0.2
    _IDLE_AFTER = 2.0

    def __init__(self, action: Callable[[], bool], failed: Callable[[BaseException], None], rate: float) -> None:
        self._action = weakref.WeakMethod(action)
        self._failed = weakref.WeakMethod(failed)
        self._interval = 1 / rate
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._turn = threading.Lock()  # guards what follows
        self._asked = False  # to start, since the round began
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        with self._turn:
            return self._thread is not None

    def start(self) -> None:
        """Starts the thread if it does not run; if it stops itself in this round, another round follows."""
        with self._turn:
            self._asked = True
            self._stopped.clear()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ddp_lab dashboard", daemon=True)
                thread.start()
                self._thread = thread

    def wake(self) -> None:
        """Calls the action soon, also when it was idle."""
        self._wake.set()

    def stop(self, timeout: float = 2.0) -> None:
        """Ends the thread and waits for it (unless it is the caller)."""
        with self._turn:
            thread = self._thread
            own = thread is threading.current_thread()
            if not (own and self._asked):
                self._stopped.set()
        self._wake.set()
        if thread is not None and not own:
            thread.join(timeout)

    def _goes_on(self) -> bool:
        """On the thread, before each round."""
        with self._turn:
            self._asked = False
            if self._stopped.is_set():
                self._thread = None
            return self._thread is not None

    def _run(self) -> None:
        try:
            self._rounds()
        finally:
            with self._turn:
                if self._thread is threading.current_thread():  # else a successor has begun
                    self._thread = None

    def _rounds(self) -> None:
        calm, due = 0.0, time.monotonic()
        while self._goes_on():
            action = self._action()
            if action is None:
                return
            try:
                busy = action()
            except Exception as error:  # noqa: BLE001 - a thread's top: stored and shown by `failed`
                _log.exception("a view stopped updating")
                failed = self._failed()
                if failed is not None:
                    failed(error)
                return
            del action
            calm = 0.0 if busy else calm + self._interval
            idle = calm > self._IDLE_AFTER
            # Keeps its distance also when woken: many wake-ups make one refresh.
            if not idle:
                now = time.monotonic()
                due = max(due + self._interval, now + self._interval / 8)
                self._stopped.wait(due - now)
            else:
                self._wake.wait(self._IDLE_SECONDS)
            self._wake.clear()


class Pages:
    """The pages that show a widget now, by id: each reports every few seconds; a closed one no longer does."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # page -> when it counts as closed

    def note(self, page: str, seen: bool) -> None:
        """Notes whether a page shows the widget. Runs on the thread that got the page's message."""
        # On the main thread messages wait while a cell runs, also those that report that the page is open.
        waits = threading.current_thread() is threading.main_thread()
        known = {**self._until}
        known.pop(page, None)
        if seen:
            known[page] = float("inf") if waits else time.monotonic() + _PAGE_SECONDS
        self._until = known

    @property
    def any(self) -> bool:
        """Whether a page shows it."""
        now = time.monotonic()
        return any(until > now for until in self._until.values())


class Commands:
    """Messages of the front end, ``{"type": ..., ...}``, and their handlers."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._known: dict[str, Callable[[Command], object]] = {}

    def on(self, kind: str, action: Callable[[Command], object]) -> None:
        """Registers `action` for the commands of this type; it must return at once."""
        self._known[kind] = action

    def put(self, command: Command) -> None:
        """Takes a command, on any thread."""
        self._queue.put(command)

    def obey(self) -> bool:
        """Runs the commands since the last call; returns whether there were any. Unknown types are ignored."""
        asked = False
        while not self._queue.empty():
            asked = True
            command = self._queue.get()
            action = self._known.get(str(command.get("type")))
            if action is not None:
                action(command)
        return asked


class LiveWidget(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
    """A widget that a thread refreshes, and that passes the requests of pages to registered handlers.

    Args:
        tick: one round of the thread; returns whether there was something to do.
        rate: rounds per second, at most.
        word: type of the message in which a page reports whether it shows the widget.
        traits: the initial values of the traits.
    """

    token = traitlets.Unicode().tag(sync=True)
    notice = traitlets.Unicode().tag(sync=True)

    def __init__(self, tick: Callable[[], bool], rate: float, word: str, **traits: Any) -> None:
        self._lock = threading.RLock()
        self._commands, self._pages, self._word = Commands(), Pages(), word
        super().__init__(token=uuid.uuid4().hex[:12], **traits)
        receive_while_busy(self)
        self._refresher = Refresher(tick, self._fail, rate)

    def _listen(self) -> None:
        """Starts receiving messages, once the widget is complete. They arrive before it is displayed, on any thread."""
        self.on_msg(self._receive)

    def _receive(self, widget: Any, content: Command, buffers: Any) -> None:
        """Queues a message from the browser, on any thread."""
        if content.get("type") == self._word:
            self._pages.note(str(content.get("id")), bool(content.get("seen")))
        else:
            self._commands.put(content)
        self._refresher.start()
        self._refresher.wake()

    def _show(self, traits: Mapping[str, Any]) -> None:
        """Sends traits that changed."""
        for name, value in traits.items():
            if getattr(self, name) != value:
                setattr(self, name, value)

    def _live(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widget without a picture, as a mime bundle and its metadata."""
        bundle: tuple[dict[str, Any], dict[str, Any]] | None = super()._repr_mimebundle_(**kwargs)
        return bundle or ({}, {})

    def _fail(self, error: BaseException) -> None:
        """Shows why the thread ended."""
        self.notice = f"This view stopped updating: {type(error).__name__}: {error}"
