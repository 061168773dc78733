"""`mixed_precision=_MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)`: compute and reduce in low precision.

[Note: mixed precision]
A parameter has two copies: `_fp_param`, in full precision, which the optimizer and checkpoints see, and `_mp_param`,
in `param_dtype`, whose memory is held from a forward to the end of its backward. In between `parameter.data` is the
low copy. One backward:

1. `before_forward`: all parameters are copied down in one go and switched; floating-point inputs are cast. Autograd
   makes a new accumulator for a tensor that changes its dtype, so the reducer's own hooks, on the old ones, do not
   fire: each parameter's new accumulator gets one that calls `_arrived`.
2. `_arrived`: casts the gradient to the dtype of its bucket (`reduce_dtype`, else `param_dtype`) and hands it to the
   reducer, which averages as always. A gradient that was accumulated before stays in full precision under this:
   autograd adds the low one to it in place, so that only the sum is rounded, once, on its way into the bucket.
3. `restore`, when the backward is over and all buckets are reduced: parameters and gradients are back in full
   precision, also under `no_sync`. It is queued when an output gets its gradient, because that happens in the
   outermost backward (those of reentrant checkpointing end earlier), and queued again from there, so that it runs
   after the reducer's own end of the backward. Of a backward that the caller ends, `finalize_backward` calls it.

A forward without gradients restores at once, unless the backward of an earlier one is still to come. After a failed
backward the next forward restores first. Calling `model.module` itself computes in full precision.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed.utils import _cast_forward_inputs

from ..core.synchronizer import GradientSynchronizer

__all__ = ["LowPrecision"]


class LowPrecision:
    """The low-precision copies of one model's parameters, and when they are allocated. See [Note: mixed precision].

    Args:
        sync: has options for it; its parameters and buffers already have rank 0's values.
    """

    def __init__(self, sync: GradientSynchronizer) -> None:
        config = sync.options.mixed_precision
        self._dtype = config.param_dtype
        self._bucket_dtype = config.reduce_dtype or config.param_dtype
        self._sync = weakref.ref(sync)
        # with the attributes of [Note: mixed precision]
        self._parameters: list[Any] = [p for p in sync.module.parameters() if not getattr(p, "_ddp_ignored", False)]
        self._hooks: list[Any] = []  # (accumulator, handle): a variable holds its accumulator weakly
        self._low = False
        self._was_low = False  # when the present forward began
        self._queued = False
        for parameter in self._parameters:
            _add_low_copy(parameter, self._dtype)
        if config.buffer_dtype is not None:
            _cast_buffers(sync.module, config.buffer_dtype)
        sync.on_new_reducer.append(self._tell_reducer)

    def _tell_reducer(self, sync: GradientSynchronizer) -> None:
        """The dtype in which gradients arrive and are sent."""
        if self._bucket_dtype is not None:
            sync.reducer._set_mixed_precision_param_dtype(self._bucket_dtype)

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The forward's arguments with floating-point tensors in `param_dtype`; switches the parameters as well."""
        self._was_low = self._low
        self._begin()
        cast_args, cast_kwargs = _cast_forward_inputs(self._dtype, *args, **kwargs)
        return tuple(cast_args), cast_kwargs

    def _begin(self) -> None:
        """Switches all parameters to their low copies, with new values, and hooks their gradients."""
        if self._queued and not self._awaits_caller():  # the last backward failed before its end
            self.restore()
        if self._low or self._dtype is None:
            return
        self._low = True
        for parameter in self._parameters:
            _hold(parameter._mp_param, True)
            parameter._fp_param = parameter.data
        low = [parameter._mp_param for parameter in self._parameters]
        with torch.no_grad():
            torch._foreach_copy_(low, [parameter._fp_param for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.data = parameter._mp_param
        if torch.is_grad_enabled():
            self._hook_gradients()

    def after_forward(self, outputs: Iterable[torch.Tensor]) -> None:
        """After the module has run, with its output: restores full precision now, or at the end of the backward."""
        waiting = [output for output in outputs if output.requires_grad]
        if not torch.is_grad_enabled() and not self._was_low:
            self.restore()
        for output in waiting:
            output.register_hook(functools.partial(_backward_begins, weakref.ref(self)))

    @property
    def low(self) -> bool:
        """Whether the parameters are switched to their low copies now."""
        return self._low

    def _hook_gradients(self) -> None:
        sync = self._sync()
        assert sync is not None
        for index, parameter in enumerate(sync.trained.tensors):
            accumulator: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            hook = functools.partial(_arrived, weakref.ref(self), index, parameter)
            self._hooks.append((accumulator, accumulator.register_hook(hook)))

    def arrived(self, index: int, parameter: torch.nn.Parameter) -> None:
        """A gradient is in `parameter.grad`: to its bucket, if this backward is synchronised."""
        sync = self._sync()
        if sync is None or not self._low:
            return
        self.queue_restore()
        _cast_gradient(parameter, self._bucket_dtype)
        sync.reducer._autograd_hook(index)

    def queue_restore(self) -> None:
        """Makes `restore` run last in the current backward."""
        if self._queued:
            return
        self._queued = True
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._end_of_backward))

    def _end_of_backward(self) -> None:
        if not self._awaits_caller():
            self.restore()

    def _awaits_caller(self) -> bool:
        sync = self._sync()
        return sync is not None and sync.manual_end and bool(sync.reducer.in_flight())

    def restore(self) -> None:
        """Parameters and gradients in full precision again."""
        for _, handle in self._hooks:
            handle.remove()
        self._hooks = []
        self._low = self._queued = False
        for parameter in self._parameters:
            if parameter.data.data_ptr() == parameter._mp_param.data_ptr():
                parameter.data = parameter._fp_param
            _hold(parameter._mp_param, False)
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                # Not through `.grad.data`: it may be the bucket's own view, which must not change.
                parameter.grad = parameter.grad.to(parameter.dtype)


def _arrived(
    state: weakref.ReferenceType[LowPrecision], index: int, parameter: torch.nn.Parameter, *grads: Any
) -> None:
    alive = state()
    if alive is not None:
        alive.arrived(index, parameter)


def _backward_begins(state: weakref.ReferenceType[LowPrecision], grad: torch.Tensor) -> None:
    alive = state()
    if alive is not None and alive.low:
        alive.queue_restore()


def _add_low_copy(parameter: Any, dtype: torch.dtype | None) -> None:
    if not hasattr(parameter, "_mp_param"):
        low = torch.zeros_like(parameter, dtype=dtype, requires_grad=parameter.requires_grad)
        _hold(low, False)
        parameter._mp_param = low
    parameter._fp_param = parameter.data


def _hold(low: torch.Tensor, memory: bool) -> None:
    low.untyped_storage().resize_(low.numel() * low.element_size() if memory else 0)


def _cast_buffers(module: torch.nn.Module, dtype: torch.dtype) -> None:
    for buffer in module.buffers():
        if buffer.is_floating_point() and not getattr(buffer, "_ddp_ignored", False):
            buffer.data = buffer.to(dtype)


def _cast_gradient(parameter: torch.nn.Parameter, dtype: torch.dtype | None) -> None:
    # `.grad =` would refuse a dtype that is not the parameter's
    if parameter.grad is not None and dtype is not None and parameter.grad.dtype != dtype:
        parameter.grad.data = parameter.grad.to(dtype)
