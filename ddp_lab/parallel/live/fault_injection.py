"""The faults of one model on this rank: begun and ended in its forwards, on the thread that trains.

[Note: a rehearsal]
Faults are real: a slow rank sleeps in its forward, a slow layer sleeps where autograd brings its gradient, a dropped
gradient is one that the reducer does not hear of, a dead rank has killed its process. What follows is what would follow
from such a fault in earnest, errors included. Each is marked on the timeline when it begins and when it ends. Sleeps
end when the rank is interrupted or freed (`ddp_lab/parallel/live/interruptible_sleep.py`), faults do not.
"""

from __future__ import annotations

import difflib
import itertools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from ... import faults, recording
from ..core.synchronizer import GradientSynchronizer
from . import interruptible_sleep
from .slow_link import Link

__all__ = ["Faults", "before_death", "index_of"]

before_death: list[Callable[[], object]] = []
"""Called before a rank kills itself: the last events leave."""

_numbers = itertools.count(1)


class Faults:
    """Faults that are asked for, and those that have begun. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[int, faults.Fault] = {}
        self._begun: dict[int, tuple[faults.Fault, Callable[[GradientSynchronizer], None]]] = {}
        self._ending: set[int] = set()
        self._link: Link | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing happens or is about to."""
        with self._lock:
            return not (self._asked or self._begun)

    def ask(self, sync: GradientSynchronizer, fault: faults.Fault) -> int:
        """Has the fault begin in the next forward; returns its number.

        Raises:
            ValueError: the model has no such parameter, or a slow link already.
        """
        fault.check()
        parameter = getattr(fault, "parameter", None)
        if parameter is not None:
            index_of(sync, parameter)
        if isinstance(fault, faults.SlowLink) and sync.options.mixed_precision is not None:
            raise ValueError("mixed_precision has its own way to reduce gradients: no slow link can stand before it")
        with self._lock:
            held = [*self._asked.values(), *(one for one, _ in self._begun.values())]
            if isinstance(fault, faults.SlowLink) and any(isinstance(one, faults.SlowLink) for one in held):
                raise ValueError("the model has a slow link on this rank already: end that one first")
            number = next(_numbers)
            self._asked[number] = fault
        return number

    def end(self, number: int | None = None) -> None:
        """Has one fault, or all, end before the next forward."""
        with self._lock:
            chosen = {*self._asked, *self._begun} if number is None else {number}
            self._ending |= chosen & self._begun.keys()
            for one in chosen & self._asked.keys():
                del self._asked[one]

    def listed(self) -> list[dict[str, Any]]:
        """Each fault as JSON can hold it, with its ``number`` and ``begun``."""
        with self._lock:
            waiting = [(number, fault, False) for number, fault in self._asked.items()]
            begun = [(n, fault, True) for n, (fault, _) in self._begun.items() if n not in self._ending]
        return [
            {**faults.to_dict(f), "number": n, "begun": on} for n, f, on in sorted(waiting + begun, key=lambda x: x[0])
        ]

    def before_forward(self, sync: GradientSynchronizer, synchronised: bool) -> None:
        """Ends and begins what was asked for."""
        with self._lock:
            ending = [self._begun.pop(number) for number in sorted(self._ending)]
            self._ending.clear()
            once = () if synchronised else (faults.DroppedGradient,)  # wait for a backward that is synchronised
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
        """Makes it happen; returns what ends it, None for what is over at once."""
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
            self._link = Link(sync, fault)
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


def _sleep(seconds: float) -> None:
    interruptible_sleep.nap(seconds)


def index_of(sync: GradientSynchronizer, name: str) -> int:
    """The index of a trained parameter; `ValueError` with the closest name if there is none."""
    names = sync.trained.names
    if name in names:
        return names.index(name)
    close = difflib.get_close_matches(name, names, 1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    raise ValueError(f"the model trains no parameter '{name}'{hint}")
