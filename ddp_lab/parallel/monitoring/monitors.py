"""Looks at values while training runs, asked for by the client: watched gradients, compared replicas.

[Note: looks while training runs]
To watch a step and to compare replicas all ranks communicate, so they must begin with the same backward. That goes as
for other buckets ([Note: a change while training runs]): rank 0, told last, writes to the group's store after how many
backwards; all find it there. Nothing is assigned anew, and no generation ends. A rejoin drops what was asked for; if it
came when only some ranks had begun to watch, `settle` lets all of them watch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...protocol.commands import Look
from ..core import process_groups
from . import watching
from .inspection import live_models

if TYPE_CHECKING:
    from ..core.model_state import ModelState

__all__ = ["PendingLook", "check_now", "settle", "status"]


class PendingLook:
    """A look that this rank has been told of.

    Args:
        name: of the request, unique in the life of the group's store.
        wanted: what is asked for.
        decides: this is rank 0 of the model's group.
    """

    def __init__(self, name: str, wanted: Look, *, decides: bool) -> None:
        self.name, self.wanted = name, wanted
        self._decides = decides
        self._at: int | None = None

    def look(self, model: ModelState) -> bool:
        """Before a synchronised forward; returns whether it is done."""
        if self._at is None:
            self._find_out(model)
        if self._at is None or model.reducer.finished() < self._at:
            return False
        _begin(model, self.wanted)
        return True

    def _find_out(self, model: ModelState) -> None:
        store = process_groups.needed_store_of(model.process_group)
        key = f"ddp_lab/look/{model.reducer_id}/{self.name}"
        if self._decides:
            self._at = model.reducer.finished() + 1
            store.set(key, str(self._at))
            store.check([key])  # answered when the store has it
        elif store.check([key]):
            self._at = int(store.get(key).decode())


def _begin(model: ModelState, wanted: Look) -> None:
    if wanted.gradients is not None:
        watching.set_gradients(model, wanted.gradients)
    if wanted.drift is not None:
        watching.set_drift(model, wanted.drift)
    if wanted.check:
        _check(model)


def _check(model: ModelState) -> None:
    from .drift import check_drift, describe, describe_failure

    if model._join_config.enable:
        why = "inside join() ranks that have run out of inputs would not take part: check after it"
        return describe_failure(model, why)
    try:
        describe(model, check_drift(model))
    except RuntimeError as error:  # whoever asked is told; the training goes on
        describe_failure(model, str(error))


def check_now(reducers: dict[str, int]) -> None:
    """Compares the replicas of a model between cells; every rank of its group calls it.

    Args:
        reducers: rank -> this rank's number of the model.

    Raises:
        KeyError: there is no such model any more.
    """
    number = reducers[str(dist.get_rank())]
    for model in live_models():
        if model.reducer_id == number:
            return _check(model)
    raise KeyError(f"no living model of ddp_lab's class has reducer id {number}")


def status(model: ModelState) -> dict[str, Any]:
    """What is looked at: ``gradients`` and ``drift`` (every how many steps; 0: not), ``pending`` requests."""
    live = model._live
    pending = len(live.looks) if live is not None else 0
    return {"gradients": watching.gradients_every(model), "drift": watching.drift_every(model), "pending": pending}


def settle(model: ModelState) -> None:
    """With a new group: what some ranks watch all do. All ranks call it."""
    mine = [watching.gradients_every(model), watching.drift_every(model)]
    most = torch.tensor(mine, dtype=torch.int64, device=model.device)
    process_groups.all_reduce(most, model.process_group, dist.ReduceOp.MAX)
    gradients, drift = (int(every) for every in most.tolist())
    if gradients != mine[0]:
        watching.set_gradients(model, gradients)
    if drift != mine[1]:
        watching.set_drift(model, drift)
