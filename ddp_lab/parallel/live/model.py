"""One model of ours while it trains: requests to it from its program or from the thread that answers the client."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ... import faults, recording
from ...protocol.commands import Change, Look
from ..core import process_groups
from ..core.synchronizer import GradientSynchronizer
from ..monitoring import drift
from ..monitoring.monitors import Monitors
from . import breakpoints
from . import change as changes
from .breakpoints import Breakpoints
from .change import Decision
from .injected import Faults, wake_all
from .reconfigure import Applied, Pending, Turn, decide_together, settle_steps

__all__ = ["LiveModel", "apply_change", "check_replicas", "live_model", "live_models", "release"]


class LiveModel:
    """A pending change of the configuration, pending monitoring, active faults, and breakpoints.

    Args:
        sync: averages the model's gradients.
        monitors: monitor its values.

    Attributes:
        waiting: whether there is something to do before the next forward. The training thread reads it without a lock.
        applied: the last change that was made between two steps; None if there was none.
    """

    def __init__(self, sync: GradientSynchronizer, monitors: Monitors) -> None:
        self.sync = sync
        self.monitors = monitors
        self.breakpoints = Breakpoints(sync)
        self.waiting = False
        self.applied: Applied | None = None
        self._asking = threading.Lock()  # guards `waiting` and the state that it describes
        self._pending: Pending | None = None
        self._faults = Faults()
        self._looks: list[tuple[Turn, Look]] = []
        sync.on_new_group.append(weakref.WeakMethod(self._forget_requests))

    def enlist(self) -> None:
        """Its reducer exists: requests may arrive."""
        _living.add(self)

    # -- on the training thread

    def before_forward(self, synchronised: bool) -> None:
        """Before each forward with gradients, if something is `waiting`."""
        if synchronised and torch._C._current_graph_task_id() == -1:
            self.look()
        self._faults.before_forward(self.sync, synchronised)
        with self._asking:
            self.waiting = self._pending is not None or not self._faults.empty or bool(self._looks)

    def look(self) -> None:
        """Before a synchronised backward: carries out a change if it is due."""
        if not self.waiting:
            return
        pending = self._pending
        if pending is not None and pending.look(self.sync, self._carry_out) and self._pending is pending:
            self._pending = None
        for turn, wanted in [one for one in self._looks if one[0].has_come(self.sync, lambda: "")]:
            self.monitors.look(wanted)
            self._looks.remove((turn, wanted))

    def reconfigure(self, change: Change) -> None:
        """See `DistributedDataParallel.reconfigure`."""
        self._carry_out(decide_together(self.sync, change), "")

    def settle(self) -> None:
        """With a new group, before its first step: the ranks continue from the same step and configuration."""
        missed = settle_steps(self.sync, self.applied)
        if missed is not None:
            decision, generation = missed
            self._carry_out(decision, "")
            self.sync.reducer.set_generation(generation - 1)
            self.sync.replace_group(self.sync.group)  # back to the first buckets, of the new sizes
        self.monitors.settle()
        self.sync.step_agreed = True

    def _carry_out(self, decision: Decision, name: str) -> None:
        changes.apply(self.sync, decision)
        reducer = self.sync.reducer
        self.applied = Applied(
            name=name,
            number=1 + (self.applied.number if self.applied else 0),
            step=int(reducer.step()),
            after=int(reducer.finished()),
            generation=int(reducer.generation()),
            text=decision.text(),
        )
        recording.mark(decision.words)

    # -- any thread

    def _ask(self, add: Callable[[], None]) -> None:
        with self._asking:
            add()
            self.waiting = True

    def prepare(self, name: str, change: Change) -> None:
        """Makes the model wait for a decision about this change from now on, or make it on rank 0 of its group.

        Args:
            name: of the request, unique in the life of the group's store.
            change: see [Note: a change while training runs].

        Raises:
            ValueError, RuntimeError: it is not possible, or another one is pending.
        """
        changes.check(self.sync, change)
        process_groups.needed_store_of(self.sync.group)
        pending = Pending(change, self._turn("live", name))

        def add() -> None:
            if self._pending is not None:
                raise RuntimeError("another change of this model is pending: wait for it, or withdraw it")
            self._pending = pending

        self._ask(add)

    def prepare_look(self, name: str, wanted: Look) -> None:
        """The same for monitoring, see [Note: looks while training runs]; several may be pending.

        Raises:
            ValueError: it is invalid.
            RuntimeError: the model's group has no store.
        """
        wanted.validate()
        process_groups.needed_store_of(self.sync.group)
        self._ask(lambda: self._looks.append((self._turn("look", name), wanted)))

    def _turn(self, kind: str, name: str) -> Turn:
        return Turn(kind, name, decides=self.sync.group.rank() == 0)

    def withdraw(self, name: str) -> bool:
        """Drops a change that is not decided; returns whether it was dropped."""
        pending = self._pending
        if pending is None or pending.turn.name != name:
            return bool(self.status(name)["state"] != "applied")
        if not pending.withdraw():
            return False
        self._pending = None
        return True

    def status(self, name: str) -> dict[str, Any]:
        """The state of a change on this rank.

        Returns:
            ``state``: ``"waiting"`` (for a forward), ``"decided"`` (`at`: after how many backwards), ``"applied"``
            (`step`, `after` how many backwards, `generation`) or ``"dropped"``.
        """
        done, pending = self.applied, self._pending
        if done is not None and done.name == name:
            return {"state": "applied", "step": done.step, "after": done.after, "generation": done.generation}
        if pending is None or pending.turn.name != name:
            return {"state": "dropped"}
        return {"state": "waiting"} if pending.turn.at is None else {"state": "decided", "at": pending.turn.at}

    def monitoring(self) -> dict[str, int]:
        """The active monitoring: ``gradients`` and ``drift`` (interval in steps; 0: off), ``pending`` requests."""
        watched = self.monitors
        return {"gradients": watched.gradients_every, "drift": watched.drift_every, "pending": len(self._looks)}

    def inject(self, fault: faults.Fault) -> int | None:
        """Injects a fault from the next forward on; does nothing on other ranks than the fault's.

        Returns:
            The fault's number, for `end_faults`; None on other ranks.

        Raises:
            ValueError: it is invalid for this model.
        """
        if fault.rank != dist.get_rank():
            return None
        numbers: list[int] = []
        self._ask(lambda: numbers.append(self._faults.ask(self.sync, fault)))
        return numbers[0]

    def end_faults(self, number: int | None = None) -> None:
        """Ends one fault of this rank, or all of the model's, before its next forward."""
        self._faults.end(number)

    def faults(self) -> list[dict[str, Any]]:
        """The model's faults on this rank: the fields of each, its ``number``, and whether it has ``begun``."""
        return self._faults.listed()

    def _forget_requests(self) -> None:
        """Decisions in the old group's store are lost."""
        self._pending = None
        self._looks.clear()


_living: weakref.WeakSet[LiveModel] = weakref.WeakSet()


def live_models() -> list[LiveModel]:
    """The models of ours in this process that exist and have a reducer, in the order of their numbers."""
    return sorted(_living, key=lambda model: model.sync.model_id)


def live_model(reducer: int) -> LiveModel:
    """The model with this number on this rank.

    Raises:
        KeyError: the model no longer exists.
    """
    for model in live_models():
        if model.sync.model_id == reducer:
            return model
    raise KeyError(f"there is no ddp_lab model {reducer} any more")


def release(why: str) -> None:
    """Stops this rank: ends pauses (with an exception) and sleeps of faults, and removes all breakpoints.

    Any thread; never blocks.
    """
    for model in live_models():
        model.breakpoints.end(why)
    wake_all()
    breakpoints.restore_timeouts()


# -- called by the client's cells on all ranks, while nothing else trains


def apply_change(reducer: int, change: Mapping[str, Any]) -> None:
    """Applies `change` to the model with this number on this rank. All of its ranks make the same call.

    Args:
        reducer: this rank's number of the model.
        change: the fields of a `Change`; empty: nothing happens.
    """
    if change:
        live_model(reducer).reconfigure(Change(**change))


def check_replicas(reducers: dict[str, int]) -> None:
    """Compares the replicas of a model between cells; every rank of its group calls it.

    Args:
        reducers: rank -> this rank's number of the model.

    Raises:
        KeyError: the model no longer exists.
    """
    drift.check_replicas(live_model(reducers[str(dist.get_rank())]).sync)
