"""Parameters whose gradients are averaged together, when the gradient of another parameter arrives.

[Note: delayed parameters]
`delay_all_reduce_named_params` are not in the reducer's buckets. Their gradients live in a flat buffer of their
own (one for each dtype and device): before each backward a missing `.grad` is set to its zeroed view, autograd
accumulates in place, and when the gradient of `param_to_hook_all_reduce` has been accumulated, the buffer is divided
and all-reduced without a copy. The caller guarantees the order: the gradients of all delayed parameters are complete
when that one arrives; one that arrives later is an error, because its average would be wrong. The trigger may be one of
them. (torch's hook runs before the accumulation, and leaves its gradient as this rank's own, in silence.) The end of
the backward waits for the collective. Under `no_sync` nothing is sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ..core import process_groups

__all__ = ["DelayedParameters"]


class DelayedParameters:
    """The delayed parameters of one model and the buffers of their gradients. See [Note: delayed parameters].

    Args:
        parameters: the parameters whose gradients are averaged late.
        names: of each.
        trigger: the parameter whose gradient starts it.
        group: the ranks to average over.
        bucket_size: in bytes, for the broadcast of the parameters' values from rank 0.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        trigger: torch.nn.Parameter,
        group: dist.ProcessGroup,
        bucket_size: int,
    ) -> None:
        self.parameters = list(parameters)
        self.names = names
        self.group = group
        self.sync = True
        self.started = False  # in the backward that runs
        self.buffers: list[torch.Tensor] = []
        self._views: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._make_buffers()
        process_groups.broadcast_coalesced([parameter.detach() for parameter in parameters], group, bucket_size)
        own = weakref.ref(self)
        self._hooks = [one.register_post_accumulate_grad_hook(lambda late: _check(own, late)) for one in parameters]
        self._hooks.append(trigger.register_post_accumulate_grad_hook(lambda parameter: _start(own)))

    def before_backward(self, sync: bool) -> None:
        """Gives parameters without a gradient a zeroed one; `sync`: whether the next backward is to be averaged."""
        self.sync, self.started = sync, False
        missing = [parameter for parameter in self.parameters if parameter.grad is None]
        if len(missing) == len(self.parameters):
            torch._foreach_zero_(self.buffers)
        elif missing:
            torch._foreach_zero_([self._views[parameter] for parameter in missing])
        for parameter in missing:
            parameter.grad = self._views[parameter]

    def start(self) -> None:
        """Averages the buffers; the end of the running backward waits for it."""
        if not self.sync:
            return
        for parameter, view in self._views.items():
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)  # the caller has set another one
                parameter.grad = view
        torch._foreach_div_(self.buffers, self.group.size())
        works = [process_groups.all_reduce_async(buffer, self.group) for buffer in self.buffers]

        def wait() -> None:
            self.started = False
            for work in works:
                process_groups.finish(work)

        self.started = True
        Variable._execution_engine.queue_callback(wait)

    def _make_buffers(self) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for (dtype, device), members in groups.items():
            flat = torch.zeros(sum(parameter.numel() for parameter in members), dtype=dtype, device=device)
            self.buffers.append(flat)
            for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
                self._views[parameter] = part.view(parameter.shape)


def _check(reference: weakref.ReferenceType[DelayedParameters], late: torch.Tensor) -> None:
    delayed = reference()
    if delayed is None or not delayed.started:
        return
    name = next(name for name, one in zip(delayed.names, delayed.parameters, strict=True) if one is late)
    raise RuntimeError(
        f"The gradient of '{name}' arrived after that of param_to_hook_all_reduce, which had started the average of "
        "all delay_all_reduce_named_params: it would not be averaged. Choose for param_to_hook_all_reduce the "
        "parameter whose gradient is ready last (of a layer that forward uses before the delayed ones)."
    )


def _start(reference: weakref.ReferenceType[DelayedParameters]) -> None:
    delayed = reference()
    if delayed is not None:
        with torch.no_grad():
            delayed.start()
