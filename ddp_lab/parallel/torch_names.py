"""Methods of torch's class that libraries call by name, beside forward and hooks: modes, logging, joining, group.

Inherited from torch's class as they are, since they only read attributes that ours has: `scatter`, `gather`,
`to_kwargs`, `train`, `_get_data_parallel_params`, `_set_params_and_buffers_to_ignore_for_model`,
`_build_params_for_reducer`, `_build_debug_param_to_name_mapping`, `_inside_ddp_forward`, `_get_active_ddp_module`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from .core import agreement, arguments

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import JoinHook

from .core.model_state import ModelState

__all__ = ["TorchNames"]


class TorchNames(ModelState):
    """The part of `DistributedDataParallel` that answers to names of torch's class."""

    # -- logging data

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """How the model was set up and what its sampled steps cost; keys are torch's."""
        return self.logger.data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Takes logging data every `sample_rate` iterations after the first ten.

        Raises:
            ValueError: `sample_rate` is below 1.
        """
        if sample_rate < 1:
            self._log_and_throw(
                ValueError,
                f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate}",
            )
        self.logger.set_sample_rate(sample_rate)

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        """Raises, and keeps the text in the logging data."""
        if self.logger is not None:
            self.logger.set_error_and_log(f"{err_type}: {err_msg}")
        raise err_type(err_msg)

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Keeps the text of an exception in the logging data."""
        try:
            yield
        except Exception as error:
            self.logger.set_error_and_log(f"{type(error)}: {error}")
            raise

    def _warn_of_no_sync(self) -> None:
        if self.reducer.take_no_sync_warning():
            warnings.warn(
                "A backward ran inside no_sync(), but its forward did not: its gradients were averaged over the ranks. "
                "Put the forward inside no_sync() too.",
                stacklevel=3,
            )

    # -- static graph

    def _set_static_graph(self) -> None:
        """Same as the argument `static_graph=True`; before the first forward.

        Raises:
            RuntimeError: training has begun.
        """
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        with self._logged():
            self.reducer.set_static_graph()
        self.static_graph = True
        self.logger._set_static_graph()
        arguments.warn_static(self.find_unused_parameters)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Without effect: outputs are never cloned here."""
        self._ddp_sink_clone = val

    # -- the reducer

    def _remove_autograd_hooks(self) -> None:
        """The model trains as a plain module from now on."""
        self.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        """Raises RuntimeError if a backward has begun and not averaged all gradients."""
        with self._logged():
            self.reducer.check_ended()
        if self.reducer.in_flight():
            self._log_and_throw(
                RuntimeError,
                "Expected to finish all reduction: a backward has begun and some buckets are not reduced",
            )

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        """Tells which rows of sparse embeddings have gradients, by parameter name: they then travel densely."""
        self.reducer._set_sparse_metadata(global_unique_ids)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Points the model at another process group, e.g. after a rejoin. Communicates at the next forward.

        Buckets go back to the first assignment, because a failure may have struck when only some ranks had
        rebuilt them. State of a comm hook that holds the old group is the caller's to replace. On a rank that is
        not in the new group only the buckets change.
        """
        if isinstance(new_process_group, dist.ProcessGroup):
            self.process_group = new_process_group
        self._assignment = self._first_assignment()
        self._has_rebuilt_buckets = False
        self._step_agreed = False
        if self._live is not None:  # what was decided in the old group's store is lost
            self._live.pending = None
            self._live.looks.clear()
        self.reducer.update_process_group(
            self.process_group, agreement.process_group_index(self.process_group), self._assignment
        )
        self._describe_assignment()

    # -- uneven inputs

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Any:
        """Context in which the ranks may have different numbers of inputs.

        A rank that has run out takes part in the others' collectives until all have. At the end every rank has the
        model of the last one that trained.

        Args:
            divide_by_initial_world_size: divide gradients by the size of the group; False: by the number of ranks
                that still have inputs.
            enable: False makes the context do nothing.
            throw_on_early_termination: RuntimeError on all ranks as soon as one has run out.
        """
        from torch.distributed.algorithms.join import Join

        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does in the others' iterations; see `torch.distributed.algorithms.join`."""
        from .features import join

        return join.make_join_hook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives of a join context."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of the collectives of a join context."""
        return self.process_group

    # -- optimizers

    def _register_fused_optim(
        self, optim: type[torch.optim.Optimizer], *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Steps an optimizer on each bucket as soon as it is averaged, while the backward goes on."""
        from .features import optimizer_in_backward

        optimizer_in_backward.register_fused_optim(self, optim, *args, optim_params=optim_params, **kwargs)
