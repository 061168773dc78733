"""DistributedDataParallel: averages gradients over ranks while the backward runs, and records how.

[Note: a subclass that runs none of torch's reducer]
Much code asks `isinstance(model, torch.nn.parallel.DistributedDataParallel)` (torch.compile, checkpointing, ZeRO,
trainers), so ours is a subclass. Its constructor calls only `Module.__init__` and `Joinable.__init__`: torch's own
would build torch's reducer, whose hooks would average every gradient a second time. Only methods that read attributes
of our class are inherited: `scatter`, `gather`, `to_kwargs`, `train`, `_get_data_parallel_params`,
`_set_params_and_buffers_to_ignore_for_model`, `_build_params_for_reducer`, `_build_debug_param_to_name_mapping`,
`_inside_ddp_forward`, `_get_active_ddp_module`, `_set_ddp_sink_clone`. All else is in `Runtime`, to which torch's names
that libraries read are forwarded: `_FORWARDED`. The arguments are declared in `core.arguments`: `Arguments`.

[Note: a copy of a model]
The copy has a `Runtime` of its own. It trains its own parameters, only with the default group, as in torch. Making it
communicates nothing, so its number may differ between ranks. It has no comm hook: only a hook's author knows whether
two models may share its state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _RecordFunctionFast
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from ..analysis.check_reports import DriftReport
from ..protocol.messages import Change
from .core import arguments
from .core.arguments import Arguments, ReducerOptions, takes_arguments
from .core.buckets import BucketInfo, OrderFollower
from .core.synchronizer import Settings
from .features import compile as compiling
from .features import join, optimizer_in_backward
from .live import change as changes
from .live.model import LiveModel
from .monitoring import inspection
from .monitoring.drift import DriftWatch, compare
from .monitoring.gradient_norms import GradientWatch
from .runtime import Runtime

__all__ = ["DistributedDataParallel"]


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

    # See `_FORWARDED`
    reducer: Any  # ddp_lab._C.Reducer
    _pre_forward: Any
    _post_forward: Any
    _register_builtin_comm_hook: Any
    _live: LiveModel  # for `fault_injection`

    @takes_arguments(Arguments)
    def __init__(self, given: Arguments) -> None:
        # See [Note: a subclass that runs none of torch's reducer]
        torch.nn.Module.__init__(self)
        in_python = compiling.python_reducer_is_chosen()
        given.check(in_python=in_python)
        group = given.resolve_group()
        if given.device_mesh is not None:
            self.device_mesh = given.device_mesh
        self.module = given.module
        delayed = dict(given.delay_all_reduce_named_params or ())
        self.parameters_to_ignore = {*getattr(given.module, "_ddp_params_and_buffers_to_ignore", ()), *delayed}
        settings = Settings(ReducerOptions.of(given), given.caps, given.syncs_buffers, given.is_sharded, in_python)
        self._runtime = Runtime(self, group, settings, delayed)
        Joinable.__init__(self)
        tensors = self._runtime.sync.module_parameters or [*delayed.values()]
        self.is_multi_device_module = len({parameter.device for parameter in tensors}) > 1
        self.device_ids, self.output_device = given.resolve_devices(tensors)
        self.dim = given.dim
        self.broadcast_bucket_size = arguments.BROADCAST_BYTES
        self.use_side_stream_for_tensor_copies = arguments.use_side_stream()
        self._runtime.agree(self, given)

    # -- forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; the backward of its output averages the gradients (but see `no_sync`).

        Raises:
            RuntimeError: the last backward left parameters without a gradient; the message names them.
        """
        with _record_function("DistributedDataParallel.forward"):
            runtime = self._runtime
            if runtime.all_late:
                return runtime.expect_late(self.module(*inputs, **kwargs))
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which forwards and their backwards only accumulate gradients on this rank.

        The first synchronised backward after it averages the accumulated gradients. The forward must be inside too;
        see `sync_gradients` for averaging without another backward.
        """
        outer = self._runtime.sync.wanted
        self._runtime.set_wanted(False)
        try:
            yield
        finally:
            self._runtime.set_wanted(outer)

    def sync_gradients(self) -> None:
        """Averages the gradients accumulated under `no_sync` now, without another backward. All ranks must call it.

        Parameters that have no gradient on any rank keep none.

        Raises:
            RuntimeError: called during a backward.
        """
        self._runtime.synchronize()

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
        return self._runtime.sync.manual_end

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self._runtime.require_manual_end(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` must wait until the next backward has returned. Read it after the forward.

        False: it may also be called in a hook of the backward, as soon as all parameters have their gradients.
        """
        return self._runtime.must_end_after_backward()

    def finalize_backward(self) -> None:
        """Waits for the averages that the last backward has started, and writes them to `param.grad`.

        Work goes to the device's current stream.

        Raises:
            RuntimeError: `require_manual_backward_finalization` is False; gradients are missing; no synchronised
                backward waits for this; or the communication failed.
        """
        self._runtime.end_backward()

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
        self._runtime.attach_hook(hook, state)

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
            self._runtime.fail(TypeError, f"Buffer communication hook must be callable, got {type(hook).__name__}.")
        self._runtime.sync.buffers.hook = _BufferCommHook(
            buffer_comm_hook=hook, buffer_comm_hook_state=state, buffer_comm_hook_location=comm_hook_location
        )

    def will_sync_module_buffers(self) -> bool:
        """Whether the current (or next) forward synchronises the buffers."""
        return self._runtime.sync.buffers.due()

    # -- buckets

    def buckets(self) -> tuple[BucketInfo, ...]:
        """One record for each bucket, in the order of launch, with the times of the last finished backward."""
        return self._runtime.sync.buckets()

    def rebuild_buckets_on_reorder(self, threshold: float | None, every: int = 20) -> None:
        """Rebuilds the buckets when gradients become ready in a different order than the bucket layout assumes.

        All ranks must call it with the same arguments.

        Args:
            threshold: the share of parameters (0 to 1) that may become ready out of order; None switches it off.
            every: interval in synchronised forwards at which rank 0 checks and broadcasts the result.
        """
        self._runtime.sync.follower = None if threshold is None else OrderFollower(threshold, every)

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
        self._runtime.live.reconfigure(Change(bucket_cap_mb, first_bucket_mb, bucket_cap_mb_list, order, comm_hook))

    def configuration(self) -> dict[str, Any]:
        """The settings that `reconfigure` can change: sizes in MiB, the comm hook's name, the number of buckets."""
        return changes.describe(self._runtime.sync)

    # -- monitoring

    def inspect_gradients(self) -> list[dict[str, Any]]:
        """Norm and checksum of each bucket's gradients, for comparison between ranks.

        Returns:
            For each bucket a dict: ``bucket`` (index), ``norm`` (Euclidean), ``checksum`` (64 bits from the
            gradients' bytes: different checksums on two ranks mean different gradients).

        Raises:
            RuntimeError: called during a backward.
        """
        return inspection.inspect_gradients(self._runtime.sync)

    def check_drift(self) -> DriftReport:
        """Compares parameters and buffers of all ranks, see `ddp_lab.check_drift`. All ranks must call it."""
        return compare(self._runtime.sync)

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
        return self._runtime.monitors.watch_drift(every, action)

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
        return self._runtime.monitors.watch_gradients(every, nonfinite)

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
        runtime = self._runtime
        runtime.logger._set_uneven_input_join()
        divide = kwargs.get("divide_by_initial_world_size", True)
        return join.DDPJoinHook(runtime.sync, runtime.live.look, divide_by_initial_world_size=divide)

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives of a join context."""
        return self._runtime.sync.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of the collectives of a join context."""
        return self._runtime.sync.group

    # -- after a failure

    def abandon_backward(self) -> None:
        """Discards a backward that will not finish, so that the next forward starts clean.

        For a helper thread after it has unblocked this rank from a collective. Not needed after a backward that an
        exception ended: the next forward discards it.
        """
        self._runtime.sync.reducer.abandon()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Makes the model use another process group, e.g. after a rejoin. Communicates at the next forward."""
        self._runtime.sync.replace_group(new_process_group)

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """See [Note: a copy of a model]."""
        sync = self._runtime.sync
        self._runtime.check_copyable()
        state = {name: value for name, value in self.__dict__.items() if name not in ("_runtime", "device_mesh")}
        return {**state, "_settings": sync.settings, "_had_hook": bool(sync.hooks)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = dict(state)
        settings, had_hook = kept.pop("_settings", None), kept.pop("_had_hook", False)
        if not isinstance(settings, Settings):
            raise ValueError("this model was pickled by an earlier release of ddp_lab: save and load its state_dict()")
        torch.nn.Module.__setstate__(self, kept)
        if had_hook:
            warnings.warn(
                "A copy of a DistributedDataParallel model has no comm hook: register it again.", stacklevel=2
            )
        self._runtime = Runtime(self, arguments.default_group(), settings, {})
        self._runtime.sync.agree(collective=False)
        self._runtime.start(self)


# Names of torch's class that libraries read or call, and their places in the runtime. Getters in C, which torch.compile
# can't trace into.
_FORWARDED = {
    "_assign_modules_buffers": "sync.look_up_buffers",
    "_authoritative_rank": "sync.inputs.last_joiner",
    "_check_manual_backward_finalization_supported": "check_manual_end",
    "_check_default_group": "check_copyable",
    "_check_reducer_finalized": "check_finalized",
    "_comm_hooks": "sync.hooks",
    "_default_broadcast_coalesced": "sync.broadcast_coalesced",
    "_delay_all_reduce_all_params": "all_late",
    "_get_ddp_logging_data": "logger.data",
    "_has_rebuilt_buckets": "sync.has_rebuilt_buckets",
    "_log_and_throw": "fail",
    "_module_parameters": "sync.module_parameters",
    "_post_forward": "_post_forward",
    "_pre_forward": "_pre_forward",
    "_register_builtin_comm_hook": "attach_builtin_hook",
    "_remove_autograd_hooks": "sync.reducer.remove_hooks",
    "_set_ddp_runtime_logging_sample_rate": "set_sample_rate",
    "_set_sparse_metadata": "sync.reducer._set_sparse_metadata",
    "_set_static_graph": "set_static_graph",
    "_use_python_reducer": "sync.in_python",
    "bucket_bytes_cap": "sync.caps.others",
    "bucket_bytes_cap_default": "sync.caps.has_small_first",
    "bucket_bytes_cap_list": "sync.caps.given",
    "device": "sync.device",
    "device_type": "sync.device.type",
    "logger": "logger",
    "modules_buffers": "sync.buffers.tensors",
    "named_module_buffers": "sync.buffers.named",
    "process_group": "sync.group",
    "reducer": "sync.reducer",
    # ours
    "_live": "live",
    "_monitors": "monitors",
    "_sync": "sync",
    "model_id": "sync.model_id",
    **{option.name: f"sync.options.{option.name}" for option in fields(ReducerOptions)},
}
# The same for names that libraries also set.
_FORWARDED_BOTH_WAYS = {
    "_join_config": ("sync.inputs", "config"),
    "broadcast_buffers": ("sync.buffers", "enabled"),  # a deprecated name of the next
    "forward_sync_buffers": ("sync.buffers", "enabled"),
    "require_backward_grad_sync": ("sync", "wanted"),
    "require_forward_param_sync": ("sync.buffers", "wanted"),
}


def _settable(where: str, name: str) -> property:
    owner = attrgetter(f"_runtime.{where}")
    return property(attrgetter(f"_runtime.{where}.{name}"), lambda model, value: setattr(owner(model), name, value))


for _name, _path in _FORWARDED.items():
    setattr(DistributedDataParallel, _name, property(attrgetter(f"_runtime.{_path}")))
for _name, _place in _FORWARDED_BOTH_WAYS.items():
    setattr(DistributedDataParallel, _name, _settable(*_place))


def _record_function(name: str) -> AbstractContextManager[Any]:
    """A range that profilers show; torch's own function costs 5 us without a profiler."""
    if _profiler_enabled():
        return torch.autograd.profiler.record_function(name)
    return _RecordFunctionFast(name)


compiling.skip_frames(DistributedDataParallel, Runtime, callers=("forward", "_run_ddp_forward"))
