"""DistributedDataParallel: averages gradients over ranks while the backward runs, and records how.

[Note: a subclass that runs none of torch's reducer]
Much code asks `isinstance(model, torch.nn.parallel.DistributedDataParallel)` (torch.compile, checkpointing, ZeRO,
trainers), so ours is a subclass. Its constructor calls `Module.__init__` and `Joinable.__init__` alone: torch's own
would build torch's reducer, whose hooks would average every gradient a second time. Only such methods of torch's are
inherited that read attributes (see `torch_names`); whatever has to do with reducing gradients is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _RecordFunctionFast
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .core import arguments, parameters
from .core import buckets as records
from .core.bucket_order import BucketOrder
from .core.buckets import BucketInfo
from .core.buffers import BufferSync
from .core.comm_hooks import attach, check_hook, hook_name, warn_if_late
from .core.construction import Construction
from .core.outputs import find_tensors
from .features import compile as compiling
from .features import join, mixed_precision, optimizer_in_backward
from .features.delayed import DelayedParameters
from .live import reconfigure
from .live.model import LiveModel
from .manual_end import ManualEnd
from .monitoring import monitors
from .monitoring.inspection import live_models, request_inspection
from .monitoring.watching import Watching
from .pickling import Pickling
from .torch_names import TorchNames

__all__ = ["DistributedDataParallel", "live_models", "request_inspection"]


class DistributedDataParallel(
    Construction, BucketOrder, BufferSync, LiveModel, Watching, Pickling, TorchNames, ManualEnd, TorchDDP
):
    """Trains one model on several ranks: each backward leaves the ranks' average in `param.grad`.

    A drop-in for `torch.nn.parallel.DistributedDataParallel`: same signature, same gradients. Gradients are
    grouped into buckets; a bucket's `all_reduce` starts as soon as its gradients (and the buckets before it)
    are ready, and overlaps the rest of the backward. Every step of this is recorded: see `ddp_lab.recording`.

    The first backward uses one bucket for each (dtype, device); then buckets are assigned anew, once, in the
    order in which rank 0's gradients became ready.

    Parameters may be frozen, unfrozen, added, removed or replaced later, if all ranks do it between the same two
    steps: the next forward notices, warns, and goes on with what is there.

    Args:
        module: the model, the same on all ranks; its parameters and buffers become rank 0's.
        device_ids: None, or the one accelerator that the module is on: forward then moves its inputs there.
        output_device: kept for compatibility; defaults to ``device_ids[0]``.
        dim: dimension that `scatter` and `gather` split.
        broadcast_buffers: deprecated, see `forward_sync_buffers`; False also leaves out the broadcast of buffers
            at construction.
        init_sync: compare the models of the ranks and broadcast rank 0's state. False: no communication, and
            the caller answers for equal models.
        process_group: the ranks that train together; the default group if None.
        bucket_cap_mb: size in MiB at which a bucket is closed, fractions allowed. None: 1 MiB for the first
            bucket (so that communication starts early), 25 MiB for the others. Larger buckets use the network
            better, smaller ones overlap more.
        find_unused_parameters: parameters may take no part in a forward; those that no rank used keep the
            gradient they have. Costs a walk over the graph and a small all-reduce for each step.
        check_reduction: deprecated, without effect.
        gradient_as_bucket_view: gradients are views of the buckets, which saves one copy and the memory of
            all gradients. Such a gradient can't be `detach_()`-ed.
        static_graph: the graph is the same in every step, so that unused parameters and reused ones are learned
            in the first backward (which communicates at its end).
        delay_all_reduce_named_params: (name, parameter) pairs that are averaged together, not in buckets, when
            the gradient of `param_to_hook_all_reduce` arrives.
        param_to_hook_all_reduce: goes with the above, and may be one of them.
        mixed_precision: a `torch.nn.parallel.distributed._MixedPrecision`: compute and reduce in lower precision.
        device_mesh: a mesh of one dimension instead of a process group; a slice of a larger mesh for a module
            that is tensor parallel in the other dimensions.
        skip_all_reduce_unused_params: don't send buckets whose parameters are all unused; they must be unused on
            all ranks.
        bucket_cap_mb_list: a size for each bucket, in the order of launch; the last one repeats.
        batched_grad_copy: copy the gradients of a bucket in one go when it is ready.
        forward_sync_buffers: broadcast rank 0's buffers before each synchronised forward (None: True).
        lazy_bucket_allocation: a bucket has memory only from the arrival of its first gradient to the end of the
            backward, and none beside the activations of a forward.

    Raises:
        RuntimeError: the module has nothing to train, or differs between the ranks.
        ValueError: devices that do not fit the module.
        TypeError: an argument that the installed torch does not have.

    Example:
        >>> model = ddp_lab.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> model(torch.randn(8, 4)).sum().backward()  # param.grad: the average over all ranks
        >>> model.buckets()[0].parameters
        ('weight', 'bias')
    """

    @arguments.as_installed_torch
    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: arguments.Devices = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        options = arguments.Options.of(locals())
        # See [Note: a subclass that runs none of torch's reducer]
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        self.logger = None  # type: ignore[assignment]
        arguments.check(options)
        self.process_group = arguments.resolve_group(options, module)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module = module
        delayed = list(delay_all_reduce_named_params or ())
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self.parameters_to_ignore = {*ignored, *(name for name, _ in delayed)}
        self._delay_all_reduce_params = [parameter for _, parameter in delayed]
        survey = parameters.survey(module, self.parameters_to_ignore)
        self._choose_parameters(survey)
        self._set_attributes(options)
        if param_to_hook_all_reduce is not None:
            self._delayed = DelayedParameters(
                self._delay_all_reduce_params, param_to_hook_all_reduce, self.process_group, self.broadcast_bucket_size
            )
            if self._delay_all_reduce_all_params:
                return
        self.reducer_id = self._agree(survey, collective=init_sync)
        if not survey.trained:  # here, because it may be so on this rank alone
            raise RuntimeError(arguments.nothing_to_train(module))
        if init_sync:
            self._broadcast_state(survey, arguments.buffer_sync(options)[1])
        if static_graph:
            arguments.warn_static(find_unused_parameters)
        self._make_reducer(survey)
        self._start_features()

    # -- forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; the backward of what it returns averages the gradients (but see `no_sync`).

        Raises:
            RuntimeError: the last backward left parameters without a gradient; names them.
        """
        with _record_function("DistributedDataParallel.forward"):
            if self._delay_all_reduce_all_params:
                return self._finish_delayed(self.module(*inputs, **kwargs))
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not compiling.is_loaded():
            return self.module(*inputs, **kwargs)
        # torch.compile asks the class which model runs
        outer = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self
        try:
            return self.module(*inputs, **kwargs)
        finally:
            TorchDDP._active_ddp_module = outer

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._lazy_init_ran:
            self._lazy_init_ran = True
            optimizer_in_backward.install(self)
        if self._join_config.enable:
            join.before_forward(self)
        if torch.is_grad_enabled():
            self._prepare(self.require_backward_grad_sync)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self.mixed_precision is not None:
            inputs, kwargs = mixed_precision.cast_inputs(self, inputs, kwargs)
        return inputs, kwargs

    def _prepare(self, sync: bool) -> None:
        """Everything that concerns the reducer before the module runs."""
        if sync:
            if not parameters.unchanged(self):
                parameters.adapt(self)
            if not self._step_agreed:
                self._agree_on_step()
            self.logger.begin_iteration(self)
        if self._live is not None:
            self._live.before_forward(self, sync)
        if self.reducer.begin_forward(sync):
            self._rebuild()
            self.reducer.begin_forward(sync)
        elif sync and self._order_follower is not None:
            self._rebuild_if_due(sync)

    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        sync = False
        if torch.is_grad_enabled():
            sync = self.require_backward_grad_sync
            self.reducer.end_forward()
            self.reducer.arm(find_tensors(output), sync)
        if sync is not self.require_forward_param_sync:  # a module's attributes are slow to set
            self.require_forward_param_sync = sync
        if self.mixed_precision is not None:
            mixed_precision.after_forward(self, find_tensors(output))
        return self._finish_delayed(output)

    def _finish_delayed(self, output: Any) -> Any:
        if self._delayed is not None:
            self._delayed.before_backward(self.require_backward_grad_sync)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context whose forwards and their backwards only accumulate gradients on this rank.

        The first synchronised backward after it averages what has accumulated. The forward has to be inside too;
        see `sync_gradients` for averaging without another backward.
        """
        outer = self.require_backward_grad_sync
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(outer)

    def _set_sync(self, sync: bool) -> None:
        self.require_backward_grad_sync = sync
        if not self._delay_all_reduce_all_params:
            self.reducer.set_no_sync(not sync)
            self._warn_of_no_sync()

    def sync_gradients(self) -> None:
        """Averages now what has accumulated under `no_sync`, without another backward. All ranks call it.

        Parameters that have no gradient on any rank keep none.

        Raises:
            RuntimeError: called during a backward.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("sync_gradients() was called during a backward: call it when backward() has returned")
        if not parameters.unchanged(self):
            parameters.adapt(self)
        if self._live is not None:
            self._live.look(self)
        self.reducer.synchronize()

    def _agree_on_step(self) -> None:
        """After a failure: the ranks go on from the same step, with the same configuration."""
        reconfigure.settle(self)
        monitors.settle(self)
        self._step_agreed = True

    # -- comm hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replaces the average over the ranks by ``hook(state, bucket) -> Future[Tensor]``.

        Gradients reach the hook undivided: the hook averages. It runs on autograd's thread as soon as a bucket
        is ready, in bucket order; its future holds one tensor of as many elements as `bucket.buffer()`.

        Args:
            state: passed to the hook, e.g. a process group or a `PowerSGDState`.
            hook: takes torch's `dist.GradBucket`; torch's own hooks work unchanged.

        Raises:
            TypeError: the hook is not callable.
            ValueError: its signature is another one.
            RuntimeError: a hook has been registered already.
        """
        with self._logged():
            check_hook(hook)
            warn_if_late(hook, self.reducer.step())
            self._refuse_second_hook()
            attach(self.reducer, hook, state)
        self._keep_hook(hook, state, hook_name(hook))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Averages with the hook that `dist.BuiltinCommHookType` names, in C++ and without the GIL."""
        with self._logged():
            self._refuse_second_hook()
            attach(self.reducer, comm_hook_type, None)
        self._keep_hook(comm_hook_type, None, str(comm_hook_type))

    def _refuse_second_hook(self) -> None:
        if self.mixed_precision is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once: mixed_precision has its own "
                "way to reduce gradients, so a model that has it takes no comm hook"
            )

    # -- looking at it

    def buckets(self) -> tuple[BucketInfo, ...]:
        """One record for each bucket, in the order of launch, with the times of the last finished backward."""
        return records.buckets(self)

    # -- after a failure

    def abandon_backward(self) -> None:
        """Forgets a backward that will not finish, so that the next forward starts clean.

        For a helper thread after it has freed this rank from a collective. A backward that an exception ended
        is discarded by the next forward without this.
        """
        self.reducer.abandon()


def _record_function(name: str) -> AbstractContextManager[Any]:
    """A range that profilers show; torch's own way costs 5 us where there is none."""
    if _profiler_enabled():
        return torch.autograd.profiler.record_function(name)
    return _RecordFunctionFast(name)


compiling.skip_frames(DistributedDataParallel, callers=("forward", "_run_ddp_forward"))
