"""Other bucket sizes, another order or comm hook while training runs; and monitoring that ranks begin in one step.

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
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...formatting import label_of
from ...protocol.commands import Change
from ..core import process_groups
from ..core.synchronizer import GradientSynchronizer
from . import change as changes
from .change import Decision

__all__ = ["Applied", "Pending", "Turn", "decide_together", "settle_steps"]


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
