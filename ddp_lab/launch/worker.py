"""The process that torch's agent starts on each rank: records, and runs the user's program as if started directly.

`python -m ddp_lab.launch.worker [OPTIONS] PROGRAM [ARGUMENTS]`
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import runpy
import shutil
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..command_line import tell
from ..diagnostics.torch_calls import is_library
from ..engine.processes.parent_watch import on_parent_exit
from ..formatting import line_name
from ..machine import no_collector
from ..protocol import journal
from .black_boxes import leave_in
from .journal_writer import KEEP_EVENTS, JournalWriter

if TYPE_CHECKING:
    from ..engine.telemetry import Telemetry

__all__ = ["main"]

_AGENT_EXITED = "the agent exited"
_GRACE_SECONDS = 10.0
_LONGEST_LOGGED = 200  # characters


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; its exceptions propagate."""
    parser = argparse.ArgumentParser(prog="python -m ddp_lab.launch.worker")
    parser.add_argument("--folder", type=Path, help="folder for the journal; without it there is none")
    parser.add_argument("--control", type=Path, help="file with the controller's addresses and keys, see Wire.endpoint")
    parser.add_argument("--doctor", type=Path, help="the same, of who examines this rank")
    parser.add_argument("--agent", type=int, help="id of the agent's process; this one ends with it")
    parser.add_argument("--black-boxes", help="the agent's files for the last events, see BlackBoxes")
    parser.add_argument("--observe", action="store_true")
    parser.add_argument("--module", action="store_true")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    ending: list[Callable[[str], None]] = []
    with no_collector():
        if given.black_boxes is not None:
            leave_in(given.agent, given.black_boxes, given.folder)
        if given.folder is not None:
            ending.append(_begin_journal(given.folder, given.program))
        if given.control is not None:
            ending.append(_let_control(given.control))
        if given.doctor is not None:
            ending.insert(0, _let_examine(given.doctor))
    if given.agent is not None:
        _end_with_agent(given.agent, ending)
    how = "finished"
    try:
        with no_collector():
            _reach_models(observe=given.observe)
        _run(given.program, given.arguments, module=given.module)
    except SystemExit as end:
        how = "finished" if end.code in (None, 0) else f"exit code {end.code}{_where(end)}"
        raise
    except KeyboardInterrupt:
        how = "interrupted"
        _show_from_the_program_on()
        raise
    except BaseException as error:
        how = f"{type(error).__name__}: {error}{_where(error)}"
        _show_from_the_program_on()
        raise
    finally:
        for finish in ending:
            finish(how)


def _begin_journal(folder: Path, script: str) -> Callable[[str], None]:
    path = journal.path_of(folder, _number("RANK"), _number("TORCHELASTIC_RESTART_COUNT"))
    keep = max(100_000, KEEP_EVENTS // _number("LOCAL_WORLD_SIZE", 1))
    writer, last = JournalWriter(path, _me(script), keep_events=keep), _LastWords()
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


def _let_control(invitation: Path) -> Callable[[str], None]:
    """Connects to the process that made this file, which can then see and change models as a cluster's client does."""
    from ..engine import model_control
    from ..engine.telemetry import Telemetry

    telemetry = Telemetry(json.loads(invitation.read_text()), _number("RANK"), _number("WORLD_SIZE", 1))
    model_control.install(telemetry)
    return _started(telemetry)


def _let_examine(invitation: Path) -> Callable[[str], None]:
    """Connects to the process that made this file, which can then ask what this rank does."""
    from ..engine.status import script
    from ..engine.telemetry import Telemetry

    telemetry = Telemetry(json.loads(invitation.read_text()), _number("RANK"), publishes=False)
    fail = script.install(telemetry, invitation.parent)
    stop = _started(telemetry)

    def end(how: str) -> None:
        if how == _AGENT_EXITED:
            shutil.rmtree(invitation.parent, ignore_errors=True)
        elif how == "finished":  # who says goodbye has
            stop(how)
        else:
            fail()

    return end


def _started(telemetry: Telemetry) -> Callable[[str], None]:
    """Starts it; returns what ends it, in this process alone."""
    telemetry.start()
    pid = os.getpid()
    return lambda how: telemetry.stop() if os.getpid() == pid else None


def _end_with_agent(agent: int, finish: Sequence[Callable[[str], None]]) -> None:
    """Makes this process end soon after its agent, as the agent would end it: SIGTERM, then SIGKILL.

    No effect if there is another process between them: then that one decides.

    Args:
        agent: its process id.
        finish: called first, with how it ended.
    """

    def end() -> None:
        tell(f"the agent (process {agent}) exited, so this rank ends too")
        for call in finish:
            call(_AGENT_EXITED)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() == agent:
        on_parent_exit(agent, end)
    elif not _lives(agent):
        end()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _show_from_the_program_on() -> None:
    """Makes the traceback begin at the user's file, whichever hook shows it."""
    show = sys.excepthook

    def from_the_program_on(
        kind: type[BaseException], error: BaseException, frames: types.TracebackType | None
    ) -> None:
        while frames is not None and _runs_the_program(frames.tb_frame):
            frames = frames.tb_next
        show(kind, error.with_traceback(frames), frames)  # Python's own hook uses only the error

    sys.excepthook = from_the_program_on


def _where(error: BaseException) -> str:
    """The innermost line of the user's in a traceback, to follow the message; "" if there is none."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    of_user = [f" ({file}:{line})" for file, line in places if not is_library(file)]
    return of_user[-1] if of_user else ""


def _runs_the_program(frame: types.FrameType) -> bool:
    return frame.f_globals is globals() or frame.f_globals.get("__name__") == "runpy"


def _number(name: str, default: int = 0) -> int:
    return int(os.environ.get(name, default))


def _me(script: str) -> dict[str, object]:
    """The facts about this rank from torch's agent, and its program."""
    import torch

    return {
        "rank": _number("RANK"),
        "world_size": _number("WORLD_SIZE", 1),
        "restart": _number("TORCHELASTIC_RESTART_COUNT"),
        "run": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        "torch": str(torch.__version__),
        "script": script,
    }


def _reach_models(*, observe: bool) -> None:
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


def _run(program: str, arguments: Sequence[str], *, module: bool) -> None:
    """Runs a script, or with `module` what ``python -m`` would, as ``__main__``."""
    if module:
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(program)
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(path)
    # Stays in sys.modules: the program's threads and atexit functions may still need it.
    main_module = types.ModuleType("__main__")
    vars(main_module).update(__file__=program, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main_module
    exec(compile(Path(path).read_bytes(), program, "exec"), vars(main_module))


if __name__ == "__main__":
    main()
