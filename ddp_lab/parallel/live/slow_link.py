"""A link that delays the buckets of one rank before their collectives start.

[Note: a slow link]
The delay belongs between the bucket's launch and its collective, and the backward must go on meanwhile, as it does
while a real link is busy. So a comm hook of ours stands before the model's own (or before the plain average): it hands
the bucket to a thread and returns a future. The thread lets buckets pass one after the other, each for its bytes
divided by the rate, the latency on top, and then starts what the model would have started, in the same order. Other
ranks need not know: the collectives are the same, only later.

It is not met by collectives that are not the reducer's (SyncBatchNorm, buffers), and a module that communicates in its
backward on the same group would meet the buckets in another order: use it with models that leave that to the reducer.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket

from ...faults import SlowLink
from ..core import comm_hooks
from ..core.synchronizer import GradientSynchronizer
from . import interruptible_sleep

__all__ = ["Link"]

Future = torch.futures.Future[Any]


class Link:
    """The slow link of one model on this rank; made and ended on the thread that trains, between two backwards."""

    def __init__(self, sync: GradientSynchronizer, fault: SlowLink) -> None:
        self._fault = fault
        self._passing: queue.SimpleQueue[tuple[Any, Any, Future] | None] = queue.SimpleQueue()
        self._free_at = 0.0
        self._before: Any = None
        self.follow(sync)
        self._thread = threading.Thread(target=self._run, name="ddp_lab-slow-link", daemon=True)
        self._thread.start()

    def follow(self, sync: GradientSynchronizer) -> None:
        """Stands before the model's present reducer and hook, if these are new."""
        hook = sync.hooks[-1] if sync.hooks else (None, None)
        before = (sync.reducer, sync.hook_changes)
        if before == self._before:
            return
        self._before = before
        self._start = _starter(sync, *hook)
        sync.reducer.clear_comm_hook()
        comm_hooks.attach(sync.reducer, self._delayed, None)

    def end(self, sync: GradientSynchronizer) -> None:
        """Puts the model's own hook back."""
        self._passing.put(None)
        self._thread.join()
        sync.reducer.clear_comm_hook()
        for hook, state in sync.hooks:
            comm_hooks.attach(sync.reducer, hook, state)

    def _delayed(self, state: object, bucket: GradBucket) -> Future:
        """The comm hook."""
        device = bucket.buffer().device
        done: Future = torch.futures.Future(devices=None if device.type == "cpu" else [device])
        self._passing.put((time.monotonic(), bucket, done))
        return done

    def _run(self) -> None:
        while (taken := self._passing.get()) is not None:
            launched, bucket, done = taken
            buffer = bucket.buffer()
            rate = self._fault.mb_per_second
            held = buffer._nnz() if buffer.is_sparse else buffer.numel()
            passing = 0.0 if rate is None else held * buffer.element_size() / (rate * 1e6)
            self._free_at = max(self._free_at, launched) + passing
            interruptible_sleep.nap_until(self._free_at + self._fault.latency_seconds)
            try:
                self._start(bucket).add_done_callback(lambda inner, done=done: _hand_on(inner, done))
            except Exception as error:  # noqa: BLE001 - the thread that waits for the bucket raises it
                done.set_exception(error)
            del taken, bucket, buffer, done


def _hand_on(inner: Future, done: Future) -> None:
    try:
        value = inner.value()
    except Exception as error:  # noqa: BLE001 - the thread that waits for the bucket raises it
        done.set_exception(error)
    else:
        done.set_result(value[0] if isinstance(value, list) else value)


def _starter(sync: GradientSynchronizer, hook: Any, state: object) -> Any:
    """What the model would start for a bucket."""
    if hook is None:
        reducer = sync.reducer

        def average(bucket: GradBucket) -> Future:
            bucket.buffer().div_(sync.divisor)
            return reducer._run_allreduce_hook(bucket)  # type: ignore[no-any-return]

        return average
    if isinstance(hook, BuiltinCommHookType):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        plain = hook == BuiltinCommHookType.ALLREDUCE
        hook = default_hooks.allreduce_hook if plain else default_hooks.fp16_compress_hook
        state = sync.group
    return lambda bucket: hook(state, bucket)
