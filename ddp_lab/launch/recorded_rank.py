"""A process that is a rank of a script: a thread of it writes its journal, and it says how the program ended.

[Note: recording never harms the program]
Everything that can fail happens on that thread, including creating the file. If the disk is full, or the folder
read-only or missing, one line reports it. Events then stay in the recorder's ring, writing is retried, and events that
are overwritten until then are counted. The program waits for its journal only at its end, and only while the disk
accepts data.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import recording
from ..command_line import tell
from ..diagnosis.crashes import unregistered_method
from ..diagnosis.stacks import is_library
from ..engine.groups import script_interrupt
from ..formatting import line_name
from ..machine import host_clock
from ..protocol import events, journal

__all__ = ["GRACE_SECONDS", "JournalWriter", "about_me", "begin_journal", "end_this_process", "number", "of_worker"]
__all__ += ["reach_models", "that_ends"]

GRACE_SECONDS = 10.0
"""For a process to end after SIGTERM."""
_LONGEST_LOGGED = 200  # characters
INTERVAL = 0.02  # seconds between two drains while events arrive
IDLE_INTERVAL = 0.25  # at most, while none arrive
RETRY_INTERVAL = 0.5  # while nothing can be written
PATIENCE = 5.0  # seconds without a byte written, after which the program's exit stops waiting
KEEP_EVENTS = 2_000_000  # per host, of all ranks: at least so many of the newest stay, at most twice as many (288 MB)
_PIECE = 1 << 20
_ENDING_BYTES = 600  # reserved in the first message for how the program ended


def begin_journal(folder: Path, about: dict[str, Any], ranks: int, *, of_child: bool = False) -> Callable[[str], None]:
    """Records from now on.

    Args:
        folder: for the journal.
        about: of `about_me`.
        ranks: of this host.
        of_child: this process was started by the script.

    Returns:
        What ends the journal: to be called with how the program ended.
    """
    path = journal.path_of(folder, about["rank"], about["restart"], of_child=of_child)
    writer, last = JournalWriter(path, about, keep_events=max(100_000, KEEP_EVENTS // ranks)), _LastWords()
    return lambda how: writer.close(how, str(last))


class _File:
    """A journal that grows by whole messages.

    Args:
        path: the file, which is overwritten; only this user may read it.
        took: called with the number of bytes written, after each MiB.

    Raises:
        OSError: it can't be created.
    """

    def __init__(self, path: Path, took: Callable[[int], object]) -> None:
        self._took = took
        self._size = self._number = 0  # bytes and messages in it
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._put(journal.MAGIC)
        except OSError:
            self.close()
            raise

    @property
    def is_removed(self) -> bool:
        """Whether it was removed, so that data written to it is lost."""
        return not os.fstat(self._fd).st_nlink

    def append(self, messages: Sequence[Sequence[bytes]]) -> None:
        """Appends messages, all of them or none.

        Raises:
            OSError: none was appended.
        """
        self._put(b"".join(journal.pack(frames, self._number + place) for place, frames in enumerate(messages)))
        self._number += len(messages)

    def replace_first(self, frames: Sequence[bytes]) -> None:
        """Overwrites the first message with one of the same length, which needs no disk space."""
        os.pwrite(self._fd, journal.pack(frames, 0), len(journal.MAGIC))

    def close(self) -> None:
        os.close(self._fd)

    def _put(self, data: bytes) -> None:
        at = 0
        try:
            while at < len(data):
                written = os.pwrite(self._fd, data[at : at + _PIECE], self._size + at)
                at += written
                self._took(written)
        except OSError:
            with contextlib.suppress(OSError):  # the next message overwrites it
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)


class JournalWriter:
    """Writes a rank's journal (see [Note: a journal survives its rank]) until `close`.

    It raises nothing for errors of the disk: [Note: recording never harms the program].

    Args:
        path: the file, which is overwritten.
        about: fields of its first message besides pid, host and clock, including ``"rank"``.
        keep_events: at least this many of the newest stay in the file, at most twice as many.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, keep_events: int = KEEP_EVENTS) -> None:
        self._path, self._keep = path, keep_events
        self._rank = int(about["rank"])
        self._session = time.time_ns()
        self._pid = os.getpid()
        self._about = {"pid": self._pid, "host": socket.gethostname(), "clock": host_clock(), **about}
        self._cursor = recording.statistics().recorded
        self._described = 0
        self._first = self._cursor  # sequence number of the oldest event in the file
        self._file: _File | None = None
        self._bytes = 0  # written so far
        self._failing = False
        self._why = ""  # the last write error
        self._lost = 0  # events
        self._how, self._last_words, self._ended_ns = "", "", 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddp_lab-journal", daemon=True)
        self._thread.start()

    def close(self, how: str, last_words: str = "") -> None:
        """Writes the rest, how the program ended, and what it did last. Does nothing in a forked child, or a second
        time."""
        if os.getpid() != self._pid or self._stopping.is_set():
            return
        self._how, self._last_words, self._ended_ns = how, last_words, time.time_ns()
        self._stopping.set()
        before = -1
        while self._thread.is_alive() and self._bytes != before:
            before = self._bytes
            self._thread.join(PATIENCE)
        if self._thread.is_alive():
            tell(f"rank {self._rank} could not finish its journal: {self._path} accepted no data for {PATIENCE:g} s")

    def _run(self) -> None:
        try:
            moved = self._write()
            interval = INTERVAL
            while not self._stopping.wait(RETRY_INTERVAL if self._failing else interval):
                moved = self._write()
                interval = INTERVAL if moved else min(IDLE_INTERVAL, interval * 1.25)
            self._write()
            self._end()
        except Exception as error:  # noqa: BLE001 - a thread's top: reported, and the program continues
            tell(f"rank {self._rank} continues without recording: {type(error).__name__}: {error}")
        finally:
            if self._file is not None:
                self._file.close()

    def _write(self) -> bool:
        """Appends new events, all or none; returns whether there were any."""
        try:
            file = self._begun()
            batch, dropped, following = recording.drain(self._cursor)
            # Drained after the events, but written before them: events may refer to the newest description.
            described, position = recording.descriptions(self._described)
            drained = events.Batch(self._rank, self._session, following - len(batch), dropped, batch)
            made = journal.event_messages(described, [drained] if len(batch) or dropped else [])
            file.append(made)
            self._described, self._cursor = position, following
            self._lost += dropped
            if following - self._first > 2 * self._keep:
                self._forget(file)
        except OSError as error:
            self._failing = True
            self._fails(error.strerror or str(error))
            return False
        self._failing = False
        return bool(made)

    def _begun(self) -> _File:
        """The file; created now if that was not possible before, or it was removed."""
        if self._file is not None and self._file.is_removed:
            self._file.close()
            self._file = None
            self._lost += self._cursor - self._first
            self._described, self._first = 0, self._cursor
            self._fails("it was removed")
        if self._file is None:
            made = _File(self._path, self._take)
            try:
                made.append([self._opening()])
            except OSError:
                made.close()
                raise
            self._file = made
        return self._file

    def _take(self, written: int) -> None:
        self._bytes += written

    def _fails(self, why: str) -> None:
        """Reports once that writing fails, and keeps the reason."""
        if not self._why:
            tell(
                f"rank {self._rank} can't write its journal {self._path}: {why}. The program continues; the newest "
                f"{recording.statistics().capacity:,} events stay in memory until they can be written"
            )
        self._why = why

    def _opening(self, **end: Any) -> list[bytes]:
        """The first message; it has the same length with and without how the program ended."""
        fields = {"schema_version": events.SCHEMA_VERSION, "session": self._session, **self._about}
        mark, text = journal.json_frames("journal", **fields)
        return [mark, journal.json_frames("journal", **fields, **end)[1].ljust(len(text) + _ENDING_BYTES)]

    def _end(self) -> None:
        """Writes how the program ended: in a message, or without disk space for one, in the first one."""
        recorded = recording.statistics().recorded if self._failing else self._cursor
        missing = self._lost + recorded - self._cursor
        end = {"how": self._how, "ended_ns": self._ended_ns, "recorded": recorded}
        end |= {"missing": missing, "why": self._why} if missing else {}
        end |= {"last_words": self._last_words} if self._last_words else {}
        if self._file is None:
            tell(f"rank {self._rank} recorded nothing: {self._why}")
            return
        try:
            self._file.append([journal.json_frames("end", **end)])
        except OSError as error:
            self._fails(error.strerror or str(error))
            end["how"] = self._how.encode("ascii", "backslashreplace").decode()[:200]
            end.pop("last_words", None)
            with contextlib.suppress(OSError):  # then the file looks like that of a killed rank
                self._file.replace_first(self._opening(**end))

    def _forget(self, file: _File) -> None:
        """Keeps only the newest events in the file, and all descriptions."""
        self._first = self._cursor - self._keep
        beside = self._path.with_suffix(".shorter")
        shorter = None
        try:
            shorter = _File(beside, self._take)
            for frames in journal.messages(self._path):
                if frames[0] != journal.JSON_FRAME:
                    batch = events.decode(frames)
                    if batch.first + len(batch.events) <= self._first:
                        continue
                shorter.append([frames])
            beside.replace(self._path)
        except OSError:  # the long file stays
            if shorter is not None:
                shorter.close()
            beside.unlink(missing_ok=True)
            raise
        file.close()
        self._file = shorter


class _LastWords:
    """The last warning or error of the program's own that it logs, whoever handles it, or whose traceback it prints;
    and where it called `sys.exit`. An error that is caught may be why a rank left early."""

    def __init__(self) -> None:
        self._record: logging.LogRecord | None = None
        self._caught = ""
        shown: Any = traceback
        for name in ("print_exception", "format_exception"):  # print_exc and format_exc call these
            setattr(shown, name, self._noting(getattr(shown, name)))
        self._make = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._keep)

    def _keep(self, *args: Any, **fields: Any) -> logging.LogRecord:
        made = self._make(*args, **fields)
        if made.levelno >= logging.WARNING and not is_library(made.pathname):
            self._record, self._caught = made, ""
        return made

    def _noting(self, show: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(show)
        def noted(*args: Any, **named: Any) -> Any:
            error = next((one for one in (*args, named.get("value")) if isinstance(one, BaseException)), None)
            frame = sys._getframe(1)
            while frame.f_code.co_filename == traceback.__file__ and frame.f_back is not None:
                frame = frame.f_back
            if error is not None and not is_library(frame.f_code.co_filename):
                self._record, self._caught = None, _caught_words(error)  # not the error, which keeps its frames
            return show(*args, **named)

        return noted

    def __str__(self) -> str:
        """E.g. ``"it had logged WARNING: skipped the rest (train.py:31)"``; "" if nothing is known."""
        left = sys.exc_info()[1]
        exit_at = _where(left) if isinstance(left, SystemExit) else ""
        said = [f"it called sys.exit{exit_at}"] if exit_at else []
        return "; ".join([*self._logged(), *([self._caught] if self._caught else []), *said])

    def _logged(self) -> list[str]:
        if self._record is None:
            return []
        try:
            text = self._record.getMessage()
        except Exception:  # noqa: BLE001 - the program's own mistake, which logging reports
            text = str(self._record.msg)
        text = " ".join(text.split())[:_LONGEST_LOGGED]
        place = line_name(self._record.pathname, self._record.lineno)
        return [f"it had logged {self._record.levelname}: {text} ({place})"]


def _caught_words(error: BaseException) -> str:
    """E.g. ``"it had caught ValueError: bad sample (train.py:12)"``, with the line that raised it."""
    try:
        text = f": {error}" if str(error) else ""
    except Exception:  # noqa: BLE001 - the program's own mistake: the type is enough
        text = ""
    said = " ".join(text.split())[:_LONGEST_LOGGED]
    return f"it had caught {type(error).__name__}{said}{_where(error)}"


@contextlib.contextmanager
def that_ends(ending: Sequence[Callable[[str], None]]) -> Iterator[None]:
    """Runs the program in the block; what is to be called at its end learns how it ended."""
    how = "finished"
    try:
        yield
    except SystemExit as end:
        how = "finished" if end.code in (None, 0) else f"exit code {end.code}{_where(end)}"
        raise
    except (KeyboardInterrupt, GeneratorExit):  # the latter if another signal's handler raised as the block was left
        how = "interrupted"
        _show_from_the_program_on()
        raise
    except BaseException as error:
        text = f"{error}{of_worker(error)}"
        how = f"{type(error).__name__}{text and f': {text}'}{_where(error)}"
        _show_from_the_program_on()
        raise
    finally:
        for finish in ending:
            finish(how)


def end_this_process() -> None:
    """Ends this process as torch's agent would: SIGTERM, then SIGKILL. Called on another thread than the main one."""
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _show_from_the_program_on() -> None:
    """Makes the traceback begin at the user's file, whichever hook shows it."""
    show = sys.excepthook

    def from_the_program_on(
        kind: type[BaseException], error: BaseException, frames: types.TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt) and (wait := script_interrupt.ended_wait(error)) is not None:
            error.__suppress_context__ = True
            frames = wait.__traceback__ if _where(wait) else frames
        while frames is not None and _runs_the_program(frames.tb_frame):
            frames = frames.tb_next
        show(kind, error.with_traceback(frames), frames)  # Python's own hook uses only the error
        if remedy := unregistered_method(error):
            tell(remedy)

    sys.excepthook = from_the_program_on


def of_worker(error: BaseException) -> str:
    """That a worker of a DataLoader has failed, to follow an error of the connection to it; "" if none has."""
    import torch

    if isinstance(error, OSError | EOFError):
        try:
            torch._C._error_if_any_worker_fails()
        except RuntimeError as failed:
            return f"; {str(failed).strip().removesuffix('.')}"
    return ""


def _where(error: BaseException) -> str:
    """The innermost line of the user's in a traceback, to follow the message; "" if there is none."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    of_user = [f" ({file}:{line})" for file, line in places if not is_library(file)]
    return of_user[-1] if of_user else ""


def _runs_the_program(frame: types.FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name == "runpy" or frame.f_globals.get("__package__") == __package__


def number(name: str, default: int = 0) -> int:
    """The value of an environment variable, which torch's agent sets."""
    return int(os.environ.get(name, default))


def about_me(script: str) -> dict[str, object]:
    """The facts about this rank from torch's agent, and its program."""
    import torch

    return {
        "rank": number("RANK"),
        "world_size": number("WORLD_SIZE", 1),
        "restart": number("TORCHELASTIC_RESTART_COUNT"),
        "run": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        "torch": str(torch.__version__),
        "script": script,
    }


def reach_models(*, observe: bool) -> None:
    """Makes every collective, and every model that the program wraps, record: replaces torch's class with ours, or
    observes torch's."""
    from ..parallel.monitoring import group_collectives

    group_collectives.record()
    if observe:
        from ..parallel.observe import observe_every_model

        observe_every_model()
    else:
        from ..parallel.observe_shards import observe_every_root
        from ..parallel.replacement import replace_torch_ddp

        replace_torch_ddp()
        observe_every_root()  # these have no class of ours
