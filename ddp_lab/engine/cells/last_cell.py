"""A detached cluster's rank informs a later client: about its cell, the cell's output, and how it ended.

While no client is attached, a cell's outputs are not received. So the end of its text is always kept here.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

from ...protocol.messages import DescribeRank, GetLastCell, LastCell, RankDescription
from ..telemetry import Telemetry
from . import cell

_CHARACTERS = 8_192


class _OutputTail:
    """The end of the written text; `OutStream` also writes to it."""

    def __init__(self) -> None:
        self.text = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            self.text = (self.text + text[-_CHARACTERS:])[-_CHARACTERS:]
        return len(text)

    def clear(self) -> None:
        with self._lock:
            self.text = ""

    def flush(self) -> None:
        """Nothing waits."""


class LastCellRecord:
    """Knows this rank's last cell; installed on the rank's main thread."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._text = _OutputTail()
        self._cell: LastCell | None = None  # replaced, never changed: another thread reads it

    def install(self) -> None:
        """Starts listening and answering."""
        cell.before_cell.append(self._before_cell)
        cell.on_done.append(self._on_done)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "echo"):
                stream.echo = self._text
        self._telemetry.on_control(DescribeRank, self._begin_anew)
        self._telemetry.on_control(GetLastCell, lambda request: self._describe())

    def _before_cell(self, cell_id: str, label: str) -> None:
        self._text.clear()
        self._cell = LastCell(cell_id, label, time.time())

    def _on_done(self, end: cell.CellEnd) -> None:
        assert self._cell is not None
        error = "" if end.error is None else f"{type(end.error).__name__}: {cell.text_of(end.error)}"
        self._cell = replace(self._cell, ended=time.time(), error=error)

    def _begin_anew(self, request: DescribeRank) -> RankDescription:
        """On the control thread: another client has attached."""
        self._telemetry.renew()
        return self._describe()

    def _describe(self) -> RankDescription:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return RankDescription(self._cell, self._text.text, time.time())


def install(telemetry: Telemetry) -> None:
    """Prepares this rank for a later client."""
    LastCellRecord(telemetry).install()
