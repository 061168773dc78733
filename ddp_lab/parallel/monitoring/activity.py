"""Times of what the main thread does between models: data loading and optimizers, and its sampled stack for the rest.

[Note: how little is patched]
Optimizers have torch's own global hooks. Data loaders have none, so the two methods that make the program wait for
data are wrapped. All else (clipping, logging, the program's own lines) is named by looking at the main thread's stack
(`stacks`), as long as a model lives, unless ``DDP_LAB_SAMPLE=0``. The rest is installed with the first model of a
process, and costs one branch while recording is off.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ... import native, recording
from ...analysis.step_parts import STARTS
from ...machine import cores
from . import accumulation
from .stacks import Sampler

__all__ = ["install"]

_C = native.load()
_PLACE = "_ddp_lab_place"  # attribute of a loader: the index of its place
_installing = threading.Lock()
_installed = False
_sampler: Sampler | None = None
_begun: dict[int, int] = {}  # optimizer -> when its step began
_places: dict[type, int] = {}  # of optimizers, by class


def install(model: object) -> None:
    """Times data loaders and optimizers from now on in this process; samples its main thread while `model` lives."""
    global _installed, _sampler
    with _installing:
        first, _installed = not _installed, True
        if first and os.environ.get("DDP_LAB_SAMPLE", "1") != "0":
            _sampler = Sampler(later=describe_process)
    if first:
        _install()
    if _sampler is not None:
        _sampler.run_for(model)


def _install() -> None:
    describe_process()
    _BaseDataLoaderIter.__next__ = _timed(_BaseDataLoaderIter.__next__)  # type: ignore[method-assign,assignment]
    DataLoader.__iter__ = _timed(DataLoader.__iter__)  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def describe_process() -> None:
    """Describes what this process shares with the other ranks of its host: cores, and GPUs."""
    made: dict[str, Any] = {"type": "process", "host": socket.gethostname()}
    made |= {"cores": cores(), "threads": torch.get_num_threads()}
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        made["contexts"] = [one for one in devices if torch._C._cuda_hasPrimaryContext(one)]  # type: ignore[attr-defined]
    recording.describe(made)


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _timed(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same method of a data loader or its iterator; its times are recorded."""

    @functools.wraps(method)
    def timed(loader: Any) -> Any:
        if not recording.enabled() or not _on_main_thread():
            return method(loader)
        begin = _C.now_ns()
        try:
            return method(loader)
        finally:
            _C.record_activity(_place_of_loader(loader), begin)

    return timed


def _place_of_loader(loader: Any) -> int:
    found: int | None = vars(loader).get(_PLACE)
    if found is None:
        of = loader if isinstance(loader, DataLoader) else None
        workers = of.num_workers if of is not None else loader._num_workers
        pins = bool(of.pin_memory if of is not None else loader._pin_memory)
        dataset = type(of.dataset if of is not None else loader._dataset).__name__
        name = dataset if of is None else f"{dataset}{STARTS}"
        found = recording.place("data", name, workers=int(workers), pin_memory=pins)
        vars(loader)[_PLACE] = found
    return found


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling() or not recording.enabled() or not _on_main_thread():
        return
    _begun[id(optimizer)] = _C.now_ns()


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():
        return
    begin = _begun.pop(id(optimizer), None)
    if begin is None:
        return
    kind = type(optimizer)
    if kind not in _places:
        _places[kind] = recording.place("optimizer", kind.__name__)
    _C.record_activity(_places[kind], begin)
    accumulation.after_step(optimizer)
