"""The visual debugger of this rank: takes the client's messages, one `Session` at a time, and holds group timeouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ...parallel.live import breakpoints
from ..cells import cell, sources
from ..telemetry import Telemetry
from . import tracing
from .session import Session

__all__ = ["RankDebugger"]

_LET_GO_SECONDS = 0.5


class RankDebugger:
    """Takes the client's messages on the control thread; made and installed on the rank's main thread.

    Args:
        kernel: this engine's.
        telemetry: connection to the client.
    """

    def __init__(self, kernel: Any, telemetry: Telemetry) -> None:
        self._kernel, self._telemetry = kernel, telemetry
        self._main = asyncio.get_running_loop()
        self._session: Session | None = None  # the control thread's; others take a copy
        self._holds_for = 0  # the number of the client for which group timeouts are held; 0: for none

    def install(self) -> None:
        """Begins to take messages."""
        self._telemetry.on_control("debug", self._take)
        cell.before_cell.append(self._before_cell)
        sources.on_named.append(self._on_named)

    @property
    def stopped(self) -> bool:
        """Whether a thread of this rank is stopped; from any thread."""
        session = self._session
        return session is not None and session.stopped

    def let_go(self) -> None:
        """Continues a stopped rank, and lets it pass breakpoints until its next cell; not on the main thread."""
        session = self._session
        if session is not None:
            session.let_go(_LET_GO_SECONDS)

    def _take(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """On the control thread."""
        do, session = message["do"], self._session
        if do == "open":
            if problem := tracing.available():
                return {"problem": problem}
            self._end()
            self._session = Session(self._kernel, self._telemetry, message["name"], message["prefix"], self._main)
            self._session.start()
        elif do == "hold":
            self._hold(bool(message["on"]))
        elif do == "is_open":
            return {"open": session is not None and session.name == message["name"]}
        elif session is not None and session.name == message["name"]:
            if do == "close":
                self._end()
            else:
                session.ask(message["number"], message["request"])
        return {}

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.end()

    def _hold(self, on: bool) -> None:
        self._holds_for = self._telemetry.clients if on else 0
        (breakpoints.hold_timeouts if on else breakpoints.restore_timeouts)()

    def _before_cell(self, cell_id: str, label: str) -> None:
        """On the main thread."""
        if self._holds_for:
            self._hold(self._holds_for == self._telemetry.clients)  # of groups that are new since, or for nobody
        session = self._session
        if session is not None:
            session.before_cell()

    def _on_named(self, name: str) -> None:
        """On the main thread, before a cell's code is compiled."""
        session = self._session
        if session is not None:
            session.name_cell(name)
