"""Runs a comm hook on one rank's buckets, with a deadline, and takes down what it does.

[Note: a hook that never ends]
A hook can wait for ever in three places: in its own call, in the future that it returned, and in a collective that
another rank never enters. None can be interrupted from outside, so it runs on a thread of its own, which is left behind
when it does not end in time; what it was doing then is in the message. The process group of such a hook has collectives
that no one will finish: nothing else is tried with it.
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
from .traffic import Collective

__all__ = [
    "Stuck",
    "Trial",
    "run_with_deadline",
    "try_case",
    "words_of",
]

_C = native.load()


class Stuck(RuntimeError):
    """It did not end in time; the text says what it was doing."""


class Broken(Exception):
    """The hook broke the contract.

    Args:
        kind: of the problem.
        what: what it did.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


@dataclass
class Trial:
    """What one rank saw of one case.

    Attributes:
        values: the hook's results of each bucket by round: flat, on the CPU.
        spans: (encode, communicate, decode, copy) in ns, of each bucket and round.
        collectives: what the rank entered meanwhile, as `take_collectives` has it.
        broken: (kind, what) if the hook did not do what it must.
        converted: the dtype of its results, if it is not that of the gradients.
    """

    values: list[list[torch.Tensor]] = field(default_factory=list)
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    broken: tuple[str, str] | None = None
    converted: str | None = None


def run_with_deadline(function: Callable[[], Any], seconds: float, progress: Callable[[], object] = lambda: 0) -> Any:
    """What `function` returns, run on a thread of its own.

    Args:
        function: is left behind if it does not end.
        seconds: how long it may take, anew whenever `progress()` returns something else.
        progress: how far it is.

    Raises:
        Stuck: it did not end in time.
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
            raise Stuck(f"it had not ended after {seconds:g} s; it was at {_place_of(thread)}")
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


def try_case(
    hook: Callable[..., Any], state: object, case: Case, rank: int, device: torch.device, seconds: float
) -> Trial:
    """Runs the hook on all buckets of a case; `state` is used up."""
    trial = Trial()
    _C.open_collective_log()
    try:
        run_with_deadline(
            lambda: _rounds(hook, state, case, rank, device, seconds, trial), 2 * seconds, lambda: len(trial.values)
        )
    except Stuck as error:
        trial.broken = ("never ends", str(error))
    except Broken as error:
        trial.broken = (error.kind, str(error))
    finally:
        _C.close_collective_log()
    return trial


@dataclass
class _Launched:
    bucket: Any
    future: Any
    begin: int
    returned: int
    done: threading.Event
    done_ns: int = 0


def _rounds(
    hook: Callable[..., Any], state: object, case: Case, rank: int, device: torch.device, seconds: float, trial: Trial
) -> None:
    for _ in range(case.rounds):
        _round(hook, state, case, rank, device, seconds, trial)


def _round(
    hook: Callable[..., Any], state: object, case: Case, rank: int, device: torch.device, seconds: float, trial: Trial
) -> None:
    buckets = [
        _C.make_bucket(index, case.buckets, case.gradients(rank, index, device)) for index in range(case.buckets)
    ]
    targets = [torch.empty_like(bucket.buffer()) for bucket in buckets]
    launched = [_launch(hook, state, bucket) for bucket in buckets]
    end = time.monotonic() + seconds
    for one in launched:
        if not one.done.wait(max(0.0, end - time.monotonic())):
            which = one.bucket.index()
            raise Broken("never completes", f"the future of bucket {which} was not complete after {seconds:g} s")
    collectives = _C.take_collectives()
    trial.collectives += collectives
    values = []
    for one, target in zip(launched, targets, strict=True):
        value = _value(one, target, trial)
        _synchronize(device)
        begin = _C.now_ns()
        target.view(-1).copy_(value.reshape(-1))
        _synchronize(device)
        copied = _C.now_ns() - begin
        communicated = _communicated(one, collectives)
        complete = max(one.returned, one.done_ns)
        trial.spans.append((one.returned - one.begin, communicated - one.returned, complete - communicated, copied))
        values.append(target.to("cpu", copy=True))
    trial.values.append(values)


def _launch(hook: Callable[..., Any], state: object, bucket: Any) -> _Launched:
    begin = _C.now_ns()
    try:
        future = hook(state, bucket)
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


def _value(one: _Launched, target: torch.Tensor, trial: Trial) -> torch.Tensor:
    """The tensor in a complete future, if it is what the reducer can take."""
    where = f"bucket {one.bucket.index()}"
    try:
        value = one.future.wait()
    except Exception as error:
        raise Broken("fails later", f"{where}: its future holds an error: {words_of(error)}") from error
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise Broken("no tensor", f"{where}: its future holds {type(value).__qualname__}")
    if value.numel() != target.numel():
        raise Broken("wrong size", f"{where}: {list(value.shape)} for a buffer of {target.numel()} elements")
    if value.device != target.device:
        raise Broken("wrong device", f"{where}: on {value.device}, gradients are on {target.device}")
    if value.dtype != target.dtype:
        trial.converted = str(value.dtype).removeprefix("torch.")
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
