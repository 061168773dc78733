"""What is asked of one model while it trains: `model._live`, None as long as that is nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...protocol.commands import Change, Look
from ..core import process_groups
from ..monitoring.monitors import PendingLook
from .change import check
from .fault_injection import Happening
from .reconfigure import Pending

if TYPE_CHECKING:
    from ..core.model_state import ModelState

__all__ = ["Live", "ask", "prepare", "prepare_look", "status", "withdraw"]

_asking = threading.Lock()  # the thread that trains puts `model._live` away when nothing is left


class Live:
    """A pending change of the configuration, pending looks, and the faults that happen."""

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.faults = Happening()
        self.looks: list[PendingLook] = []

    def before_forward(self, model: ModelState, sync: bool) -> None:
        """On the thread that trains, before each forward with gradients."""
        if sync and torch._C._current_graph_task_id() == -1:
            self.look(model)
        self.faults.before_forward(model, sync)
        with _asking:
            if self.pending is None and self.faults.empty and not self.looks:
                model._live = None

    def look(self, model: ModelState) -> None:
        """Before a synchronised backward: carries a change out if it is due."""
        pending = self.pending
        if pending is not None and pending.look(model) and self.pending is pending:
            self.pending = None
        for one in [one for one in self.looks if one.look(model)]:
            self.looks.remove(one)


def ask(model: ModelState, request: Callable[[Live], None]) -> None:
    """Has `request` put something into what is asked of the model. Any thread."""
    with _asking:
        live = model._live or Live()
        request(live)
        model._live = live


# -- a change while training runs, for the thread that answers the client: see the note in reconfigure.py


def prepare(model: ModelState, name: str, change: Change, *, decides: bool) -> None:
    """Has the model look for a decision about this change from now on, or make it.

    Raises:
        ValueError, RuntimeError: it can't be done, or another one is pending.
    """
    check(model, change)
    process_groups.needed_store_of(model.process_group)
    pending = Pending(name, change, decides=decides)

    def add(live: Live) -> None:
        if live.pending is not None:
            raise RuntimeError("another change of this model is pending: wait for it, or withdraw it")
        live.pending = pending

    ask(model, add)


def prepare_look(model: ModelState, name: str, wanted: Look, *, decides: bool) -> None:
    """The same for a look at values, see [Note: looks while training runs]; several may be pending.

    Raises:
        ValueError: it makes no sense.
        RuntimeError: the model's group has no store.
    """
    wanted.validate()
    process_groups.needed_store_of(model.process_group)
    ask(model, lambda live: live.looks.append(PendingLook(name, wanted, decides=decides)))


def withdraw(model: ModelState, name: str) -> bool:
    """Drops a change that is not decided; returns whether it is gone."""
    live = model._live
    pending = live.pending if live is not None else None
    if live is None or pending is None or pending.name != name:
        return bool(status(model, name)["state"] != "applied")
    if not pending.withdraw():
        return False
    live.pending = None
    return True


def status(model: ModelState, name: str) -> dict[str, Any]:
    """How far a change has come on this rank.

    Returns:
        ``state``: ``"waiting"`` (for a forward), ``"decided"`` (`at`: after how many backwards), ``"applied"`` (`step`,
        `after` how many backwards, `generation`) or ``"dropped"``.
    """
    done, live = model._reconfigured, model._live
    if done is not None and done.name == name:
        return {"state": "applied", "step": done.step, "after": done.after, "generation": done.generation}
    pending = live.pending if live is not None else None
    if pending is None or pending.name != name:
        return {"state": "dropped"}
    return {"state": "waiting"} if pending.at is None else {"state": "decided", "at": pending.at}
