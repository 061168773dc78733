"""Rank side of `ddp-lab run`: a thread that appends what the rank records to its journal."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from .. import events, journal
from ..machine import host_clock
from ..parallel import recording

__all__ = ["JournalWriter"]

INTERVAL = 0.02  # seconds between two drains while events come
IDLE_INTERVAL = 0.25  # at most, while none come
KEEP_EVENTS = 2_000_000  # of all ranks of a host: at least so many newest ones stay, at most twice as many: 288 MB


def _begin(path: Path) -> FileIO:
    """Begins a file that only this user may read."""
    return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


class JournalWriter:
    """Writes a rank's journal (see [Note: a journal survives its rank]) until `close`.

    Args:
        path: the file, which is begun anew.
        about: what its first message says beside pid, host and clock, ``"rank"`` among it.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, keep_events: int = KEEP_EVENTS) -> None:
        self._path, self._keep = path, keep_events
        self._rank = int(about["rank"])
        self._session = time.time_ns()
        self._pid = os.getpid()
        self._cursor = recording.statistics().recorded
        self._described = 0
        self._first = self._cursor  # sequence number of the oldest event in the file
        self._lock = threading.Lock()
        self._file = _begin(path)
        self._file.write(journal.MAGIC + self._opening(about))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write_for_ever, name="ddp_lab-journal", daemon=True)
        self._thread.start()

    def _opening(self, about: Mapping[str, Any]) -> bytes:
        return journal.json_message(
            "journal",
            schema_version=events.SCHEMA_VERSION,
            session=self._session,
            pid=self._pid,
            host=socket.gethostname(),
            clock=host_clock(),
            **about,
        )

    def close(self, how: str) -> None:
        """Writes what is left, and how the program ended. Does nothing in a forked child, or a second time."""
        if os.getpid() != self._pid or self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        with self._lock:
            self._write()
            self._file.write(journal.json_message("end", how=how))
            self._file.close()

    def _write_for_ever(self) -> None:
        interval = INTERVAL
        while not self._stopping.wait(interval):
            with self._lock:
                moved = self._write()
            interval = INTERVAL if moved else min(IDLE_INTERVAL, interval * 1.25)

    def _write(self) -> bool:
        """Appends what is new; returns whether anything was. Needs the lock."""
        batch, dropped, following = recording.drain(self._cursor)
        # After the events, but written before them: they may refer to the newest description.
        described, self._described = recording.descriptions(self._described)
        made = journal.json_message("describe", descriptions=described) if described else b""
        if len(batch) or dropped:
            one = events.Batch(self._rank, self._session, following - len(batch), dropped, batch)
            made += journal.pack([bytes(frame) for frame in events.encode(one)])
        self._cursor = following
        if made:
            self._file.write(made)
        if following - self._first > 2 * self._keep:
            self._forget()
        return bool(made)

    def _forget(self) -> None:
        """Leaves only the newest events in the file, and all descriptions."""
        self._first = self._cursor - self._keep
        shorter = self._path.with_suffix(".shorter")
        file = _begin(shorter)
        file.write(journal.MAGIC)
        for frames in journal.messages(self._path):
            if frames[0] != journal.JSON_FRAME:
                batch = events.decode(frames)
                if batch.first + len(batch.events) <= self._first:
                    continue
            file.write(journal.pack(frames))
        shorter.replace(self._path)
        self._file.close()
        self._file = file
