"""Keeps the buffers of the ranks equal: a broadcast before each synchronised forward, or a hook of the user's.

[Note: when buffers are broadcast]
In a forward that follows a synchronised one (and in the first): buffers that a forward under no_sync has changed stay a
rank's own until the next synchronised forward is over, as in torch. Modules may assign a buffer anew in their forward,
so the tensors are looked up each time; their version counters are kept, because autograd may have saved them in a
forward whose backward is still to come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as _keep_versions
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from . import parameters, process_groups
from .model_state import ModelState

__all__ = ["BufferSync"]


class BufferSync(ModelState):
    """The part of `DistributedDataParallel` that has to do with buffers. See [Note: when buffers are broadcast]."""

    buffer_hook: _BufferCommHook

    @property
    def broadcast_buffers(self) -> bool:
        """The deprecated name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD
    ) -> None:
        """Replaces the broadcast by ``hook(state, {name: buffer})``.

        Args:
            state: passed to the hook.
            hook: brings the buffers into agreement, in place. It may return a list of futures, which are then
                waited for at the end of the backward.
            comm_hook_location: before or after the module's forward.

        Raises:
            TypeError: the hook is not callable.
        """
        if not callable(hook):
            self._log_and_throw(TypeError, f"Buffer communication hook must be callable, got {type(hook).__name__}.")
        self.buffer_hook = _BufferCommHook(
            buffer_comm_hook=hook, buffer_comm_hook_state=state, buffer_comm_hook_location=comm_hook_location
        )

    def will_sync_module_buffers(self) -> bool:
        """Whether the current (or next) forward brings the buffers into agreement."""
        return bool(self.require_forward_param_sync and self.forward_sync_buffers and self.modules_buffers)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._buffer_hook_place() is not _BufferCommHookLocation.POST_FORWARD

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._buffer_hook_place() is _BufferCommHookLocation.POST_FORWARD

    def _buffer_hook_place(self) -> Any:
        hook = self.__dict__.get("buffer_hook")
        return None if hook is None else hook.buffer_comm_hook_location

    def _assign_modules_buffers(self) -> None:
        """Looks the buffers up: `modules_buffers` and `named_module_buffers`, without those that are ignored."""
        self._keep_buffers(parameters.survey(self.module, self.parameters_to_ignore).buffers)

    def _keep_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        self.named_module_buffers = buffers
        self.modules_buffers = list(buffers.values())

    def _sync_buffers(self) -> None:
        """Runs the buffer hook, or broadcasts the buffers of rank 0 (under join: of a rank that has not joined)."""
        source = 0
        if self._join_config.enable:
            from ..features.join import buffer_source

            source = buffer_source(self)
        self._keep_buffers(parameters.buffers_now(self._survey))
        with torch.no_grad(), _keep_versions(tuple(self.modules_buffers)):
            self._sync_module_buffers(source)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        hook = self.__dict__.get("buffer_hook")
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None:
            self.reducer.install_post_backward_futures(futures)

    def _default_broadcast_coalesced(
        self,
        bufs: list[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcasts tensors (the buffers, if None) from a rank of the group; hooks may call it."""
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs,
            self.broadcast_bucket_size if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        process_groups.broadcast_coalesced(tensors, self.process_group, buffer_size, authoritative_rank)
