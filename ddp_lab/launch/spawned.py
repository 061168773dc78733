"""Scripts that start their ranks themselves, with `torch.multiprocessing.spawn`, under `ddp-lab run`.

[Note: ranks that a script spawns]
Torch's agent starts such a script once, as a rank that it is not. Its children inherit the agent's variables: with
these they would wait forever for a store that nobody serves. So the variables are taken away before they start, and
each child writes the journal of its own rank: the number that `spawn` gives it. What examines ranks that hang, and what
keeps the last events of a rank that is killed, know only the processes of the agent.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..diagnostics.torch_calls import is_library
from ..errors import DdpLabError
from ..formatting import line_name
from ..machine import no_collector
from .recorded_rank import about_me, begin_journal, reach_models, that_ends

__all__ = ["SpawnedRank", "record_spawned_ranks"]

_OF_THE_AGENT = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_", "RANK", "WORLD_SIZE")  # as names begin


@dataclass(frozen=True)
class SpawnedRank:
    """What makes a child of the script record; picklable.

    Attributes:
        folder: for its journal.
        script: that is run. A child has imported it before: torch's own classes are observed, not replaced.
    """

    folder: Path
    script: str

    def run(self, size: int, function: Callable[..., Any], rank: int, *args: Any) -> Any:
        """Calls the function of one of `size` ranks."""
        with no_collector():
            ending = [begin_journal(self.folder, {**about_me(self.script), "rank": rank, "world_size": size}, size)]
        with that_ends(ending):
            with no_collector():
                reach_models(observe=True)
            return function(rank, *args)


def record_spawned_ranks(rank: SpawnedRank, let_go: Callable[[], None]) -> None:
    """From now on, ranks that the script spawns are recorded instead of this process.

    Args:
        rank: what they do.
        let_go: called in this process before the first child starts: it is no rank.
    """
    import torch.multiprocessing as mp

    spawning = sys.modules["torch.multiprocessing.spawn"]
    start = spawning.start_processes

    @functools.wraps(start)
    def started(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *more: Any, **options: Any) -> Any:
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size > 1:
            raise DdpLabError(
                f"the script starts its ranks itself{_line()}, and torch's agent has started it {size} times: run it "
                "without --nproc-per-node"
            )
        let_go()
        for name in [one for one in os.environ if one.startswith(_OF_THE_AGENT)]:
            del os.environ[name]
        return start(functools.partial(rank.run, nprocs, fn), args, nprocs, *more, **options)

    spawning.start_processes = mp.start_processes = started  # type: ignore[attr-defined]


def _line() -> str:
    """The user's line that called this, in parentheses; "" if there is none."""
    for frame in reversed(traceback.extract_stack()):
        if not is_library(frame.filename):
            return f" ({line_name(frame.filename, frame.lineno)})"
    return ""
