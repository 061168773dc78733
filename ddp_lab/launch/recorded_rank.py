"""A process that is a rank of a script: it records what it does, and says how it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..command_line import tell
from ..diagnosis.crashes import unregistered_method
from ..diagnosis.stacks import is_library
from ..engine.groups import script_interrupt
from ..formatting import line_name
from ..protocol import journal
from .journal_writer import KEEP_EVENTS, JournalWriter

__all__ = ["GRACE_SECONDS", "about_me", "begin_journal", "end_this_process", "number", "of_worker", "reach_models"]
__all__ += ["that_ends"]

GRACE_SECONDS = 10.0
"""For a process to end after SIGTERM."""
_LONGEST_LOGGED = 200  # characters


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


class _LastWords:
    """The last warning or error of the program's own that it logs, whoever handles it, and where it called `sys.exit`:
    an error that is logged and not raised may be why a rank left early."""

    def __init__(self) -> None:
        self._record: logging.LogRecord | None = None
        self._make = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._keep)

    def _keep(self, *args: Any, **fields: Any) -> logging.LogRecord:
        made = self._make(*args, **fields)
        if made.levelno >= logging.WARNING and not is_library(made.pathname):
            self._record = made
        return made

    def __str__(self) -> str:
        """E.g. ``"it had logged WARNING: skipped the rest (train.py:31)"``; "" if nothing is known."""
        left = sys.exc_info()[1]
        exit_at = _where(left) if isinstance(left, SystemExit) else ""
        said = [f"it called sys.exit{exit_at}"] if exit_at else []
        return "; ".join([*self._logged(), *said])

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
