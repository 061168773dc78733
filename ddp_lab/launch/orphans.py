"""A worker ends when torch's agent ends, also where the agent was killed and could not end it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from ..engine.watch import on_parent_exit

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
        print(f"ddp-lab: the agent (process {agent}) is gone: this rank ends, too", file=sys.stderr, flush=True)
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
