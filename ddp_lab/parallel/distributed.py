"""DistributedDataParallel: averages gradients over ranks while the backward runs, and records how.

[Note: a subclass that runs none of torch's reducer]
Much code asks `isinstance(model, torch.nn.parallel.DistributedDataParallel)` (torch.compile, checkpointing, ZeRO,
trainers), so ours is a subclass. Its constructor calls only `Module.__init__` and `Joinable.__init__`: torch's own
would build torch's reducer, whose hooks would average every gradient a second time. Only methods that read attributes
of our class are inherited: `scatter`, `gather`, `to_kwargs`, `train`, `_get_data_parallel_params`,
`_set_params_and_buffers_to_ignore_for_model`, `_build_params_for_reducer`, `_build_debug_param_to_name_mapping`,
`_inside_ddp_forward`, `_get_active_ddp_module`. Gradients are averaged by `core.synchronizer`, and torch's names
that libraries read are forwarded to it: `_FORWARDED`.

[Note: a copy of a model]
The copy trains its own parameters, only with the default group, as in torch. Making it communicates nothing, so its
number may differ between ranks. It has no comm hook: only a hook's author knows whether two models may share its state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _RecordFunctionFast
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from ..analysis.check_reports import DriftReport
from ..protocol.messages import Change
from .core import adaptation, arguments, process_groups, step_check
from .core.arguments import BucketCaps, ReducerOptions
from .core.buckets import BucketInfo, OrderFollower
from .core.comm_hooks import check_hook, warn_if_late
from .core.outputs import find_tensors
from .core.synchronizer import GradientSynchronizer
from .features import compile as compiling
from .features import join, optimizer_in_backward
from .features.delayed import DelayedParameters
from .features.logging_data import DDPLogger
from .features.mixed_precision import LowPrecision
from .live import change as changes
from .live.model import LiveModel
from .monitoring import activity, inspection
from .monitoring.drift import DriftWatch, compare
from .monitoring.gradient_norms import GradientWatch
from .monitoring.monitors import Monitors

__all__ = ["DistributedDataParallel"]

# Created again for a copy
_RUNTIME = ("_sync", "_monitors", "_live", "_precision", "logger", "device_mesh")


class DistributedDataParallel(TorchDDP):
    """Trains one model on several ranks: each backward leaves the ranks' average in `param.grad`.

    A drop-in for `torch.nn.parallel.DistributedDataParallel`: same signature, same gradients. Gradients are
    grouped into buckets; a bucket's `all_reduce` starts as soon as its gradients (and the buckets before it)
    are ready, and overlaps the rest of the backward. All of this is recorded: see `ddp_lab.recording`.

    The first backward uses one bucket for each (dtype, device), unless `bucket_cap_mb_list` is given; then the buckets
    are rebuilt, once, in the order in which rank 0's gradients became ready. With `static_graph` the second backward
    decides that order, as in torch. With `find_unused_parameters` and without `static_graph` they have the sizes of
    `bucket_cap_mb` from the start, and are not rebuilt.

    Parameters may be frozen, unfrozen, added, removed or replaced later, if all ranks do it between the same two
    steps: the next forward notices, warns, and continues with the changed model.

    Gradients that stay a rank's own are never used in silence: a warning names the parameters if an optimizer steps
    with gradients of a backward that has not finished, or of one that no forward of this model announced
    (`model.module(x)` was called, for `model(x)`), if a forward puts new parameters into the module, and if a backward
    reaches the model's outputs and none of its parameters. What accumulates under `no_sync` is meant to be so.

    Args:
        module: the model, the same on all ranks; its parameters and buffers become rank 0's.
        device_ids: None, or the one accelerator that the module is on; forward then moves its inputs there.
        output_device: kept for compatibility; defaults to ``device_ids[0]``.
        dim: dimension that `scatter` and `gather` split.
        broadcast_buffers: deprecated, see `forward_sync_buffers`; False also skips the broadcast of buffers at
            construction.
        init_sync: compare the models of the ranks and broadcast rank 0's state. False: no communication; the
            caller must make sure that the models are equal.
        process_group: the ranks that train together; the default group if None.
        bucket_cap_mb: size in MiB at which a bucket is closed, fractions allowed. None: 1 MiB for the first
            bucket (so that communication starts early), 25 MiB for the others. Larger buckets use the network
            better, smaller ones overlap more.
        find_unused_parameters: allow parameters that a forward does not use; those that no rank used keep their
            gradient. Costs a traversal of the graph and a small all-reduce in each step.
        check_reduction: deprecated, no effect.
        gradient_as_bucket_view: gradients are views of the buckets, which saves one copy and the memory of
            all gradients. Such a gradient can't be `detach_()`-ed.
        static_graph: the graph is the same in every step, so that unused and reused parameters are determined in
            the first backward (which communicates at its end).
        delay_all_reduce_named_params: (name, parameter) pairs that are averaged together, not in buckets, when
            the gradient of `param_to_hook_all_reduce` arrives.
        param_to_hook_all_reduce: required with the above: the parameter whose gradient is ready last, or a backward
            raises RuntimeError. It may be one of them (torch's class then leaves its own gradient un-averaged).
        mixed_precision: a `torch.nn.parallel.distributed._MixedPrecision`: compute and reduce in lower precision.
        device_mesh: a mesh of one dimension instead of a process group; a slice of a larger mesh for a module
            that is tensor parallel in the other dimensions.
        skip_all_reduce_unused_params: don't send buckets whose parameters are all unused; they must be unused on
            all ranks.
        bucket_cap_mb_list: a size for each bucket, in the order of launch; the last one repeats.
        batched_grad_copy: copy all gradients of a bucket at once when it is ready.
        forward_sync_buffers: broadcast rank 0's buffers before each synchronised forward (None: True).
        lazy_bucket_allocation: a bucket has memory only from the arrival of its first gradient to the end of the
            backward, so not when the stored activations are at their peak.

    Raises:
        RuntimeError: the module has no trainable parameters, or differs between the ranks.
        ValueError: the devices do not fit the module.
        TypeError: the installed torch does not have an argument.

    Example:
        >>> model = ddp_lab.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> model(torch.randn(8, 4)).sum().backward()  # param.grad: the average over all ranks
        >>> model.buckets()[0].parameters
        ('weight', 'bias')
    """

    reducer: Any  # ddp_lab._C.Reducer
    logger: Any  # DDPLogger; None until the reducer exists

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
        # See [Note: a subclass that runs none of torch's reducer]
        torch.nn.Module.__init__(self)
        self.logger = None
        in_python = compiling.python_reducer_is_chosen()
        arguments.check(
            delay_all_reduce_named_params, param_to_hook_all_reduce, bucket_cap_mb_list, in_python=in_python
        )
        arguments.warn_of_deprecated(broadcast_buffers, forward_sync_buffers, check_reduction=check_reduction)
        group = arguments.resolve_group(process_group, device_mesh, module)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module = module
        delayed = dict(delay_all_reduce_named_params or ())
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self.parameters_to_ignore = {*ignored, *delayed}
        self._delay_all_reduce_params, self._delay_all_reduce_names = [*delayed.values()], [*delayed]
        sync_buffers, with_buffers = arguments.buffer_sync(broadcast_buffers, forward_sync_buffers)
        self._make_parts(
            group,
            options=ReducerOptions(
                find_unused_parameters,
                static_graph,
                gradient_as_bucket_view,
                skip_all_reduce_unused_params,
                batched_grad_copy,
                lazy_bucket_allocation,
                mixed_precision,
            ),
            caps=BucketCaps.of(bucket_cap_mb, bucket_cap_mb_list),
            sync_buffers=sync_buffers,
            is_sharded=arguments.is_slice(device_mesh),
            in_python=in_python,
        )
        Joinable.__init__(self)
        self._take_devices(device_ids, output_device, dim)
        self._agree(param_to_hook_all_reduce, init_sync=init_sync, with_buffers=with_buffers)

    def _make_parts(self, group: dist.ProcessGroup, **settings: Any) -> None:
        """Makes the parts that average gradients, and those that monitor and change that; communicates nothing."""
        delayed = self._delay_all_reduce_params
        ignored = self.parameters_to_ignore
        self._sync = GradientSynchronizer(self.module, ignored, group, owner=self, delayed=delayed, **settings)
        self._monitors = Monitors(self._sync)
        self._live = LiveModel(self._sync, self._monitors)
        self._precision: LowPrecision | None = None

    def _take_devices(self, device_ids: arguments.Devices, output_device: Any, dim: int) -> None:
        """Stores the module's device and further attributes of torch's class."""
        tensors = self._sync.module_parameters or self._delay_all_reduce_params
        self.is_multi_device_module = len({parameter.device for parameter in tensors}) > 1
        self.device_ids, self.output_device = arguments.resolve_devices(device_ids, output_device, tensors)
        self.dim = dim
        self.broadcast_bucket_size = arguments.BROADCAST_BYTES
        self.use_side_stream_for_tensor_copies = arguments.use_side_stream()
        self._lazy_init_ran = False
        self._ddp_sink_clone = False

    def _agree(self, trigger: torch.nn.Parameter | None, *, init_sync: bool, with_buffers: bool) -> None:
        """The ranks compare their models, receive rank 0's state, and are ready to train."""
        sync, delayed = self._sync, self._delay_all_reduce_params
        self._delay_all_reduce_all_params = not sync.survey.trained and bool(delayed)
        self._delayed: DelayedParameters | None = None
        if trigger is not None:
            names = self._delay_all_reduce_names
            self._delayed = DelayedParameters(delayed, names, trigger, sync.group, arguments.BROADCAST_BYTES)
        if self._delay_all_reduce_all_params:
            return
        sync.agree(collective=init_sync)
        if init_sync:
            sync.broadcast_state(with_buffers=with_buffers)
        if sync.options.static_graph:
            arguments.warn_static(sync.options.find_unused_parameters, stacklevel=5)
        self._start()

    def _start(self) -> None:
        """Makes the reducer and the parts that need it."""
        activity.install(self)
        sync = self._sync
        sync.on_new_reducer += [inspection.install, optimizer_in_backward.attach_reducer]
        if sync.options.mixed_precision is not None:
            self._precision = LowPrecision(sync)
        sync.build()
        self._live.enlist()
        step_check.watch(sync)
        self.logger = DDPLogger(
            sync,
            is_multi_device_module=int(self.is_multi_device_module),
            device_ids=", ".join(map(str, self.device_ids or ())),
            output_device=-1 if self.output_device is None else self.output_device,
        )
        if sync.in_python:
            self._python_hooks = compiling.install_python_reducer(self, sync)

    # -- forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; the backward of its output averages the gradients (but see `no_sync`).

        Raises:
            RuntimeError: the last backward left parameters without a gradient; the message names them.
        """
        with _record_function("DistributedDataParallel.forward"):
            if self._delay_all_reduce_all_params:
                return self._finish_delayed(self.module(*inputs, **kwargs))
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not compiling.is_loaded():
            return self.module(*inputs, **kwargs)
        # torch.compile asks the class for the running model
        outer = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self
        try:
            return self.module(*inputs, **kwargs)
        finally:
            TorchDDP._active_ddp_module = outer

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        sync = self._sync
        if not self._lazy_init_ran:
            self._lazy_init_ran = True
            optimizer_in_backward.install(sync)
        if self._monitors.drift is not None:
            self._monitors.drift.before_forward(sync)
        if sync.inputs.uneven:
            join.before_forward(self, sync)
        if torch.is_grad_enabled():
            self._prepare(sync, sync.wanted)
        if sync.buffers.due_before():
            sync.synchronize_buffers()
        if self.device_ids:
            device = torch.device(sync.device.type, self.device_ids[0])
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self._precision is not None:
            inputs, kwargs = self._precision.before_forward(inputs, kwargs)
        return inputs, kwargs

    def _prepare(self, sync: GradientSynchronizer, synchronised: bool) -> None:
        """All steps of the reducer before the module runs."""
        if synchronised:
            if not adaptation.unchanged(sync):
                adaptation.adapt(sync)
            if not sync.step_agreed:
                self._live.settle()
            self.logger.begin_iteration()
        if self._live.waiting:
            self._live.before_forward(synchronised)
        if sync.reducer.begin_forward(synchronised):
            sync.rebuild()
            sync.reducer.begin_forward(synchronised)
        elif synchronised and sync.follower is not None:
            sync.rebuild_if_due(synchronised)

    def _post_forward(self, output: Any) -> Any:
        sync = self._sync
        if sync.buffers.due_after():
            sync.synchronize_buffers()
        synchronised = False
        if torch.is_grad_enabled():
            synchronised = sync.wanted
            sync.reducer.end_forward()
            if not (sync.is_sharded or self._precision is not None):  # these replace the parameters' data themselves
                sync.reducer.follow_accumulators()
                if synchronised and not adaptation.unchanged(sync):
                    adaptation.warn_of_forward(sync)
            sync.reducer.arm(find_tensors(output), synchronised)
            if synchronised:
                sync.note_forward()
        sync.buffers.wanted = synchronised
        if self._precision is not None:
            self._precision.after_forward(find_tensors(output))
        return self._finish_delayed(output)

    def _finish_delayed(self, output: Any) -> Any:
        if self._delayed is not None:
            self._delayed.before_backward(self._sync.wanted)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which forwards and their backwards only accumulate gradients on this rank.

        The first synchronised backward after it averages the accumulated gradients. The forward must be inside too;
        see `sync_gradients` for averaging without another backward.
        """
        outer = self._sync.wanted
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(outer)

    def _set_sync(self, sync: bool) -> None:
        self._sync.wanted = sync
        if self._delay_all_reduce_all_params:
            return
        self._sync.reducer.set_no_sync(not sync)
        if self._sync.reducer.take_no_sync_warning():
            warnings.warn(
                "A backward ran inside no_sync(), but its forward did not: its gradients were averaged over the ranks. "
                "Put the forward inside no_sync() too.",
                stacklevel=3,
            )

    def sync_gradients(self) -> None:
        """Averages the gradients accumulated under `no_sync` now, without another backward. All ranks must call it.

        Parameters that have no gradient on any rank keep none.

        Raises:
            RuntimeError: called during a backward.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("sync_gradients() was called during a backward: call it after backward() has returned")
        if not adaptation.unchanged(self._sync):
            adaptation.adapt(self._sync)
        self._live.look()
        self._sync.reducer.synchronize()

    # -- backwards that the caller ends: [Note: a backward that the caller ends] in C++

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the caller ends each synchronised backward with `finalize_backward`, exactly once.

        torch has it from 2.15 on. Set it before a forward, or after the last backward was finalized.

        Raises:
            RuntimeError: set between a forward and the end of its backward, or for a model that has no reducer.

        Example:
            >>> model.require_manual_backward_finalization = True
            >>> model(batch).sum().backward()  # starts the averages, waits for none
            >>> next_batch = load()  # anything that needs no gradients
            >>> model.finalize_backward()  # param.grad: the average over all ranks
            >>> optimizer.step()
        """
        return self._sync.manual_end

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._check_manual_backward_finalization_supported()
        if self._delay_all_reduce_all_params:
            return
        with self._logged():
            self._sync.reducer._set_manual_finalization_required(bool(required))
        self._sync.manual_end = bool(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` must wait until the next backward has returned. Read it after the forward.

        False: it may also be called in a hook of the backward, as soon as all parameters have their gradients.
        """
        if not self._sync.manual_end:
            return False
        after: bool = self._precision is not None or self._sync.reducer._should_finalize_after_backward()
        return after

    def finalize_backward(self) -> None:
        """Waits for the averages that the last backward has started, and writes them to `param.grad`.

        Work goes to the device's current stream.

        Raises:
            RuntimeError: `require_manual_backward_finalization` is False; gradients are missing; no synchronised
                backward waits for this; or the communication failed.
        """
        self._check_manual_backward_finalization_supported()
        with self._logged():
            self._sync.reducer._finalize_backward_manual()
        if self._precision is not None:
            self._precision.restore()

    def _check_manual_backward_finalization_supported(self) -> None:
        """Raises RuntimeError if this class does not end backwards."""
        if self._delay_all_reduce_all_params:
            raise RuntimeError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params: leave some to the reducer, or keep it False."
            )
        if self._sync.in_python:
            raise RuntimeError(
                "Manual backward finalization is not supported with the Python reducer, in which the compiler "
                'reduces gradients: see torch._dynamo.config.optimize_ddp, which is "python_reducer".'
            )

    # -- comm hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replaces the average over the ranks by ``hook(state, bucket) -> Future[Tensor]``.

        Gradients reach the hook undivided: the hook averages. It runs on autograd's thread as soon as a bucket
        is ready, in bucket order; its future contains one tensor with as many elements as `bucket.buffer()`.

        Args:
            state: passed to the hook, e.g. a process group or a `PowerSGDState`.
            hook: takes torch's `dist.GradBucket`; torch's own hooks work unchanged.

        Raises:
            TypeError: the hook is not callable.
            ValueError: it has another signature.
            RuntimeError: a hook is already registered.
        """
        with self._logged():
            check_hook(hook)
            warn_if_late(hook, self._sync.reducer.step())
            self._sync.attach_hook(hook, state)
        self._sync.describe()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Averages with a hook of `dist.BuiltinCommHookType`, in C++ and without the GIL."""
        with self._logged():
            self._sync.attach_hook(comm_hook_type, None)
        self._sync.describe()

    @staticmethod
    def register_named_comm_hook(
        name: str, hook: Callable[..., Any], state: Callable[[DistributedDataParallel], object] | None = None
    ) -> None:
        """Gives a comm hook a name that `reconfigure` accepts, for any model. Call it on all ranks.

        Args:
            name: a later definition replaces an earlier one.
            hook: ``hook(state, bucket) -> Future[Tensor]``.
            state: makes the hook's state for a model, without communication; None: the state is None.

        Raises:
            TypeError: the hook is not callable.
            ValueError: it has another signature, or the name is one of torch's hooks.
        """
        changes.name_hook(name, hook, state)

    def _register_fused_optim(
        self, optim: type[torch.optim.Optimizer], *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Runs an optimizer's step on each bucket as soon as it is averaged, during the backward."""
        optimizer_in_backward.register_fused_optim(self, optim, *args, optim_params=optim_params, **kwargs)

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        """Sets which rows of sparse embeddings have gradients, by parameter name: they are then sent densely."""
        self._sync.reducer._set_sparse_metadata(global_unique_ids)

    # -- buffers

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD
    ) -> None:
        """Replaces the broadcast by ``hook(state, {name: buffer})``.

        Args:
            state: passed to the hook.
            hook: makes the buffers equal on all ranks, in place. It may return a list of futures, for which the
                end of the backward then waits.
            comm_hook_location: before or after the module's forward.

        Raises:
            TypeError: the hook is not callable.
        """
        if not callable(hook):
            self._log_and_throw(TypeError, f"Buffer communication hook must be callable, got {type(hook).__name__}.")
        self._sync.buffers.hook = _BufferCommHook(
            buffer_comm_hook=hook, buffer_comm_hook_state=state, buffer_comm_hook_location=comm_hook_location
        )

    def will_sync_module_buffers(self) -> bool:
        """Whether the current (or next) forward synchronises the buffers."""
        return self._sync.buffers.due()

    def _assign_modules_buffers(self) -> None:
        """Looks up the buffers: `modules_buffers` and `named_module_buffers`, without ignored ones."""
        self._sync.look_up_buffers()

    def _default_broadcast_coalesced(
        self,
        bufs: list[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcasts tensors (the buffers, if None) from a rank of the group; hooks may call it."""
        process_groups.broadcast_coalesced(
            self._sync.buffers.tensors if bufs is None else bufs,
            self._sync.group,
            arguments.BROADCAST_BYTES if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    # -- buckets

    def buckets(self) -> tuple[BucketInfo, ...]:
        """One record for each bucket, in the order of launch, with the times of the last finished backward."""
        return self._sync.buckets()

    def rebuild_buckets_on_reorder(self, threshold: float | None, every: int = 20) -> None:
        """Rebuilds the buckets when gradients become ready in a different order than the bucket layout assumes.

        All ranks must call it with the same arguments.

        Args:
            threshold: the share of parameters (0 to 1) that may become ready out of order; None switches it off.
            every: interval in synchronised forwards at which rank 0 checks and broadcasts the result.
        """
        self._sync.follower = None if threshold is None else OrderFollower(threshold, every)

    def reconfigure(
        self,
        *,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        order: str | Sequence[str] | None = None,
        comm_hook: str | None = None,
    ) -> None:
        """Changes the buckets, their order or the comm hook from the next forward on. All ranks make the same call.

        From a notebook, while a cell trains: `Cluster.reconfigure`.

        Args:
            bucket_cap_mb: size limit of all buckets in MiB; of all but the first if `first_bucket_mb` is given.
            first_bucket_mb: size limit of the bucket that is launched first.
            bucket_cap_mb_list: size limits in the order of launch, the last one repeats; excludes the other two.
            order: ``"ready"`` (as rank 0's gradients became ready last), ``"registration"``, ``"reversed"``, or the
                qualified names of all trained parameters.
            comm_hook: ``"none"``, ``"fp16"``, ``"bf16"``, ``"powersgd"``, or a name that was given to a hook on all
                ranks with `register_named_comm_hook`.

        Raises:
            ValueError: the change is invalid for this model.
            RuntimeError: this model can't be changed so, the ranks' arguments differ, or a backward is unfinished.
        """
        self._live.reconfigure(Change(bucket_cap_mb, first_bucket_mb, bucket_cap_mb_list, order, comm_hook))

    def configuration(self) -> dict[str, Any]:
        """The settings that `reconfigure` can change: sizes in MiB, the comm hook's name, the number of buckets."""
        return changes.describe(self._sync)

    # -- monitoring

    def inspect_gradients(self) -> list[dict[str, Any]]:
        """Norm and checksum of each bucket's gradients, for comparison between ranks.

        Returns:
            For each bucket a dict: ``bucket`` (index), ``norm`` (Euclidean), ``checksum`` (64 bits from the
            gradients' bytes: different checksums on two ranks mean different gradients).

        Raises:
            RuntimeError: called during a backward.
        """
        return inspection.inspect_gradients(self._sync)

    def check_drift(self) -> DriftReport:
        """Compares parameters and buffers of all ranks, see `ddp_lab.check_drift`. All ranks must call it."""
        return compare(self._sync)

    def watch_drift(self, every: int = 100, action: Literal["warn", "raise"] = "warn") -> DriftWatch:
        """Compares parameters and buffers of all ranks before every `every`-th synchronised forward.

        Each comparison costs one pass over all parameters (0.3 ms for each MB on one CPU core) and gathers 24 bytes per
        rank; `DriftWatch.seconds` is the measured cost. All ranks must make the same call. Under `join` nothing is
        compared.

        Args:
            every: interval in steps.
            action: what to do if they differ, on all ranks.

        Raises:
            ValueError: an argument is invalid.
        """
        return self._monitors.watch_drift(every, action)

    def watch_gradients(self, every: int = 1, nonfinite: Literal["warn", "raise"] = "warn") -> GradientWatch:
        """Measures the gradients' norms before and after averaging, and reports the source of a NaN or Inf.

        For each bucket and rank; `Timeline.gradients` has them, and the gradient noise scale derived from them. In a
        monitored step each bucket is read twice more (together 0.12 ms for each MB on one CPU core), and its numbers
        are gathered at the end of the backward (0.1 ms and a small all-gather); `GradientWatch.seconds` is the measured
        cost. All ranks must make the same call, outside a backward. A second call replaces the first.

        Args:
            every: interval in steps.
            nonfinite: on NaN or Inf, warn, or make the backward raise RuntimeError on all ranks, before the
                optimizer uses it.

        Raises:
            ValueError: an argument is invalid.
            RuntimeError: called during a backward.
        """
        return self._monitors.watch_gradients(every, nonfinite)

    # -- logging data

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """The model's settings and the cost of its sampled steps; keys are torch's."""
        data: dict[str, Any] = self.logger.data()
        return data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Samples logging data every `sample_rate` iterations after the first ten.

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
        """Raises, and stores the text in the logging data."""
        if self.logger is not None:
            self.logger.set_error_and_log(f"{err_type}: {err_msg}")
        raise err_type(err_msg)

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Stores the text of an exception in the logging data."""
        try:
            yield
        except Exception as error:
            self.logger.set_error_and_log(f"{type(error)}: {error}")
            raise

    # -- uneven inputs

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Any:
        """Context in which the ranks may have different numbers of inputs.

        A rank that has run out of inputs takes part in the others' collectives until all have. At the end every rank
        has the model of the last one that trained.

        Args:
            divide_by_initial_world_size: divide gradients by the size of the group; False: by the number of ranks
                that still have inputs.
            enable: False disables the context.
            throw_on_early_termination: raise RuntimeError on all ranks as soon as one has run out.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """A rank's actions without inputs in the others' iterations; see `torch.distributed.algorithms.join`."""
        self.logger._set_uneven_input_join()
        divide = kwargs.get("divide_by_initial_world_size", True)
        return join.DDPJoinHook(self._sync, self._live.look, divide_by_initial_world_size=divide)

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives of a join context."""
        return self._sync.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of the collectives of a join context."""
        return self._sync.group

    # -- static graph

    def _set_static_graph(self) -> None:
        """Same as the argument `static_graph=True`; before the first forward.

        Raises:
            RuntimeError: training has begun.
        """
        if self._sync.options.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        with self._logged():
            self._sync.learn_graph()
        self.logger._set_static_graph()
        arguments.warn_static(self._sync.options.find_unused_parameters, stacklevel=3)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """No effect: outputs are never cloned here."""
        self._ddp_sink_clone = val

    # -- after a failure

    def abandon_backward(self) -> None:
        """Discards a backward that will not finish, so that the next forward starts clean.

        For a helper thread after it has unblocked this rank from a collective. Not needed after a backward that an
        exception ended: the next forward discards it.
        """
        self._sync.reducer.abandon()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Makes the model use another process group, e.g. after a rejoin. Communicates at the next forward."""
        self._sync.replace_group(new_process_group)

    def _remove_autograd_hooks(self) -> None:
        """Makes the model train as a plain module from now on."""
        self._sync.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        """Raises RuntimeError if a backward has begun and not averaged all gradients."""
        with self._logged():
            self._sync.reducer.check_ended()
        if self._sync.reducer.in_flight():
            self._log_and_throw(
                RuntimeError,
                "Expected to finish all reduction: a backward has begun and some buckets are not reduced",
            )

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """See [Note: a copy of a model]."""
        self._check_default_group()
        state = {name: value for name, value in self.__dict__.items() if name not in _RUNTIME}
        return {**state, "_settings": self._sync.settings, "_had_hook": bool(self._sync.hooks)}

    def _check_default_group(self) -> None:
        if self._sync.group is not dist.group.WORLD:
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP "
                "constructor; for other groups copy `.module` and wrap the copy.",
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_settings" not in state:
            raise ValueError("this model was pickled by an earlier release of ddp_lab: save and load its state_dict()")
        kept = dict(state)
        settings, had_hook = kept.pop("_settings"), kept.pop("_had_hook")
        torch.nn.Module.__setstate__(self, kept)
        if had_hook:
            warnings.warn(
                "A copy of a DistributedDataParallel model has no comm hook: register it again.", stacklevel=2
            )
        self._make_parts(arguments.default_group(), **settings)
        self._sync.agree(collective=False)
        self._start()


# Names of torch's class that libraries read, and their places. Getters in C, which torch.compile can't trace into.
_FORWARDED = {
    "_authoritative_rank": "_sync.inputs.last_joiner",
    "_comm_hooks": "_sync.hooks",
    "_has_rebuilt_buckets": "_sync.has_rebuilt_buckets",
    "_module_parameters": "_sync.module_parameters",
    "_use_python_reducer": "_sync.in_python",
    "batched_grad_copy": "_sync.options.batched_grad_copy",
    "bucket_bytes_cap": "_sync.caps.others",
    "bucket_bytes_cap_default": "_sync.caps.has_small_first",
    "bucket_bytes_cap_list": "_sync.caps.given",
    "device": "_sync.device",
    "device_type": "_sync.device.type",
    "find_unused_parameters": "_sync.options.find_unused_parameters",
    "gradient_as_bucket_view": "_sync.options.gradient_as_bucket_view",
    "lazy_bucket_allocation": "_sync.options.lazy_bucket_allocation",
    "mixed_precision": "_sync.options.mixed_precision",
    "modules_buffers": "_sync.buffers.tensors",
    "named_module_buffers": "_sync.buffers.named",
    "process_group": "_sync.group",
    "reducer": "_sync.reducer",
    "model_id": "_sync.model_id",
    "skip_all_reduce_unused_params": "_sync.options.skip_all_reduce_unused_params",
    "static_graph": "_sync.options.static_graph",
}
# The same for names that libraries also set.
_FORWARDED_BOTH_WAYS = {
    "_join_config": ("_sync.inputs", "config"),
    "broadcast_buffers": ("_sync.buffers", "enabled"),  # a deprecated name of the next
    "forward_sync_buffers": ("_sync.buffers", "enabled"),
    "require_backward_grad_sync": ("_sync", "wanted"),
    "require_forward_param_sync": ("_sync.buffers", "wanted"),
}


def _settable(where: str, name: str) -> property:
    owner = attrgetter(where)
    return property(attrgetter(f"{where}.{name}"), lambda model, value: setattr(owner(model), name, value))


for _name, _path in _FORWARDED.items():
    setattr(DistributedDataParallel, _name, property(attrgetter(_path)))
for _name, _place in _FORWARDED_BOTH_WAYS.items():
    setattr(DistributedDataParallel, _name, _settable(*_place))


def _record_function(name: str) -> AbstractContextManager[Any]:
    """A range that profilers show; torch's own function costs 5 us without a profiler."""
    if _profiler_enabled():
        return torch.autograd.profiler.record_function(name)
    return _RecordFunctionFast(name)


compiling.skip_frames(DistributedDataParallel, callers=("forward", "_run_ddp_forward"))
