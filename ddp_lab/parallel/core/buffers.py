"""Keeps the buffers of the ranks equal: a broadcast before each synchronised forward, or a user's hook.

[Note: when buffers are broadcast]
In a forward that follows a synchronised one (and in the first): buffers changed by a forward under no_sync stay
rank-specific until the next synchronised forward is over, as in torch. Modules may reassign a buffer in their forward,
so the tensors are looked up each time; their version counters are kept, because autograd may have saved them in a
forward whose backward is still to come.

[Note: buffers that never change]
In forwards 1, 2, 4, 8, … (looks) a buffer's bits are compared with those of the first. A buffer that is another tensor
then, or that any forward finds written to (autograd's version counter), is never looked at again: so most models are
looked at twice. The counters alone do not tell, because some kernels (batch norm's) and writes through `.data` do not
count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as _keep_versions
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from ... import native, recording
from . import process_groups
from .arguments import BROADCAST_BYTES

__all__ = ["BufferSynchronizer", "UnchangedBuffers"]

_C = native.load()
_BUFFERS = _C.USES.index("buffers")


class BufferSynchronizer:
    """The buffers of one model, and when they are synchronised. See [Note: when buffers are broadcast].

    Attributes:
        enabled: the argument `forward_sync_buffers`.
        wanted: whether the last forward was a synchronised one; torch's `require_forward_param_sync`.
        hook: the user's, replaces the broadcast; None without.
        named: the buffers by qualified name, without those that are ignored.
        tensors: the same as a list.
    """

    def __init__(self, *, enabled: bool, wanted: bool, hook: _BufferCommHook | None) -> None:
        self.enabled = enabled
        self.wanted = wanted
        self.hook = hook
        self.unchanged = UnchangedBuffers()
        self._shapes: list[torch.Size] = []
        self.keep({})

    def keep(self, named: dict[str, torch.Tensor]) -> None:
        """Sets the buffers."""
        self.named = named
        self.tensors = list(named.values())

    def describe_changes(self) -> None:
        """Describes buffers whose shape has changed: if it is not the same on all ranks, their broadcast ends them."""
        before, self._shapes = self._shapes, [one.shape for one in self.tensors]
        if before == self._shapes or not recording.enabled():
            return
        known = dict(zip(self.named, before, strict=False)) if len(before) == len(self.named) else {}
        changed = [
            {"name": name, "shape": list(one.shape)} for name, one in self.named.items() if known.get(name) != one.shape
        ]
        recording.describe_fleeting({"type": "buffers", "buffers": changed}, leave=True)

    def due(self) -> bool:
        """Whether the current (or next) forward synchronises the buffers."""
        return bool(self.wanted and self.enabled and self.named)

    def due_before(self) -> bool:
        """Whether that is before the module runs."""
        return self.due() and not self.is_late()

    def due_after(self) -> bool:
        """Whether that is after the module has run."""
        return self.due() and self.is_late()

    def is_late(self) -> bool:
        """Whether a user's hook runs after the module's forward."""
        hook = self.hook
        return hook is not None and hook.buffer_comm_hook_location is _BufferCommHookLocation.POST_FORWARD

    def run(self, group: dist.ProcessGroup, source: int) -> Any:
        """Runs the hook, or broadcasts the buffers of the rank `source` of the group.

        Returns:
            Futures for which the end of the backward waits; None if the hook returned none.
        """
        with torch.no_grad(), _keep_versions(tuple(self.tensors)):
            if self.hook is not None:
                return self.hook.buffer_comm_hook(self.hook.buffer_comm_hook_state, self.named)
            self.describe_changes()
            before = _C.set_purpose(-1, -1, _BUFFERS)
            try:
                process_groups.broadcast_coalesced(self.tensors, group, BROADCAST_BYTES, source)
            finally:
                _C.set_purpose(*before)
            return None


class UnchangedBuffers:
    """Which buffers of a model have had the same values in each look. See [Note: buffers that never change]."""

    def __init__(self) -> None:
        self._forwards = self._looks = 0
        self._kept: dict[str, tuple[torch.Tensor, int, int]] = {}  # name -> tensor, its version and bits at first
        self._bytes = 0  # of all that are broadcast

    def before_broadcast(self, find: Callable[[], Mapping[str, torch.Tensor]], reducer: int, step: int) -> None:
        """Looks, if it is time, and describes what it sees; the broadcast leaves the version counters as they are.

        Args:
            find: returns the buffers by their names.
            reducer, step: the model, and its step.
        """
        if not recording.enabled() or (self._looks > 1 and not self._kept):
            return
        self._forwards += 1
        kept = {name: one for name, one in self._kept.items() if one[0]._version == one[1]}
        named = {} if self._forwards & (self._forwards - 1) else find()
        captured = any(one.is_cuda for one in named.values()) and torch.cuda.is_current_stream_capturing()
        looks = bool(named) and not captured
        if looks:
            kept = self._same(kept, named) if self._looks else _first_seen(named)
            self._looks += 1
            self._bytes = sum(one.nbytes for one in named.values())
        fewer, self._kept = len(kept) < len(self._kept), kept
        if fewer or (looks and self._looks > 1):
            self._describe(reducer, step)

    @staticmethod
    def _same(
        kept: Mapping[str, tuple[torch.Tensor, int, int]], named: Mapping[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, int, int]]:
        """Those that are the same tensors with the same bits."""
        same = {name: one for name, one in kept.items() if named.get(name) is one[0]}
        return {name: one for name, one in same.items() if _C.checksum(one[0].detach()) == one[2]}

    def _describe(self, reducer: int, step: int) -> None:
        buffers = [{"name": name, "bytes": one[0].nbytes} for name, one in self._kept.items()]
        made = {"type": "unchanged_buffers", "reducer": reducer, "step": step, "looks": self._looks}
        recording.describe_fleeting({**made, "buffers": buffers, "bytes": self._bytes})


def _first_seen(named: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int, int]]:
    plain = {name: one for name, one in named.items() if type(one) is torch.Tensor and not one.is_inference()}
    return {name: (one, one._version, _C.checksum(one.detach())) for name, one in plain.items()}
