"""Copying and pickling a model: the default group only, as torch has it; the reducer is built anew.

[Note: a copy of a model]
The copy trains its own parameters. It communicates nothing when it is made, so its number may differ between ranks,
and it has no comm hook: whose state a hook may share between two models only its author knows.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .core import arguments, parameters
from .core.model_state import ModelState

__all__ = ["Pickling"]

# Built anew for the copy
_OWN = ("process_group", "reducer", "logger", "_survey", "_seen", "_idle_seen", "reducer_id", "device_mesh")
_OWN_LIVE = ("_live", "_reconfigured")


class Pickling(ModelState):
    """The part of `DistributedDataParallel` that copies. See [Note: a copy of a model]."""

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        for name in _OWN + _OWN_LIVE:
            state.pop(name, None)
        # a property; older releases look for the entry
        state["broadcast_buffers"] = self.forward_sync_buffers
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = arguments.default_group()
        torch.nn.Module.__setstate__(self, state)
        self.__dict__.setdefault("require_forward_param_sync", True)
        self.__dict__.setdefault("require_backward_grad_sync", True)
        self.__dict__.setdefault("_require_manual_backward_finalization", False)
        self.__dict__.setdefault("lazy_bucket_allocation", False)
        broadcast = self.__dict__.pop("broadcast_buffers", True)
        self.__dict__.setdefault("forward_sync_buffers", broadcast)
        self._live = self._reconfigured = None
        hooks, self._comm_hooks = self._comm_hooks, []
        if hooks:
            warnings.warn(
                "A copy of a DistributedDataParallel model has no comm hook: register it again.", stacklevel=2
            )
        survey = parameters.survey(self.module, self.parameters_to_ignore)
        self._choose_parameters(survey)
        self.reducer_id = self._agree(survey, collective=False)
        self._make_reducer(survey)
        self._start_features()

    def _history(self) -> dict[str, Any]:
        """What a copy on another rank has to continue with, besides comm hooks."""
        return {
            "reducer_id": self.reducer_id,
            "generation": self.reducer.generation(),
            "step": self.reducer.step(),
            "finished": self.reducer.finished(),
        }

    def _continue(self, history: Mapping[str, Any], hooks: Sequence[tuple[Any, object]]) -> None:
        """Goes on as the model whose `_history` this is, on all ranks: with a new reducer, built together.

        Args:
            history: of the model that this one is, or is a copy of.
            hooks: its comm hooks with their states, for a copy.
        """
        if not self._comm_hooks:
            self._comm_hooks = list(hooks)
        self.reducer_id = history["reducer_id"]
        self.reducer.set_generation(history["generation"])
        self.reducer.set_step(history["step"])
        self.reducer.set_finished(history["finished"])
        self._renew_reducer(parameters.survey(self.module, self.parameters_to_ignore))

    def _check_default_group(self) -> None:
        if self.process_group is not dist.group.WORLD:
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP "
                "constructor; for other groups copy `.module` and wrap the copy.",
            )
