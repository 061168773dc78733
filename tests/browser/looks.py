"""What a dashboard says in each state of a cluster: the table that `test_looks` goes through, in this order.

One cluster passes through the states; each leads from the one before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_lab import CellError, Cluster
from ddp_lab.output.board import SilentBoard
from ddp_lab.timeline.recorded.player import Player
from ddp_lab.timeline.timeline import Timeline
from tests.waiting import wait_until

__all__ = ["LOOP", "STATES", "Stage", "State"]

MODEL = """
torch.manual_seed(0)
model = ddp_lab.DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.03)
def step():
    model.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
"""
LOOP = """
import pathlib, time
while True:
    time.sleep(0.01)
    step()
    go = torch.tensor([0 if pathlib.Path({path!r}).exists() else 1])
    dist.broadcast(go, 0)
    if not go: break
"""
FAILS = """
for _ in range(5): step()
if rank == 1: raise ValueError("end of data")
dist.barrier()
"""
SECOND = """
second = ddp_lab.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)))
for _ in range(20):
    second.zero_grad()
    second(torch.randn(4, 32)).sum().backward()
"""


class Stage:
    """Two ranks, and what a test does with them.

    Args:
        folder: for the files that end a training.
    """

    def __init__(self, folder: Path) -> None:
        self.lab = Cluster(2, backend="gloo").start()
        self.other = Cluster(1, backend="gloo")
        self._folder, self._number = folder, 0
        self._cell: Any = None

    def run(self, code: str, **options: Any) -> Any:
        """Runs a cell that shows nothing."""
        return self.lab.run(code, board=SilentBoard(), **options)

    def train(self) -> None:
        """Begins to train, in the background, and returns after some steps."""
        self._number += 1
        begun = self._last
        self._cell = self.run(LOOP.format(path=str(self._gate)), wait=False)
        wait_until(lambda: self._last > begun + 30, "some steps")

    def finish(self) -> None:
        """Ends the training."""
        self._gate.touch()
        self._cell.wait()

    def interrupt(self) -> None:
        """Trains, and is interrupted."""
        self.train()
        self.lab.interrupt()
        with contextlib.suppress(CellError):
            self._cell.wait()

    def change(self) -> None:
        """Trains, and gets other buckets meanwhile."""
        self.train()
        self.lab.reconfigure(bucket_cap_mb=0.01)
        begun = self._last
        wait_until(lambda: self._last > begun + 30, "steps after the change")
        self.finish()

    def fail(self) -> None:
        """Has rank 1 raise."""
        with contextlib.suppress(CellError):
            self.run(FAILS)

    def end(self) -> None:
        """Ends all processes."""
        self.lab.stop()
        self.other.stop()

    @property
    def _gate(self) -> Path:
        return self._folder / f"stop{self._number}"

    @property
    def _last(self) -> int:
        return max((one.last_step for one in self.lab.timeline.reducers()), default=-1)


def _of_cluster(stage: Stage) -> tuple[Timeline, dict[str, Any]]:
    return stage.lab.timeline, stage.lab.dashboard_means()


def _of_replay(stage: Stage) -> tuple[Timeline, dict[str, Any]]:
    player = Player(stage.lab.timeline, speed=2.0)
    views = ("overview", "timeline", "sync", "overlap", "stragglers", "buckets", "findings", "what_if", "gradients")
    return player.timeline, {"player": player, "views": views}


@dataclass(frozen=True)
class State:
    """One state.

    Attributes:
        name: as a reader calls it.
        prepare: leads a cluster there.
        line: how the line above all views begins; "" if there is none.
        enabled: whether controls of the ranks can be used; None: there are none.
        words: title of a tab -> what stands in it.
        shown: what the dashboard is made of.
        script: is run in the page before it is looked at.
    """

    name: str
    prepare: Callable[[Stage], Any]
    line: str = ""
    enabled: bool | None = True
    words: Mapping[str, str] = field(default_factory=dict)
    shown: Callable[[Stage], tuple[Timeline, dict[str, Any]]] = _of_cluster
    script: str = ""


_GONE = "() => { window.model.send = () => { throw new Error('Cannot send') }; window.emit('comm_live_update') }"
_NOTHING = {
    "Overview": "No step recorded yet",
    "Timeline": "No step recorded yet",
    "Step through": "No model yet",
    "Fault injection": "No model yet",
    "What if": "train some steps first",
    "Gradients": "No model yet",
    "Collectives": "No collective has been run yet",
}
_TRAINED = {
    "Overview": "A step takes",
    "Timeline": "Gradient sync",
    "Overlap": "Medians of the last",
    "Stragglers": "last",
    "Buckets": "parameters in",
    "Step through": "No breakpoints",
    "Fault injection": "No active faults",
    "What if": "Recorded:",
    "Gradients": "No step has been monitored",
    "Collectives": "No collective has been run yet",
}
_OVER = {**_TRAINED, "Step through": "Pause", "Fault injection": "Inject"}
_LAYOUT = {**_TRAINED, "Buckets": "in 4 buckets"}

STATES = (
    State("never trained", lambda stage: None, words=_NOTHING),
    State(
        "training",
        lambda stage: (stage.run(MODEL), stage.train()),
        words={**_TRAINED, "Collectives": "Ranks 0–1 are running a cell: wait until it ends"},
    ),
    State("finished", lambda stage: stage.finish(), words=_TRAINED),
    State("failed", lambda stage: stage.fail(), words=_TRAINED),
    State("interrupted", lambda stage: stage.interrupt(), words={"Timeline": "Gradient sync"}),
    State(
        "rejoined", lambda stage: stage.run("1"), words={"Timeline": "Gradient sync", "Step through": "No breakpoints"}
    ),
    State("other layout", lambda stage: (stage.run(MODEL), stage.change()), words=_LAYOUT),
    State("several models", lambda stage: stage.run(SECOND), words={**_TRAINED, "Timeline": "model"}),
    State("several clusters", lambda stage: stage.other.start(), words=_TRAINED),
    State(
        "cluster stopped",
        lambda stage: stage.end(),
        line="The cluster was stopped: this is the last state, of step 19, ",
        enabled=False,
        words=_OVER,
    ),
    State(
        "cluster replaced",
        lambda stage: stage.other.start(),
        line="The cluster was stopped, and another one is running: this is the last state, of step 19, ",
        enabled=False,
        words=_OVER,
    ),
    State(
        "kernel gone",
        lambda stage: None,
        line="The kernel was restarted: this is the last state, of step 19, ",
        enabled=False,
        words={**_OVER, "What if": "The kernel was restarted. There is no prediction to show."},
        script=_GONE,
    ),
    State(
        "replayed",
        lambda stage: None,
        enabled=None,
        words={"Timeline": "Gradient sync", "Overlap": "Medians"},
        shown=_of_replay,
    ),
)
