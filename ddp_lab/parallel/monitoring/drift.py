"""Checks whether all replicas are equal: on demand, and at an interval of steps.

[Note: comparing replicas]
Each rank hashes every parameter and buffer (64 bits each); first the hash of the hashes is gathered, 24 bytes per rank,
and only if those differ the hashes themselves, 8 bytes per tensor, to name the tensors. A hash depends on every bit, so
a difference is almost surely detected. Tensors on a device are copied to the host for it. Buffers that the wrapper
broadcasts before each forward differ between the ranks after one (batch norm's statistics), which is not drift.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from ... import native, recording
from ...analysis.check_reports import DriftReport
from ..core import arguments, process_groups
from ..core.synchronizer import GradientSynchronizer, synchronizer_of

__all__ = ["DriftWatch", "check_drift", "check_replicas", "compare", "digest_of"]

_C = native.load()
_SIGNED = 2**63


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of the tensors' bits, in hexadecimal."""
    sums = b"".join(_C.checksum(tensor.detach()).to_bytes(8, "little") for tensor in tensors)
    return hashlib.blake2b(sums, digest_size=8).hexdigest()


def check_drift(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> DriftReport:
    """Compares parameters and buffers of all ranks bit by bit, and names the first that differs and the ranks.

    All ranks must call it, between two steps. It reads every parameter once (3.8 GB/s on one CPU core) and gathers a
    few bytes.

    Args:
        module: a wrapped model, whose ignored parameters are skipped, or any module.
        process_group: the ranks to compare; None: the model's, or the default group.

    Raises:
        RuntimeError: the ranks' modules have different parameters, not only different values.
    """
    sync = synchronizer_of(module)
    if sync is not None:
        return compare(sync, process_group)
    return _compare(module, set(), process_group or arguments.default_group(), None)


def compare(sync: GradientSynchronizer, process_group: dist.ProcessGroup | None = None) -> DriftReport:
    """The same for a model of ours."""
    return _compare(sync.module, sync.ignored, process_group or sync.group, sync)


def _compare(
    module: nn.Module, ignored: set[str], group: dist.ProcessGroup, sync: GradientSynchronizer | None
) -> DriftReport:
    begin = time.perf_counter()
    named, device = _tensors(module, ignored)
    structure = json.dumps([[name, list(t.shape), str(t.dtype)] for name, t in named.items()]).encode()
    sums = torch.tensor([_C.checksum(t) - _SIGNED for t in named.values()], dtype=torch.int64)
    own = torch.tensor([_hash(structure), _hash(sums.numpy().tobytes()), len(sums)], dtype=torch.int64)
    heads = process_groups.gather_numbers(own.to(device), group)
    if len({(head[0], head[2]) for head in heads}) > 1:
        raise RuntimeError(
            "the ranks have different parameters or buffers (names, shapes or dtypes); number by rank: "
            f"{[head[2] for head in heads]}"
        )
    differing: list[str] = []
    table: list[list[int]] = []
    if len({head[1] for head in heads}) > 1:
        table = process_groups.gather_numbers(sums.to(device), group)
        differing = [name for i, name in enumerate(named) if len({row[i] for row in table}) > 1]
    pending = [name for name in differing if sync is not None and _is_pending(sync, name)]
    kept = [name for name in differing if name not in pending]
    groups = _groups([row[list(named).index(kept[0])] for row in table], group) if kept else ()
    return DriftReport(
        ok=not kept,
        step=sync.reducer.step() if sync is not None else -1,
        first=kept[0] if kept else None,
        groups=groups,
        differing=tuple(kept),
        pending=tuple(pending),
        tensors=len(named),
        bytes=sum(tensor.nbytes for tensor in named.values()),
        seconds=time.perf_counter() - begin,
    )


def _tensors(module: nn.Module, ignored: set[str]) -> tuple[dict[str, torch.Tensor], torch.device]:
    every = [*module.named_parameters(), *module.named_buffers()]
    named = {name: tensor.detach() for name, tensor in every if name not in ignored}
    devices = {tensor.device for tensor in named.values() if tensor.device.type != "cpu"}
    return named, next(iter(devices), torch.device("cpu"))


def _is_pending(sync: GradientSynchronizer, name: str) -> bool:
    buffers = sync.buffers
    return buffers.enabled and not buffers.is_late() and name in buffers.named


def _hash(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little", signed=True)


def _groups(values: Sequence[int], group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    ranks = process_groups.global_ranks(group)
    holders: dict[int, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    return tuple(tuple(found) for found in holders.values())


def _describe(sync: GradientSynchronizer, **found: object) -> None:
    """Reports a comparison's result to the timeline, on rank 0 of the group."""
    if not sync.group.rank():
        recording.describe_fleeting({"type": "drift", "reducer": sync.model_id, **found})


def _describe_report(sync: GradientSynchronizer, found: DriftReport) -> None:
    told = {name: getattr(found, name) for name in ("step", "ok", "first", "groups", "tensors", "bytes", "seconds")}
    _describe(sync, **told, differing=len(found.differing))


def check_replicas(sync: GradientSynchronizer) -> None:
    """Compares the replicas now, and reports the result, or why there is none, to the timeline."""
    try:
        if sync.inputs.uneven:
            raise RuntimeError("check after join(): inside it, ranks that have run out of inputs do not take part")
        _describe_report(sync, compare(sync))
    except RuntimeError as error:  # reported to the caller; training continues
        step, why = sync.reducer.step(), str(error)
        _describe(sync, step=step, ok=False, first=None, groups=[], seconds=0.0, error=why)


class DriftWatch:
    """The result of `watch_drift`: `remove` ends it.

    Attributes:
        last: the newest report; None before the first.
        checks: how many there were.
        seconds: their total time on this rank.
        action: the reaction to a difference.
    """

    def __init__(self, every: int, action: Literal["warn", "raise"]) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if action not in ("warn", "raise"):
            raise ValueError(f'action must be "warn" or "raise", got {action!r}')
        self.last: DriftReport | None = None
        self.checks = 0
        self.seconds = 0.0
        self.action: Literal["warn", "raise"] = action
        self._every = every
        self._checked_at = -1
        self._warned_of: tuple[object, object] | None = None

    @property
    def every(self) -> int:
        """Interval in steps; 0 after `remove`."""
        return self._every

    def remove(self) -> None:
        """No further checks."""
        self._every = 0

    def before_forward(self, sync: GradientSynchronizer) -> None:
        """Compares if it is time."""
        step = sync.reducer.step()
        if not self._every:
            return
        synchronised = torch.is_grad_enabled() and sync.wanted
        # Ranks that have run out of inputs would not take part.
        if not synchronised or step == 0 or step % self._every or step == self._checked_at or sync.inputs.uneven:
            return
        self._checked_at = step
        found = compare(sync)
        self.last = found
        self.checks += 1
        self.seconds += found.seconds
        _describe_report(sync, found)
        if found.ok:
            return
        if self.action == "raise":
            raise RuntimeError(str(found))
        if (found.first, found.groups) != self._warned_of:
            self._warned_of = (found.first, found.groups)
            warnings.warn(str(found), stacklevel=6)
