"""A worker ends when torch's agent ends, also where the agent was killed and could not end it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence

from ..engine.processes.parent_watch import on_parent_exit
from .telling import tell

__all__ = ["end_with_agent"]

_GRACE_SECONDS = 10.0


def end_with_agent(agent: int, finish: Sequence[Callable[[str], None]]) -> None:
    """Lets this process end soon after its agent, as the agent would have ended it: SIGTERM, then SIGKILL.

    Without effect where another process stands between them: then that one decides.

    Args:
        agent: its process id.
        finish: called first, with how it ended.
    """

    def end() -> None:
        tell(f"the agent (process {agent}) is gone: this rank ends, too")
        for call in finish:
            call("the agent is gone")
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
