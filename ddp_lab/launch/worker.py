"""The process that torch's agent starts on each rank: records, and runs the user's program as if started directly.

`python -m ddp_lab.launch.worker [OPTIONS] PROGRAM [ARGUMENTS]`
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from ..command_line import tell
from ..engine.groups import script_interrupt
from ..engine.processes.parent_watch import on_parent_exit
from ..machine import no_collector
from .black_boxes import leave_in
from .endpoint_file import AGENT_EXITED, Examined, started
from .recorded_rank import about_me, begin_journal, end_this_process, number, reach_models, that_ends
from .spawned import ChildProcess, record_children, variables_of_agent

__all__ = ["main"]


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
            ending.append(begin_journal(given.folder, about_me(given.program), number("LOCAL_WORLD_SIZE", 1)))
        if given.control is not None:
            ending.append(_let_control(given.control))
        if given.doctor is not None:
            ending.insert(0, Examined(given.doctor, os.environ, number("RANK")).end)
    if given.agent is not None:
        _end_with_agent(given.agent, ending)
    with that_ends(ending):
        with no_collector():
            script_interrupt.install(number("MASTER_PORT"))
            reach_models(observe=given.observe)
            if given.folder is not None:
                ending.append(record_children(_child(given)))
        try:
            _run(given.program, given.arguments, module=given.module)
        except RuntimeError:
            _handle_signals()
            raise


def _handle_signals() -> None:
    """Python calls the handler of a signal that came while the main thread waited in C++ no later than it enters a
    function: here, not in what would end the journal."""


def _let_control(invitation: Path) -> Callable[[str], None]:
    """Connects to the process that made this file, which can then see and change models as a cluster's client does."""
    from ..engine import model_control
    from ..engine.telemetry import Telemetry

    telemetry = Telemetry(json.loads(invitation.read_text()), number("RANK"), number("WORLD_SIZE", 1))
    model_control.install(telemetry)
    return started(telemetry)


def _child(given: argparse.Namespace) -> ChildProcess:
    return ChildProcess(
        folder=given.folder.absolute(),
        script=given.program,
        given=variables_of_agent(),
        doctor=given.doctor,
        agent=given.agent,
        boxes=given.black_boxes,
    )


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
            call(AGENT_EXITED)
        end_this_process()

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
