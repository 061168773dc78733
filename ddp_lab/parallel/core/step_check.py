"""Warns of an optimizer step that uses gradients of a wrapped model that nothing has averaged.

[Note: steps with a rank's own gradients]
A forward outside no_sync announces a synchronised backward. If none is announced (`model.module(x)` was called), or one
does not end (an exception was swallowed, a parameter got no gradient), the gradients stay what this rank alone has
computed, and a step that uses them moves the ranks' models apart, in silence. So each step of any optimizer is followed
by one question to each reducer, together 0.5 us: is a backward unfinished, or did gradients arrive that belong to none
(C++, [Note: gradients that nothing has averaged])? Only if so does Python compare the optimizer's parameters with the
model's. Gradients of no_sync are the program's own wish. What another wrapped model averages counts as averaged.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...documentation import with_help
from .arguments import warn_user
from .parameters import module_text, names_text
from .synchronizer import GradientSynchronizer

__all__ = ["watch"]

_watched: list[weakref.ref[GradientSynchronizer]] = []
_installed = False


def watch(sync: GradientSynchronizer) -> None:
    """Checks the steps of optimizers that have parameters of this model, as long as it lives."""
    global _installed
    _watched[:] = [reference for reference in _watched if reference() is not None] + [weakref.ref(sync)]
    if not _installed:
        _installed = True
        register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():
        return
    for reference in _watched:
        sync = reference()
        if sync is not None and sync.reducer.in_doubt():
            _look(optimizer, sync)


def _look(optimizer: torch.optim.Optimizer, sync: GradientSynchronizer) -> None:
    if torch._C._current_graph_task_id() != -1:  # an optimizer in the backward
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    used = {index for index, tensor in enumerate(sync.trained.tensors) if id(tensor) in stepped}
    if not used:
        return
    stage = sync.reducer.stage()
    if stage["in_flight"]:
        _warn(sync, optimizer, "unfinished", _unfinished(sync, stage))
        return
    elsewhere = _averaged_elsewhere(sync)
    own = [i for i in sync.reducer.unaveraged() if i in used and id(sync.trained.tensors[i]) not in elsewhere]
    sync.reducer.forget_unaveraged()
    if own:
        names = names_text([sync.trained.names[index] for index in own])
        _warn(
            sync, optimizer, "unannounced",
            f"gradients of {names} arrived in a backward that no forward of the model announced, so it sent nothing. "
            "Either the wrapped module was called in place of the model (`model.module(x)` for `model(x)`), or another "
            "backward followed the synchronised one: add the losses up and call backward() once. To step with each "
            "rank's own gradients on purpose, run forward and backward under no_sync().",
        )  # fmt: skip


def _unfinished(sync: GradientSynchronizer, stage: dict[str, Any]) -> str:
    if sync.manual_end and not stage["missing"]:
        return (
            f"the backward of step {stage['step']} waits for finalize_backward(), since "
            "require_manual_backward_finalization is True. Call it before the step."
        )
    missing = names_text([sync.trained.names[index] for index in stage["missing"]])
    return (
        f"the backward of step {stage['step']} has not finished: "
        + (f"no gradient has arrived for {missing}. " if missing else "")
        + "Either an exception ended it: leave out the step then, and call zero_grad(). Or the loss does not depend on "
        "these parameters: freeze them, or pass find_unused_parameters=True to DistributedDataParallel."
    )


def _averaged_elsewhere(sync: GradientSynchronizer) -> set[int]:
    """Parameters of other wrapped models, all of whose gradients are averaged."""
    others = [other for reference in _watched if (other := reference()) is not None and other is not sync]
    return {id(tensor) for other in others if not other.reducer.in_doubt() for tensor in other.trained.tensors}


def _warn(sync: GradientSynchronizer, optimizer: torch.optim.Optimizer, kind: str, cause: str) -> None:
    if kind in sync.step_warnings:
        return
    sync.step_warnings.add(kind)
    text = (
        f"{type(optimizer).__name__}.step() has used gradients of {module_text(sync.module)} that "
        f"DistributedDataParallel has not averaged on rank {sync.group.rank()}, so the ranks' models may differ from "
        f"now on: {cause}"
    )
    warn_user(with_help(text, "own-gradients"))
