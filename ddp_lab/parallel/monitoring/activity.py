"""Times of what the main thread does between models: data loading and optimizers, and its sampled stack for the rest.

[Note: how little is patched]
Optimizers have torch's own global hooks. Data loaders have none, so the two methods that make the program wait for
data are wrapped. All else (clipping, logging, the program's own lines) is named by looking at the main thread's stack
(`Sampler`), as long as a model lives, unless ``DDP_LAB_SAMPLE=0``. The rest is installed with the first model of a
process, and costs one branch while recording is off.

[Note: the name of a moment]
From the innermost frame outward: torch's own frames may say what is being done (`_OF_TORCH`); the first frame that is
neither torch's, Python's nor ours is the place. Names of functions of the program and its libraries may say more
(`_OF_FUNCTIONS`); an evaluation contains all other parts, so it counts wherever it is in the stack. Without a frame of
the program the process is idle, and nothing is recorded. A look wants the GIL: while C code holds it for less than
``sys.getswitchinterval()`` (5 ms), the place is the next one at which the main thread lets it go.

[Note: the cost of a look]
Some 10 µs of the interpreter, at random intervals, so that no step is always hit at the same point: 3 ms on average at
first, so that a short training is named too, soon 40 ms, and up to 100 ms while no model runs. An event holds the time
since the last look in ``bytes`` (ns), its weight.
"""

from __future__ import annotations

import functools
import linecache
import os
import random
import re
import socket
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ... import native, recording
from ...analysis.step_parts import STARTS
from ...formatting import line_name
from ...machine import cores
from ...protocol.events import Kind
from . import accumulation

__all__ = ["Sampler", "install"]

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


_FIRST_SECONDS, _SECONDS, _SLOWER = 0.003, 0.04, 1.01
_IDLE_SECONDS, _IDLER = 0.1, 1.25
_END_SECONDS = 1.0  # it ends within a look, unless what collects the last model holds a lock that it needs
_LONGEST_NS = 1_000_000_000
_DEEPEST = 60  # frames
_MOST_CODES = 8_192
_LATER = 300  # samples
_MOST_HELD = 4_096
_SAMPLE = int(Kind.SAMPLE)

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_PYTHON = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep, "<frozen ")
_LIBRARIES = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)
_HOSTS = ("IPython", "ipykernel", "traitlets", "tornado", "zmq")  # they run the program's cells

_OF_TORCH: Final = (
    ("nn/utils/clip_grad", "clipping"),
    ("optim/", "optimizer"),
    ("amp/", "optimizer"),
    ("autograd/__init__.py", "backward"),
    ("autograd/graph.py", "backward"),
    ("_tensor.py", "backward"),
    ("utils/data/", "data"),
    ("distributed/checkpoint", "checkpoint"),
    ("distributed/", "collectives"),
    ("serialization", "checkpoint"),
    ("utils/tensorboard", "logging"),
    ("nn/", "modules"),
)
_BACKWARD_OF_TENSOR = ("backward",)  # what `_tensor.py` has besides is no backward
_OF_FUNCTIONS: Final = (
    (re.compile(r"_?(evaluate|evaluation|validate|validation)(_\w+)?|run_eval\w*|eval_\w+"), "evaluation"),
    (re.compile(r"clip_grad\w*|_?clip_gradients"), "clipping"),
    (re.compile(r"_?save_(checkpoint|model|state)\w*|save_pretrained"), "checkpoint"),
    (re.compile(r"send_to_device|(batch|data)_to_device|(move|transfer)_\w*_to_device|_prepare_inputs?"), "copies"),
    (re.compile(r"(_?maybe_)?log(_(metrics|dict|scalars?|stats|step|loss|values?))?|write_scalar"), "logging"),
)
_LOGGERS = ("logging", "tqdm", "wandb", "mlflow", "tensorboard", "tensorboardX", "rich")


class _Code(NamedTuple):
    """What a function says about a moment in it."""

    owner: str  # "torch", "python", "ours", "host", "library" or "program"
    part: str | None
    short: str  # its file, for people


class Sampler:
    """A daemon thread that records samples while models run; it ends with the last model.

    Args:
        later: called once on that thread, when it has taken some hundred samples.
    """

    def __init__(self, later: Callable[[], None]) -> None:
        self._later: Callable[[], None] | None = later
        self._codes: dict[types.CodeType, _Code] = {}
        self._places: dict[tuple[str, int | None, str], int] = {}  # file, line, part
        self._counting = threading.RLock()  # a model may be collected while it is held
        self._models = 0
        self._thread: threading.Thread | None = None
        self._end = threading.Event()  # of that thread
        self._main = 0
        self._own = 0  # samples recorded
        # Place, weight and time of those that are not.
        self._held: deque[tuple[int, int, int]] = deque(maxlen=_MOST_HELD)

    def run_for(self, model: object) -> None:
        """Samples as long as this model lives, or another one for which it was called."""
        weakref.finalize(model, self._forget).atexit = False
        with self._counting:
            self._models += 1
            started = self._thread is not None and (self._thread.ident is None or self._thread.is_alive())
            if started:  # a fork leaves it behind
                return
            self._end, self._main = threading.Event(), threading.main_thread().ident or 0
            self._thread = threading.Thread(target=self._run, args=(self._end,), name="ddp_lab-sampler", daemon=True)
            thread = self._thread
        thread.start()

    def _forget(self) -> None:
        """A model was collected, on whatever thread."""
        with self._counting:
            self._models -= 1
            if self._models:
                return
            thread, self._thread = self._thread, None
            self._end.set()
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(_END_SECONDS)

    def _run(self, end: threading.Event) -> None:
        seen, idle, last = -1, 1.0, _C.now_ns()
        while True:
            interval = min(_SECONDS, _FIRST_SECONDS * _SLOWER ** min(self._own, _LATER))
            if end.wait(min(_IDLE_SECONDS, interval * idle) * random.uniform(0.5, 1.5)):
                return
            recorded, _, _, on = _C.recorder_statistics()
            now = _C.now_ns()
            if on:
                self._look(now, min(now - last, _LONGEST_NS))
            last = now
            idle = min(idle * _IDLER, _IDLE_SECONDS / _FIRST_SECONDS) if recorded - self._own == seen else 1.0
            if recorded - self._own != seen:
                self._record()
            seen = recorded - self._own

    def _look(self, now_ns: int, weight_ns: int) -> None:
        place = self.place_of(sys._current_frames().get(self._main))
        if place is not None:
            self._held.append((place, weight_ns, now_ns))

    def _record(self) -> None:
        """Records what was seen until the newest event of a model; what follows the last step is no part of one."""
        for place, weight_ns, at_ns in self._held:
            _C.record(_SAMPLE, parameter=place, bytes=weight_ns, host_ns=at_ns)
        self._own += len(self._held)
        self._held.clear()
        if self._later is not None and self._own >= _LATER:
            later, self._later = self._later, None
            later()

    def place_of(self, frame: types.FrameType | None) -> int | None:
        """The index of the place of a stack, see [Note: the name of a moment]; None if no program runs."""
        part: str | None = None
        where: tuple[types.CodeType, int | None] | None = None
        runs = evaluates = False
        for _ in range(_DEEPEST):
            if frame is None:
                break
            about = self._codes.get(frame.f_code) or self._learn(frame.f_code)
            if about.owner in ("library", "program"):
                if where is None or (about.part == "evaluation" and not evaluates):  # what it calls says less
                    where = (frame.f_code, frame.f_lineno)
                evaluates = evaluates or about.part == "evaluation"
                part = part or about.part
                runs = runs or about.owner == "program"
            elif where is None:
                part = part or about.part
            frame = frame.f_back
        if where is None or not runs:
            return None
        (code, line), part = where, "evaluation" if evaluates else part or "code"
        key = (code.co_filename, line, part)
        if key not in self._places:
            self._places[key] = self._describe(code, line, part)
        return self._places[key]

    def _describe(self, code: types.CodeType, line: int | None, part: str) -> int:
        known = self._codes.get(code) or self._learn(code)
        name = line_name(known.short, line)
        if known.owner == "library":
            return recording.place(part, f"{getattr(code, 'co_qualname', code.co_name)} ({name})")
        lines = linecache.getlines(code.co_filename)
        text = lines[line - 1].strip()[:120] if line is not None and 1 <= line <= len(lines) else ""
        return recording.place(part, name, text=text)

    def _learn(self, code: types.CodeType) -> _Code:
        if len(self._codes) >= _MOST_CODES:  # each run of a cell has its own
            self._codes.clear()
        made = self._codes[code] = _about(code)
        return made


def _about(code: types.CodeType) -> _Code:
    file, function = code.co_filename, code.co_name
    if file.startswith(_TORCH):
        inner = file[len(_TORCH) :]
        part = next((part for begin, part in _OF_TORCH if inner.startswith(begin)), None)
        if inner == "_tensor.py" and function not in _BACKWARD_OF_TENSOR:
            part = None
        return _Code("torch", part, inner)
    if file.startswith(_OURS):
        return _Code("ours", None, file[len(_OURS) :])
    by_name = next((part for pattern, part in _OF_FUNCTIONS if pattern.fullmatch(function)), None)
    root = next((root for root in _LIBRARIES if file.startswith(root)), None)
    if root is not None:
        inner = file[len(root) :]
        package = inner.split(os.sep)[0]
        if package in _HOSTS:
            return _Code("host", None, inner)
        return _Code("library", by_name or ("logging" if package in _LOGGERS else None), inner)
    if file.startswith(_PYTHON) or file == "<string>":
        return _Code("python", "logging" if f"{os.sep}logging{os.sep}" in file else None, os.path.basename(file))
    return _Code("program", by_name, os.path.basename(file))
