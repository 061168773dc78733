"""One model of ours while it trains: requests to it from its program or from the thread that answers the client.

[Note: a change while training runs]
Ranks must change between the same two backwards: buckets and hooks decide which collectives a backward enters. The
client can reach each rank at any moment, but never two at the same step. So:

1. Each rank except the group's rank 0 receives the change and answers; from then on it checks the group's store before
   each synchronised forward.
2. Then rank 0 receives it. Before its next synchronised forward, e.g. after n backwards, it decides (an order of
   readiness is its own) and writes to the store: "after n + 1 backwards, this".
3. Each rank carries it out before its first synchronised forward after n + 1 backwards.

No rank is too late: to finish its backward number n + 1 it has waited for rank 0's buckets of the same backward, which
rank 0 launched after that forward, and so after its decision was in the store (it reads it back: a write alone returns
before the store has it). This holds for everything that waits for all ranks in each backward; hooks that do not are
refused, see [Note: replacing a comm hook]. Backwards are counted as they end (`Reducer::finished`): forwards under
no_sync don't count and don't check, forwards without a backward change nothing, a backward that an exception ended
counts on no rank. A rank that has run out of inputs checks before each backward that it shadows. Forwards inside a
backward (checkpointing) do not check. Carrying out communicates nothing.

If training pauses or its cell ends meanwhile, the flags stay and the next forwards continue from there. Until rank 0
has decided, the change can be withdrawn, first there. A rejoin drops it; if that happened when only some ranks had
changed, `settle`, in the first forward with the new group, brings the others to the same configuration.

[Note: looks while training runs]
Monitoring a step and comparing replicas communicate, so all ranks must begin with the same backward. That works the
same way: rank 0, asked last, writes to the group's store after how many backwards; the others read it there. No buckets
are rebuilt. A rejoin drops the request; if that happened when only some ranks had begun to monitor, `Monitors.settle`
makes all of them monitor.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ... import faults, recording
from ...formatting import label_of
from ...protocol.messages import Change, ChangeState, Monitoring, MonitoringRequest
from ..core import process_groups
from ..core.synchronizer import GradientSynchronizer
from ..monitoring import drift
from ..monitoring.monitors import Monitors
from . import breakpoints
from . import change as changes
from .breakpoints import Breakpoints
from .change import Decision
from .injected import Faults, wake_all

__all__ = ["LiveModel", "apply_change", "check_replicas", "live_model", "live_models", "release"]


@dataclass(frozen=True)
class Applied:
    """The last change applied to a model on this rank.

    Attributes:
        name: of the request; empty for `model.reconfigure`.
        number: number of this change, 1 for the first; equal on all ranks.
        step: index of the first backward with it.
        after: how many backwards had ended before.
        generation: version of the bucket layout that it made.
        text: the decision.
    """

    name: str
    number: int
    step: int
    after: int
    generation: int
    text: str


class Turn:
    """After how many backwards all ranks do something, and what: rank 0 decides, the others read it from the store.

    Args:
        kind: of the request.
        name: of the request, of its kind unique in the life of the group's store.
        decides: whether this is rank 0 of the model's group.

    Attributes:
        at: after how many backwards; None: not decided, as far as this rank knows.
        decision: the text that rank 0 has written.
    """

    def __init__(self, kind: str, name: str, *, decides: bool) -> None:
        self.name = name
        self.at: int | None = None
        self.decision = ""
        self._kind, self._decides = kind, decides

    def has_come(self, sync: GradientSynchronizer, decide: Callable[[], str | None]) -> bool:
        """Before a synchronised forward: whether it is time. On rank 0 `decide` is called until it is not None."""
        if self.at is None:
            store = process_groups.needed_store_of(sync.group)
            key = f"ddp_lab/{self._kind}/{sync.model_id}/{self.name}"
            if self._decides:
                decision = decide()
                if decision is not None:
                    self.at, self.decision = sync.reducer.finished() + 1, decision
                    store.set(key, f"{self.at} {decision}")
                    store.check([key])  # answered when the store has it
            elif store.check([key]):
                at, self.decision = store.get(key).decode().split(" ", 1)
                self.at = int(at)
        return self.at is not None and sync.reducer.finished() >= self.at


class Pending:
    """A change that this rank has received, and its turn.

    Args:
        change: the requested change.
        turn: when it is carried out.
    """

    def __init__(self, change: Change, turn: Turn) -> None:
        self.turn = turn
        self._change = change
        self._gate = threading.Lock()  # the training thread checks, that of the client withdraws
        self._withdrawn = False

    def withdraw(self) -> bool:
        """Drops it, unless it is decided; returns whether it was dropped."""
        with self._gate:
            if self.turn.at is None:
                self._withdrawn = True
            return self._withdrawn

    def look(self, sync: GradientSynchronizer, carry_out: Callable[[Decision, str], None]) -> bool:
        """Before a synchronised forward; returns whether there is nothing more to do."""

        def decide() -> str | None:
            return None if sync.may_still_rebuild else changes.decide(sync, self._change).text()

        with self._gate:
            if self._withdrawn:
                return True
            due = self.turn.has_come(sync, decide)
        if due:
            carry_out(Decision.of(self.turn.decision), self.turn.name)
        return due


def decide_together(sync: GradientSynchronizer, change: Change) -> Decision:
    """The decision for all ranks, if all of them request it between the same two backwards.

    Raises:
        ValueError, RuntimeError: it is not possible, or the ranks request different changes.
    """
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError("reconfigure() was called during a backward: call it after backward() has returned")
    changes.check(sync, change)
    _check_alike(sync, change)
    decision = changes.decide(sync, change)
    if decision.order is not None:
        order = torch.tensor(decision.order, dtype=torch.int64, device=sync.device)
        process_groups.broadcast(order, sync.group)
        decision.order[:] = order.tolist()
    return decision


def _check_alike(sync: GradientSynchronizer, change: Change) -> None:
    digest = hashlib.sha256(change.text().encode()).digest()[:8]
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], dtype=torch.int64, device=sync.device)
    rows = process_groups.gather_numbers(mine, sync.group)
    different = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if different:
        raise RuntimeError(
            f"reconfigure() was called with different arguments on {label_of(different)} of the model's group than on "
            "its rank 0, so nothing was changed"
        )


def settle_steps(sync: GradientSynchronizer, applied: Applied | None) -> tuple[Decision, int] | None:
    """Synchronises ranks after a failure, when they may have counted different numbers of backwards or missed a change.

    They continue from the same numbers, with the newest configuration.

    Args:
        sync: the model's.
        applied: the last change that this rank has applied.

    Returns:
        The change that this rank has missed, and the newest layout version; None: it has the newest configuration.
    """
    number = applied.number if applied else 0
    mine = [sync.reducer.step(), sync.reducer.finished(), number, -number, sync.reducer.generation()]
    step, finished, newest, oldest, generation = process_groups.maximum(mine, sync.group, sync.device)
    sync.reducer.set_step(step)
    sync.reducer.set_finished(finished)
    if newest == -oldest:
        return None
    rank = int(sync.group.rank())
    (source,) = process_groups.maximum([rank if number == newest else -1], sync.group, sync.device)
    own = applied.text if applied else ""
    decision = process_groups.broadcast_text(own, sync.group, sync.device, source)
    return None if number == newest else (Decision.of(decision), generation)


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
        self._looks: list[tuple[Turn, MonitoringRequest]] = []
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

    def prepare_look(self, name: str, wanted: MonitoringRequest) -> None:
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
            return bool(self.status(name).state != "applied")
        if not pending.withdraw():
            return False
        self._pending = None
        return True

    def status(self, name: str) -> ChangeState:
        """The state of a change on this rank."""
        done, pending = self.applied, self._pending
        if done is not None and done.name == name:
            return ChangeState("applied", step=done.step, after=done.after, generation=done.generation)
        if pending is None or pending.turn.name != name:
            return ChangeState("dropped")
        return ChangeState("waiting") if pending.turn.at is None else ChangeState("decided", pending.turn.at)

    def monitoring(self) -> Monitoring:
        """The active monitoring."""
        return Monitoring(self.monitors.gradients_every, self.monitors.drift_every, len(self._looks))

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
