"""DistributedDataParallel: averages gradients over ranks while the backward runs, and records how.

[Note: a subclass that runs none of torch's reducer]
Much code asks `isinstance(model, torch.nn.parallel.DistributedDataParallel)` (torch.compile, checkpointing, ZeRO,
trainers), so ours is a subclass. Its constructor calls `Module.__init__` and `Joinable.__init__` alone: torch's own
would build torch's reducer, whose hooks would average every gradient a second time. What is inherited and only
reads attributes (no_sync, buffer synchronisation, scatter, gather) gets these attributes; what needs torch's reducer
is replaced, or raises NotImplementedError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _sync_module_states, _to_kwargs
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _find_tensors

from .. import native
from . import arguments, inspection, recording, records, verify
from .bucketing import assign_buckets
from .comm_hooks import builtin_hook, check_hook, warn_if_late
from .inspection import live_models, request_inspection
from .records import BucketInfo

__all__ = ["DistributedDataParallel", "live_models", "request_inspection"]

_C = native.load()


class DistributedDataParallel(TorchDDP):
    """Trains one model on several ranks: each backward leaves the ranks' average in `param.grad`.

    A drop-in for `torch.nn.parallel.DistributedDataParallel`: same signature, same gradients. Gradients are
    grouped into buckets; a bucket's `all_reduce` starts as soon as its gradients (and the buckets before it)
    are ready, and overlaps the rest of the backward. Every step of this is recorded: see `ddp_lab.recording`.

    The first backward uses one bucket for each (dtype, device); then buckets are assigned anew, once, in the
    order in which rank 0's gradients became ready.

    Args:
        module: the model, the same on all ranks; its parameters and buffers become rank 0's.
        device_ids: None, or the one accelerator that the module is on: forward then moves its inputs there.
        output_device: kept for compatibility; defaults to ``device_ids[0]``.
        dim: dimension that `scatter` and `gather` split.
        broadcast_buffers: broadcast rank 0's buffers at construction and before each synchronised forward.
        init_sync: compare the models of the ranks and broadcast rank 0's state. False: no communication, and
            the caller answers for equal models.
        process_group: the ranks that train together; the default group if None.
        bucket_cap_mb: size in MiB at which a bucket is closed, fractions allowed. None: 1 MiB for the first
            bucket (so that communication starts early), 25 MiB for the others. Larger buckets use the network
            better, smaller ones overlap more.
        check_reduction: without effect.
        gradient_as_bucket_view: gradients are views of the buckets, which saves one copy and the memory of
            all gradients. Such a gradient can't be `detach_()`-ed.
        forward_sync_buffers: replaces `broadcast_buffers` for the forward; buffers are then always broadcast
            at construction.

    All other arguments of torch's are accepted at their defaults and raise NotImplementedError otherwise.

    Raises:
        RuntimeError: the module has nothing to train, or differs between the ranks.
        ValueError: devices that do not fit the module.

    Example:
        >>> model = ddp_lab.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> model(torch.randn(8, 4)).sum().backward()  # param.grad: the average over all ranks
        >>> model.buckets()[0].parameters
        ('weight', 'bias')
    """

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
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        given = locals()
        arguments.refuse_unsupported(**{name: given[name] for name in arguments.NOT_YET})
        # See [Note: a subclass that runs none of torch's reducer]
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        self.process_group: dist.ProcessGroup = arguments.resolve_group(process_group)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module_parameters = [parameter for _, parameter in self._named_parameters(module)]
        if not self._module_parameters:
            raise RuntimeError(_NOTHING_TO_TRAIN)
        arguments.check_module(module, self._named_parameters(module))
        self.device_ids, self.output_device = arguments.resolve_devices(
            device_ids, output_device, self._module_parameters
        )
        self.dim = dim
        self.module = module
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self.gradient_as_bucket_view = gradient_as_bucket_view
        sync_forward, sync_init = arguments.buffer_sync(broadcast_buffers, forward_sync_buffers)
        self._caps = arguments.bucket_caps(bucket_cap_mb)
        self._set_what_torch_reads(sync_forward)
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        self.reducer_id = self._agree(init_sync)
        if not any(parameter.requires_grad for parameter in self._module_parameters):
            raise RuntimeError(_NOTHING_TO_TRAIN)
        self._passing_sync_batchnorm_handle(module)  # type: ignore[no-untyped-call]
        if init_sync:
            self._broadcast_state(sync_init)
        self._make_reducer()

    # -- construction

    def _named_parameters(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in module.named_parameters() if name not in self.parameters_to_ignore]

    def _set_what_torch_reads(self, sync_buffers: bool) -> None:
        """Attributes that inherited methods and torch.compile read."""
        self.logger = None
        self.static_graph = False
        self.find_unused_parameters = False
        self.mixed_precision = None
        self.batched_grad_copy = False
        self.skip_all_reduce_unused_params = False
        self.is_multi_device_module = len({p.device for p in self._module_parameters}) > 1
        self.broadcast_buffers = sync_buffers
        self.forward_sync_buffers = sync_buffers
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.use_side_stream_for_tensor_copies = True
        self.broadcast_bucket_size = 250 * arguments.MEBIBYTE
        self.bucket_bytes_cap = self._caps[-1]
        self.bucket_bytes_cap_default = len(self._caps) > 1
        self._use_python_reducer = False
        self._has_rebuilt_buckets = False
        self._delay_all_reduce_params: list[torch.nn.Parameter] = []
        self._delay_grad_buffer = None
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []

    def _agree(self, collective: bool) -> int:
        options = {"bucket_cap_bytes": self._caps, "gradient_as_bucket_view": self.gradient_as_bucket_view}
        entries = verify.model_description(
            self._named_parameters(self.module), self.named_module_buffers.items(), options
        )
        return verify.agree(entries, self.process_group, self.device, collective=collective)

    def _broadcast_state(self, with_buffers: bool) -> None:
        _sync_module_states(
            module=self.module,
            process_group=self.process_group,
            broadcast_bucket_size=self.broadcast_bucket_size,
            src=0,
            params_and_buffers_to_ignore=self.parameters_to_ignore,
            broadcast_buffers=with_buffers,
        )

    def _make_reducer(self) -> None:
        trained = [(name, p) for name, p in self._named_parameters(self.module) if p.requires_grad]
        self._names = [name for name, _ in trained]
        self._trained = [parameter for _, parameter in trained]
        self._sizes = [p.numel() * p.element_size() for p in self._trained]
        self._keys = [(p.dtype, p.device) for p in self._trained]
        self._step_agreed = True
        self._assignment = self._first_assignment()
        self.reducer = _C.Reducer(
            parameters=self._trained,
            names=self._names,
            assignment=self._assignment,
            process_group=self.process_group,
            reducer_id=self.reducer_id,
            process_group_index=verify.process_group_index(self.process_group),
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        inspection.install(self)
        self._describe_assignment()

    def _first_assignment(self) -> list[list[int]]:
        return assign_buckets(self._sizes, self._keys, [sum(self._sizes) + 1])

    # -- forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; the backward of what it returns averages the gradients (but see `no_sync`).

        Raises:
            RuntimeError: the last backward left parameters without a gradient; names them.
        """
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # torch.compile asks the class which model runs. Torch's own way of telling imports torch._dynamo (seconds).
        outer = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self
        try:
            return self.module(*inputs, **kwargs)
        finally:
            TorchDDP._active_ddp_module = outer

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if torch.is_grad_enabled():
            if not self._step_agreed:
                self._agree_on_step()
            if self.reducer.begin_forward(self.require_backward_grad_sync):
                self._rebuild()
                self.reducer.begin_forward(self.require_backward_grad_sync)
        if self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._sync_buffers()  # type: ignore[no-untyped-call]
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            return moved[0], moved_kwargs[0]
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self.reducer.end_forward()
        if sync:
            self.reducer.arm([output] if isinstance(output, torch.Tensor) else list(_find_tensors(output)))
        self.require_forward_param_sync = sync
        return output

    def _rebuild(self) -> None:
        """Assigns the buckets anew in the order in which rank 0's gradients became ready. Once; all ranks."""
        order = torch.tensor(self.reducer.ready_order(), dtype=torch.int64, device=self.device)
        dist.broadcast(order, group=self.process_group, group_src=0)
        self._assignment = assign_buckets(self._sizes, self._keys, self._caps, order.tolist())
        self.reducer.rebuild(self._assignment)
        self._has_rebuilt_buckets = True
        self._describe_assignment()

    def _agree_on_step(self) -> None:
        """After a failure ranks may have counted differently many backwards: they go on from the same number."""
        step = torch.tensor([self.reducer.step()], dtype=torch.int64, device=self.device)
        dist.all_reduce(step, op=dist.ReduceOp.MAX, group=self.process_group)
        self.reducer.set_step(int(step.item()))
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
        check_hook(hook)
        warn_if_late(hook, self.reducer.step())
        self.reducer.register_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Averages with the hook that `dist.BuiltinCommHookType` names (the same arithmetic, run from Python)."""
        self.register_comm_hook(self.process_group, builtin_hook(comm_hook_type))

    # -- looking at it

    def buckets(self) -> tuple[BucketInfo, ...]:
        """One record for each bucket, in the order of launch, with the times of the last finished backward."""
        return records.buckets(self)

    def inspect_gradients(self) -> list[dict[str, Any]]:
        """Norm and checksum of each bucket's gradients, to be compared between ranks.

        Returns:
            For each bucket a dict: ``bucket`` (index), ``norm`` (Euclidean), ``checksum`` (64 bits of the
            gradients' bytes: different numbers on two ranks mean different gradients).

        Raises:
            RuntimeError: called during a backward.
        """
        return inspection.inspect_gradients(self)

    def _describe_assignment(self) -> None:
        recording.describe(records.assignment(self), owner=self)

    # -- after a failure

    def abandon_backward(self) -> None:
        """Forgets a backward that will not finish, so that the next forward starts clean.

        For a helper thread after it has freed this rank from a collective. A backward that an exception ended
        is discarded by the next forward without this.
        """
        self.reducer.abandon()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Points the model at another process group, e.g. after a rejoin. Communicates at the next forward.

        Buckets go back to the first assignment, because a failure may have struck when only some ranks had
        rebuilt them. State of a comm hook that holds the old group is the caller's to replace.
        """
        self.process_group = new_process_group
        self._assignment = self._first_assignment()
        self._has_rebuilt_buckets = False
        self._step_agreed = False
        self.reducer.update_process_group(
            new_process_group, verify.process_group_index(new_process_group), self._assignment
        )
        self._describe_assignment()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        """Raises RuntimeError if a backward has begun and not averaged all gradients."""
        if self.reducer.in_flight():
            raise RuntimeError(
                "Expected to finish all reduction: a backward has begun and some buckets are not reduced"
            )


_NOTHING_TO_TRAIN = (
    "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
)


arguments.refuse_methods(DistributedDataParallel)
# torch's parameters differ between releases; ours are those of the one that is installed
DistributedDataParallel.__init__.__signature__ = inspect.signature(TorchDDP.__init__)  # type: ignore[attr-defined]
