"""Whether several backwards of an optimizer step reduce the gradients that they add up.

[Note: backwards that add up]
After each step of an optimizer that has parameters of a model, its synchronised backwards since the last such step are
counted. They added up gradients if each but the first found one: a hook on one parameter looks before a gradient is
accumulated. Setting gradients to None shows there. Filling them with zeros shows in their values, which are read in the
first of these optimizer steps, and later in the 16th, 32nd, 64th, … of those that seem to add up. So a step with
several losses whose gradients are cleared in between (several optimizers, a closure, sharpness-aware minimisation) is
no accumulation. Only the newest run of optimizer steps that added up counts: one that did not ends it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils.hooks import unserializable_hook

from ... import recording

__all__ = ["AccumulationWatch", "after_step"]

_Owner = TypeVar("_Owner")
_ENOUGH = 5  # optimizer steps in a row, before it is told
_READ = 8  # the first optimizer steps whose gradients are read
_watches: weakref.WeakSet[AccumulationWatch] = weakref.WeakSet()
_WATCHES = "_ddp_lab_watches"  # attribute of an optimizer
_made = 0  # how often a watch was given parameters


class AccumulationWatch:
    """Counts the backwards of a model between optimizer steps. See [Note: backwards that add up].

    Args:
        owner: of the counts; not kept alive.
        counts: returns for the owner its number of synchronised backwards, and the number of the model in events.
    """

    def __init__(self, owner: _Owner, counts: Callable[[_Owner], tuple[int, int]]) -> None:
        reference = weakref.ref(owner)
        self._counts: Callable[[], tuple[int, int] | None] = lambda: (
            None if (found := reference()) is None else counts(found)
        )
        self._parameters: set[int] = set()  # ids
        self._end_hook: weakref.finalize[..., Any] | None = None
        self._before = 0  # synchronised backwards, at the last optimizer step
        self._seen = self._cleared = 0  # accumulations since then, and those but the first that found no gradient
        self._runs = 0  # optimizer steps in a row that have added up
        self._backwards = self._fewest = self._most = 0
        self._told = False
        _watches.add(self)

    def follow(self, parameters: Iterable[torch.Tensor], *, hook: bool = True) -> None:
        """Watches these from now on; without `hook` the caller calls `before_accumulation`."""
        global _made
        _made += 1
        tensors = list(parameters)
        self._parameters = {id(one) for one in tensors}
        self.remove()
        if hook and tensors:
            smallest = min(tensors, key=torch.Tensor.numel)
            handle = smallest.register_hook(_hook(weakref.ref(self), weakref.ref(smallest)))
            self._end_hook = weakref.finalize(self, handle.remove)

    def remove(self) -> None:
        """Removes the hook."""
        if self._end_hook is not None:
            self._end_hook()

    def has_any_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether it follows one of these parameters."""
        return any(id(one) in self._parameters for one in parameters)

    def before_accumulation(self, gradient: torch.Tensor | None) -> None:
        """A gradient is about to be accumulated into this one."""
        self._seen += 1
        if self._seen > 1 and (gradient is None or (self._reads(gradient) and not gradient.any())):
            self._cleared += 1

    def _reads(self, gradient: torch.Tensor) -> bool:
        """Whether this gradient's values are read."""
        wanted = self._runs < _READ or not self._runs & (self._runs - 1)
        if not wanted or gradient.layout is not torch.strided:
            return False
        return not (gradient.is_cuda and torch.cuda.is_current_stream_capturing())

    def after_step(self) -> None:
        """An optimizer has stepped."""
        found = self._counts()
        if found is None or found[0] == self._before:  # a further optimizer of the same gradients
            return
        (now, model), count = found, found[0] - self._before
        if 1 < count <= self._seen and not self._cleared:
            self._fewest = min(self._fewest, count) if self._runs else count
            self._most = max(self._most, count) if self._runs else count
            self._runs, self._backwards = self._runs + 1, self._backwards + count
            doubled = self._runs % _ENOUGH == 0 and not (self._runs // _ENOUGH) & (self._runs // _ENOUGH - 1)
        else:
            self._runs = self._backwards = self._fewest = self._most = 0
            doubled = False
        self._before, self._seen, self._cleared = now, 0, 0
        if doubled or (self._told and not self._runs):
            self._told = bool(self._runs)
            self._describe(model, now)

    def _describe(self, model: int, step: int) -> None:
        made = {"type": "accumulation", "reducer": model, "step": step - 1, "optimizer_steps": self._runs}
        counts = {"backwards": self._backwards, "fewest": self._fewest, "most": self._most}
        recording.describe_fleeting({**made, **counts})


def _hook(
    watch: weakref.ref[AccumulationWatch], parameter: weakref.ref[torch.Tensor]
) -> Callable[[torch.Tensor], None]:
    def look(gradient: torch.Tensor) -> None:
        found, of = watch(), parameter()
        if found is not None and of is not None:
            found.before_accumulation(of.grad)

    unserializable_hook(look)
    return look


def _watches_of(optimizer: torch.optim.Optimizer) -> list[weakref.ref[AccumulationWatch]]:
    """The watches of models of which this optimizer has parameters."""
    known: tuple[int, list[weakref.ref[AccumulationWatch]]] | None = vars(optimizer).get(_WATCHES)
    if known is None or known[0] != _made:
        held = [one for group in optimizer.param_groups for one in group["params"]]
        known = (_made, [weakref.ref(one) for one in list(_watches) if one.has_any_of(held)])
        vars(optimizer)[_WATCHES] = known  # neither saved nor copied with it
    return known[1]


def after_step(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer has stepped."""
    for reference in _watches_of(optimizer):
        if (watch := reference()) is not None:
            watch.after_step()
