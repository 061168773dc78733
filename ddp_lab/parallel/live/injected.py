"""The injected faults of one model on this rank: begun and ended in its forwards, on the training thread.

[Note: an injected fault]
Faults are real: a slow rank sleeps in its forward, a slow layer sleeps where autograd delivers its gradient, a dropped
gradient is not reported to the reducer, a lost rank has killed its process. The consequences are those of a real fault,
including errors. Each is marked on the timeline when it begins and when it ends. Sleeps end when the rank is
interrupted or unblocked (`wake_all`), faults do not.

[Note: a slow link]
The delay is between the bucket's launch and its collective, and the backward must continue meanwhile, as it does while
a real network is busy. So our comm hook runs before the model's own (or before the plain average): it passes the bucket
to a thread and returns a future. The thread delays buckets one after the other, each for its bytes divided by the rate
plus the latency, and then starts the model's own collective, in the same order. Other ranks need not know: the
collectives are the same, only later.

Collectives that are not the reducer's are not delayed (SyncBatchNorm, buffers). A module that communicates in its
backward on the same group would order its collectives differently: use it only with models that do not.
"""

from __future__ import annotations

import difflib
import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket

from ... import faults, recording
from ..core import comm_hooks
from ..core.synchronizer import GradientSynchronizer

__all__ = ["Faults", "before_death", "index_of", "wake_all"]

before_death: list[Callable[[], object]] = []
"""Called before a rank kills itself, to send the last events."""

Future = torch.futures.Future[Any]

_numbers = itertools.count(1)
_changed = threading.Condition()
_wakes = 0


class Faults:
    """Requested faults, and those that have begun. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[int, faults.Fault] = {}
        self._begun: dict[int, tuple[faults.Fault, Callable[[GradientSynchronizer], None]]] = {}
        self._ending: set[int] = set()
        self._link: _Link | None = None

    @property
    def empty(self) -> bool:
        """Whether no fault is active or pending."""
        with self._lock:
            return not (self._asked or self._begun)

    def ask(self, sync: GradientSynchronizer, fault: faults.Fault) -> int:
        """Makes the fault begin in the next forward; returns its number.

        Raises:
            ValueError: the model has no such parameter, or a slow link already.
        """
        fault.check()
        parameter = getattr(fault, "parameter", None)
        if parameter is not None:
            index_of(sync, parameter)
        if isinstance(fault, faults.SlowLink) and sync.options.mixed_precision is not None:
            raise ValueError("mixed_precision reduces gradients itself: a slow link can't be injected")
        with self._lock:
            held = [*self._asked.values(), *(one for one, _ in self._begun.values())]
            if isinstance(fault, faults.SlowLink) and any(isinstance(one, faults.SlowLink) for one in held):
                raise ValueError("the model already has a slow link on this rank: end that one first")
            number = next(_numbers)
            self._asked[number] = fault
        return number

    def end(self, number: int | None = None) -> None:
        """Makes one fault, or all, end before the next forward."""
        with self._lock:
            chosen = {*self._asked, *self._begun} if number is None else {number}
            self._ending |= chosen & self._begun.keys()
            for one in chosen & self._asked.keys():
                del self._asked[one]

    def listed(self) -> list[dict[str, Any]]:
        """Each fault, JSON-able, with its ``number`` and ``begun``."""
        with self._lock:
            waiting = [(number, fault, False) for number, fault in self._asked.items()]
            begun = [(n, fault, True) for n, (fault, _) in self._begun.items() if n not in self._ending]
        return [
            {**faults.to_dict(f), "number": n, "begun": on} for n, f, on in sorted(waiting + begun, key=lambda x: x[0])
        ]

    def before_forward(self, sync: GradientSynchronizer, synchronised: bool) -> None:
        """Ends and begins faults as requested."""
        with self._lock:
            ending = [self._begun.pop(number) for number in sorted(self._ending)]
            self._ending.clear()
            once = () if synchronised else (faults.DroppedGradient,)  # wait for a synchronised backward
            asked = {number: fault for number, fault in self._asked.items() if not isinstance(fault, once)}
            for number in asked:
                del self._asked[number]
        for fault, end in ending:
            end(sync)
            recording.mark(f"end of {fault.text()}")
        for number, fault in asked.items():
            recording.mark(fault.text())
            undo = self._begin(sync, fault)
            if undo is not None:
                with self._lock:
                    self._begun[number] = (fault, undo)
        if self._link is not None:
            self._link.follow(sync)

    def _begin(self, sync: GradientSynchronizer, fault: faults.Fault) -> Callable[[GradientSynchronizer], None] | None:
        """Begins a fault; returns a function that ends it, None for one that is over at once."""
        if isinstance(fault, faults.SlowRank):
            seconds = fault.seconds
            handle = sync.module.register_forward_pre_hook(lambda module, inputs: _sleep(seconds))
            return lambda sync: handle.remove()
        if isinstance(fault, faults.SlowLayer):
            seconds = fault.seconds
            parameter = sync.trained.tensors[index_of(sync, fault.parameter)]
            hook = parameter.register_hook(lambda gradient: _sleep(seconds))
            return lambda sync: hook.remove()
        if isinstance(fault, faults.SlowLink):
            self._link = _Link(sync, fault)
            return self._end_link
        if isinstance(fault, faults.DroppedGradient):
            sync.reducer.drop_next(index_of(sync, fault.parameter))
            return None
        for call in before_death:
            call()
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    def _end_link(self, sync: GradientSynchronizer) -> None:
        if self._link is not None:
            self._link.end(sync)
            self._link = None


def index_of(sync: GradientSynchronizer, name: str) -> int:
    """The index of a trained parameter; `ValueError` with the closest name if there is none."""
    names = sync.trained.names
    if name in names:
        return names.index(name)
    close = difflib.get_close_matches(name, names, 1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    raise ValueError(f"the model has no trained parameter '{name}'{hint}")


# -- injected sleeps


def _nap_until(moment: float) -> None:
    """Sleeps without the GIL until a moment of the monotonic clock, or until it is woken."""
    with _changed:
        before = _wakes
        _changed.wait_for(lambda: _wakes != before, max(0.0, moment - time.monotonic()))


def wake_all() -> None:
    """Ends every injected sleep of this process, for a rank that must stop. Any thread."""
    global _wakes
    with _changed:
        _wakes += 1
        _changed.notify_all()


def _sleep(seconds: float) -> None:
    _nap_until(time.monotonic() + seconds)


# -- a slow link


class _Link:
    """The slow link of one model on this rank; created and ended on the training thread, between two backwards."""

    def __init__(self, sync: GradientSynchronizer, fault: faults.SlowLink) -> None:
        self._fault = fault
        self._passing: queue.SimpleQueue[tuple[Any, Any, Future] | None] = queue.SimpleQueue()
        self._free_at = 0.0
        self._before: Any = None
        self.follow(sync)
        self._thread = threading.Thread(target=self._run, name="ddp_lab-slow-link", daemon=True)
        self._thread.start()

    def follow(self, sync: GradientSynchronizer) -> None:
        """Installs itself before the model's current reducer and hook, if these are new."""
        hook = sync.hooks[-1] if sync.hooks else (None, None)
        before = (sync.reducer, sync.hook_changes)
        if before == self._before:
            return
        self._before = before
        self._start = _starter(sync, *hook)
        sync.reducer.clear_comm_hook()
        comm_hooks.attach(sync.reducer, self._delayed, None)

    def end(self, sync: GradientSynchronizer) -> None:
        """Restores the model's own hook."""
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
            _nap_until(self._free_at + self._fault.latency_seconds)
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
    """The collective that the model would start for a bucket."""
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
