"""Runs a comm hook on one rank's buckets, with a deadline, and records what it does.

[Note: a hook that never ends]
A hook can wait forever in three places: in its own call, in the future that it returned, and in a collective that
another rank never enters. None can be interrupted from outside, so it runs on a thread of its own, which is abandoned
at the deadline; the message shows its position. The process group of such a hook has collectives that never finish:
nothing else is tried with it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import native
from .cases import Case

__all__ = ["Stuck", "Traffic", "Trial", "run_with_deadline", "traffic", "words_of"]

_C = native.load()

Collective = tuple[str, int, list[int], int, int]  # operator, ranks, bytes of its arguments, begin and end in ns


class Stuck(RuntimeError):
    """It did not end before the deadline; the text shows its position."""


class Broken(Exception):
    """The hook broke the contract.

    Args:
        kind: of the problem.
        what: description of what it did.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def run_with_deadline(function: Callable[[], Any], seconds: float, progress: Callable[[], object] = lambda: 0) -> Any:
    """The result of `function`, run on a thread of its own.

    Args:
        function: is abandoned if it does not end.
        seconds: time limit, which restarts whenever the value of `progress()` changes.
        progress: returns a measure of its progress.

    Raises:
        Stuck: it did not end before the deadline.
    """
    outcome: list[Any] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            outcome.append((function(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="ddp_lab hook check")
    thread.start()
    seen = progress()
    while True:
        thread.join(seconds)
        if not thread.is_alive():
            break
        if progress() == seen:
            raise Stuck(f"it did not return within {seconds:g} s; it was at {_place_of(thread)}")
        seen = progress()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _place_of(thread: threading.Thread) -> str:
    """The line that a thread is at: the innermost that is neither torch's nor ours."""
    stack = traceback.extract_stack(sys._current_frames().get(thread.ident or 0))
    known = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)), threading.__file__)
    own = [line for line in stack if not line.filename.startswith(known)]
    line = (own or stack)[-1]
    return f"{line.filename}:{line.lineno}, in {line.name}: {line.line}"


@dataclass
class _Launched:
    bucket: Any
    future: Any
    begin: int
    returned: int
    done: threading.Event
    done_ns: int = 0


@dataclass
class Trial:
    """One rank runs the hook on the buckets of one case.

    Attributes:
        hook, state: the hook and its state, which is modified.
        case, rank, device: contents and place of the buckets.
        seconds: time limit of one round of buckets.
        values: the hook's results of each bucket by round: flat, on the CPU.
        spans: (encode, communicate, decode, copy) in ns, of each bucket and round.
        collectives: those that the rank entered meanwhile, as in `take_collectives`.
        broken: (kind, what) if the hook broke its contract.
        converted: the dtype of its results, if it is not that of the gradients.
    """

    hook: Callable[..., Any]
    state: object
    case: Case
    rank: int
    device: torch.device
    seconds: float
    values: list[list[torch.Tensor]] = field(default_factory=list)
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    broken: tuple[str, str] | None = None
    converted: str | None = None

    def run(self) -> None:
        """All rounds of the case."""
        _C.open_collective_log()
        try:
            run_with_deadline(self._rounds, 2 * self.seconds, lambda: len(self.values))
        except Stuck as error:
            self.broken = ("never ends", str(error))
        except Broken as error:
            self.broken = (error.kind, str(error))
        finally:
            _C.close_collective_log()

    def _rounds(self) -> None:
        for _ in range(self.case.rounds):
            self._round()

    def _round(self) -> None:
        count = self.case.buckets
        buckets = [_C.make_bucket(i, count, self.case.gradients(self.rank, i, self.device)) for i in range(count)]
        targets = [torch.empty_like(bucket.buffer()) for bucket in buckets]
        launched = [self._launch(bucket) for bucket in buckets]
        end = time.monotonic() + self.seconds
        for one in launched:
            if not one.done.wait(max(0.0, end - time.monotonic())):
                which = f"the future of bucket {one.bucket.index()}"
                raise Broken("never completes", f"{which} did not complete within {self.seconds:g} s")
        collectives = _C.take_collectives()
        self.collectives += collectives
        values = []
        for one, target in zip(launched, targets, strict=True):
            value = self._value(one, target)
            _synchronize(self.device)
            begin = _C.now_ns()
            target.view(-1).copy_(value.reshape(-1))
            _synchronize(self.device)
            copied = _C.now_ns() - begin
            communicated = _communicated(one, collectives)
            complete = max(one.returned, one.done_ns)
            self.spans.append((one.returned - one.begin, communicated - one.returned, complete - communicated, copied))
            values.append(target.to("cpu", copy=True))
        self.values.append(values)

    def _launch(self, bucket: Any) -> _Launched:
        begin = _C.now_ns()
        try:
            future = self.hook(self.state, bucket)
        except Exception as error:
            raise Broken("raises", f"bucket {bucket.index()}: {words_of(error)}") from error
        made = _Launched(bucket, future, begin, _C.now_ns(), threading.Event())
        if not isinstance(future, torch._C.Future):
            raise Broken("no future", f"it returned {type(future).__module__}.{type(future).__qualname__}")

        def complete(_: Any) -> None:
            made.done_ns = _C.now_ns()
            made.done.set()

        future.add_done_callback(complete)
        return made

    def _value(self, one: _Launched, target: torch.Tensor) -> torch.Tensor:
        """The tensor in a complete future, if the reducer can use it."""
        where = f"bucket {one.bucket.index()}"
        try:
            value = one.future.wait()
        except Exception as error:
            raise Broken("fails later", f"{where}: its future contains an error: {words_of(error)}") from error
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise Broken("no tensor", f"{where}: its future contains {type(value).__qualname__}")
        if value.numel() != target.numel():
            raise Broken("wrong size", f"{where}: {list(value.shape)} for a buffer of {target.numel()} elements")
        if value.device != target.device:
            raise Broken("wrong device", f"{where}: on {value.device}, gradients are on {target.device}")
        if value.dtype != target.dtype:
            self.converted = str(value.dtype).removeprefix("torch.")
        return value


def _communicated(one: _Launched, collectives: list[Collective]) -> int:
    """When the last collective of a bucket was complete; with several in flight, the last that can be its."""
    complete = max(one.returned, one.done_ns)
    ends = [end for *_, begin, end in collectives if begin >= one.begin and 0 < end <= complete]
    return max([*ends, one.returned]) if ends else complete


def words_of(error: BaseException) -> str:
    """Its first line, or the line of code that raised it."""
    text = str(error).strip().splitlines()
    named = [line for line in text if line and not line.startswith((" ", "At:", "Exception raised", "frame #"))]
    if named:
        return f"{type(error).__name__}: {named[0]}"
    lines = traceback.extract_tb(error.__traceback__)[-1:]
    return type(error).__name__ + "".join(f" at {line.filename}:{line.lineno}: {line.line}" for line in lines)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- what a rank gives to collectives, from a log of them: see [Note: counting what a hook sends]


@dataclass(frozen=True)
class Traffic:
    """A rank's collectives: payload bytes, bytes that it sends for them, and how many of each operator."""

    payload: int
    wire: float
    operators: dict[str, int]


# Which of an operator's tensor arguments is what the rank contributes, and how many times its bytes a rank sends with
# a bandwidth-optimal algorithm on n ranks.
_SENDS: dict[str, tuple[int, Callable[[int], float]]] = {
    "allreduce_": (0, lambda n: 2 * (n - 1) / n),
    "allreduce_coalesced_": (0, lambda n: 2 * (n - 1) / n),
    "allgather_": (1, lambda n: n - 1),
    "_allgather_base_": (1, lambda n: n - 1),
    "allgather_coalesced_": (1, lambda n: n - 1),
    "allgather_into_tensor_coalesced_": (1, lambda n: n - 1),
    "reduce_scatter_": (1, lambda n: (n - 1) / n),
    "_reduce_scatter_base_": (1, lambda n: (n - 1) / n),
    "reduce_scatter_tensor_coalesced_": (1, lambda n: (n - 1) / n),
    "alltoall_": (1, lambda n: (n - 1) / n),
    "alltoall_base_": (1, lambda n: (n - 1) / n),
    "broadcast_": (0, lambda n: (n - 1) / n),
    "reduce_": (0, lambda n: (n - 1) / n),
    "gather_": (1, lambda n: (n - 1) / n),
    "scatter_": (1, lambda n: (n - 1) / n),
    "send": (0, lambda n: 1.0),
}


def traffic(collectives: list[Collective]) -> Traffic:
    """Sums up the result of `take_collectives`; see [Note: counting what a hook sends]."""
    payload, wire = 0, 0.0
    operators: dict[str, int] = {}
    for name, ranks, sizes, _, _ in collectives:
        operators[name.strip("_")] = operators.get(name.strip("_"), 0) + 1
        if name in _SENDS:
            which, factor = _SENDS[name]
            contributed = sizes[which] if which < len(sizes) else 0
            payload += contributed
            wire += contributed * factor(max(1, ranks))
    return Traffic(payload, wire, operators)
