"""`ddp_lab.measure_memory`: the most bytes of tensors that this rank holds in a training step, and when.

[Note: what is measured]
Bytes of tensors, not of the process: what torch's allocator has handed out. On a GPU torch counts them. On a CPU it
does not, so an allocator of ours does (`csrc/observe/tensor_memory.h`), on all threads: Gloo's need memory, too. A
dispatch mode would see neither these nor what kernels allocate within one operation; torch's profiler sees the frees of
its own threads alone, and keeps an event for each. Counting costs about 40 ns for an allocation, in measured
steps only.

What exists between two steps is found by looking at parameters, gradients and the optimizer, since it may be older than
the counter. Everything else is the difference to what there is between steps beside these. So tensors that the program
keeps (its data, for example) do not count. A thread of the backend may free memory a moment late, in the next step: so
the least that there is between any two steps is what is kept, and the step with the smallest peak is the measurement.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ... import native, recording
from ...simulation.memory import Mark, MemoryPart, ModuleUse, ParameterMemory, RecordedMemory, words_of
from ..core import process_groups
from ..core.outputs import find_tensors
from ..core.synchronizer import synchronizer_of
from ..observe import observed_number

__all__ = ["MeasuredMemory", "measure_memory"]

_C = native.load()


@dataclass(frozen=True)
class MeasuredMemory:
    """The result of `measure_memory`, in bytes.

    Attributes:
        peak: the most that this rank has held in the step.
        where: the part of the step in which that was.
        parameters: of the model, with its buffers: this rank's part of them, as all that follows.
        gradients: those there are at the end of the step.
        buckets: of DDP; none if gradients are views of them, or are averaged in place (`shm`).
        optimizer: its state.
    """

    peak: int
    where: str
    parameters: int
    gradients: int
    buckets: int
    optimizer: int


def measure_memory(
    training_step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 5
) -> MeasuredMemory:
    """Trains some steps and returns the peak memory of a step on this rank.

    All ranks of the model must call it. If the model is a `DistributedDataParallel` (of torch: one that is observed),
    and the optimizer is not sharded, the step is described to the timeline, for `Timeline.predicted_memory`. The model
    must have trained two steps before, so that buckets and the optimizer's state exist.

    Args:
        training_step: a whole step, from `zero_grad` to `optimizer.step()`, without arguments.
        model: wrapped by DDP, sharded by `fully_shard`, or plain.
        optimizer: of its parameters.
        steps: how many are measured, after one more.

    Raises:
        RuntimeError: another library has replaced torch's CPU allocator.
        ValueError: the step did not run the model or the optimizer, or there is no step to measure.

    Example:
        >>> def training_step():
        ...     optimizer.zero_grad()
        ...     model(batch).sum().backward()
        ...     optimizer.step()
        >>> print(ddp_lab.measure_memory(training_step, model, optimizer).peak)
    """
    if steps < 1:
        raise ValueError(f"{steps} steps can't be measured; give at least 1")
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    with _counting(device) as counter, _collected():
        training_step()  # so that what one step leaves for the next is counted
        measured = [_trained(training_step, _Step(model, optimizer, counter)) for _ in range(steps)]
    kept = min(one.beside for one in measured)
    step = min((one.without(kept) for one in measured), key=lambda one: max(mark.peak for mark in one.marks[1:]))
    recorded = step.recorded()
    if recorded is not None:
        recording.describe_fleeting({"type": "memory", "reducer": _model_id(model), **_as_json(recorded)})
    place = max(range(1, len(step.marks)), key=lambda index: step.marks[index].peak)
    where = words_of(step.marks[place - 1], step.modules, step.names)
    return MeasuredMemory(step.marks[place].peak, where, **step.held)


def _trained(training_step: Callable[[], object], step: _Step) -> _Step:
    with step.watched():
        training_step()
    if not {MemoryPart.FORWARD, MemoryPart.OPTIMIZER} <= {one.part for one in step.marks}:
        raise ValueError(
            "the function did not run the model's forward and optimizer.step(); give one that trains a whole step"
        )
    return step


# ---- counters --------------------------------------------------------------------------------------------------------


class _HostCounter:
    """Bytes of tensors in the memory of the CPU, while it counts."""

    def take(self) -> tuple[int, int]:
        """The bytes now, and the most since the last call; from another starting point in each process."""
        now, peak = _C.tensor_memory()
        _C.restart_tensor_memory_peak()
        return now, peak


class _DeviceCounter:
    """Bytes of tensors in the memory of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._of = device, getattr(torch, device.type)

    def take(self) -> tuple[int, int]:
        """See `_HostCounter.take`."""
        found = int(self._of.memory_allocated(self._device)), int(self._of.max_memory_allocated(self._device))
        self._of.reset_peak_memory_stats(self._device)
        return found


@contextmanager
def _collected() -> Iterator[None]:
    """Frees garbage first; in the block Python's collector does not start by itself, in the middle of a step."""
    automatic = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if automatic:
            gc.enable()


@contextmanager
def _counting(device: torch.device) -> Iterator[_HostCounter | _DeviceCounter]:
    if device.type != "cpu":
        yield _DeviceCounter(device)
        return
    _C.count_tensor_memory(True)
    try:
        yield _HostCounter()
    finally:
        _C.count_tensor_memory(False)


# ---- a step ----------------------------------------------------------------------------------------------------------


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _places(tensors: Iterable[Any]) -> dict[int, int]:
    """Address -> bytes of the memory in which the tensors are, each once."""
    memory = [_local(one).untyped_storage() for one in tensors if torch.is_tensor(one)]
    return {one.data_ptr(): one.nbytes() for one in memory if one.nbytes()}


def _states_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Parameter -> its state; of the inner optimizer if ranks share the work (`ZeroRedundancyOptimizer`)."""
    inner = getattr(optimizer, "optim", optimizer)
    found: dict[torch.Tensor, dict[str, Any]] = getattr(inner, "state", optimizer.state)
    return found


def _bytes_of_bucket(model: nn.Module) -> int:
    """Bytes that the buckets of a DDP model take beside gradients that are views of them; 0 of any other model."""
    sync = synchronizer_of(model)
    if sync is None:
        trained = model.module.parameters() if isinstance(model, TorchDDP) else ()
        return sum(one.nbytes for one in trained if one.requires_grad)
    if sync.options.lazy_bucket_allocation:
        return 0
    options = sync.description()["options"]
    return 0 if options["averages_in_place"] else sum(one.bytes for one in sync.buckets())


def _model_id(model: nn.Module) -> int | None:
    """The number of a recorded DDP model."""
    sync = synchronizer_of(model)
    if sync is not None:
        return sync.model_id
    return observed_number(model) if isinstance(model, TorchDDP) else None


class _Step:
    """A step that is being measured.

    Attributes:
        marks: so far; until `without`, from the counter's starting point.
        modules: those that the marks refer to.
        names: of the parameters.
        held: what is known to be there between two steps, as in `MeasuredMemory`.
        beside: bytes that there were beside that, before the step or after it: the less of both.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, counter: _HostCounter | _DeviceCounter
    ) -> None:
        self._model, self._optimizer, self._counter = model, optimizer, counter
        self._module: nn.Module = getattr(model, "module", model) if _model_id(model) is not None else model
        named = dict(self._module.named_parameters())
        self.names, self._parameters = list(named), list(named.values())
        used = [(name, one) for name, one in self._module.named_modules() if any(True for _ in one.parameters())]
        self.modules = [ModuleUse(name, inputs_require_grad=False) for name, _ in used]
        self._used = [one for _, one in used]
        self.views = bool(getattr(model, "gradient_as_bucket_view", False))
        self.buckets = _bytes_of_bucket(model)
        self._alive: set[int] = set()
        self.marks: list[Mark] = []
        gc.collect(1)  # what the step before has left; all generations would make the steps much longer
        self.held = self._held()
        self.beside = counter.take()[0] - sum(self.held.values())

    def _held(self) -> dict[str, int]:
        parameters = _places([*self._parameters, *self._module.buffers()])
        gradients = _places(one.grad for one in self._parameters)
        states = _places(value for state in _states_of(self._optimizer).values() for value in state.values())
        buckets = 0 if self.views and gradients else self.buckets
        sizes = {"parameters": parameters, "gradients": gradients, "optimizer": states}
        return {name: sum(found.values()) for name, found in sizes.items()} | {"buckets": buckets}

    def mark(self, part: MemoryPart, index: int = -1) -> None:
        """Notes what is held now, and the most since the last mark."""
        if part is not MemoryPart.GRADIENT:
            self._alive = {place for place, one in enumerate(self._parameters) if one.grad is not None}
        now, peak = self._counter.take()
        gradients = sum(_local(self._parameters[place]).nbytes for place in self._alive)
        self.marks.append(Mark(part, index, now, peak, gradients))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Marks what happens while the block runs."""
        handles: list[Any] = []
        for index, module in enumerate(self._used):
            handles.append(module.register_forward_pre_hook(self._before(index), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(index)))
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and _model_id(self._model) is not None:
                handles.append(parameter.register_post_accumulate_grad_hook(self._gradient(index)))
        optimizer = self._optimizer
        handles.append(optimizer.register_step_pre_hook(lambda *_: self.mark(MemoryPart.OPTIMIZER)))
        handles.append(optimizer.register_step_post_hook(lambda *_: self.mark(MemoryPart.OPTIMIZER_END)))
        self.mark(MemoryPart.BEGIN)
        try:
            yield
            self.mark(MemoryPart.END)
            self.beside = min(self.beside, self.marks[-1].bytes - sum(self._held().values()))
        finally:
            for handle in handles:
                handle.remove()

    def without(self, kept: int) -> _Step:
        """The step, whose marks no longer count so many bytes that the program keeps."""
        self.marks = [replace(one, bytes=max(0, one.bytes - kept), peak=max(0, one.peak - kept)) for one in self.marks]
        return self

    def _before(self, index: int) -> Callable[..., None]:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if any(one.requires_grad for one in find_tensors([args, kwargs])):
                self.modules[index] = ModuleUse(self.modules[index].name)
            self.mark(MemoryPart.FORWARD, index)

        return before

    def _after(self, index: int) -> Callable[..., None]:
        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self.mark(MemoryPart.FORWARD_END, index)
            first = next((one for one in find_tensors(output) if one.requires_grad), None)
            if first is not None:
                first.register_hook(lambda _gradient: self.mark(MemoryPart.BACKWARD, index))

        return after

    def _gradient(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient(_parameter: torch.Tensor) -> None:
            self._alive.add(index)
            self.mark(MemoryPart.GRADIENT, index)

        return gradient

    def recorded(self) -> RecordedMemory | None:
        """The step for a prediction; None if the model is no recorded DDP model, or its optimizer is sharded."""
        if _model_id(self._model) is None or hasattr(self._optimizer, "optim"):
            return None
        group: dist.ProcessGroup = self._model.process_group  # type: ignore[assignment]
        on_cpu = all(one.device.type == "cpu" for one in self._parameters)
        return RecordedMemory(
            parameters=tuple(
                self._parameter(name, one) for name, one in zip(self.names, self._parameters, strict=True)
            ),
            modules=tuple(self.modules),
            buffers=sum(_places(self._module.buffers()).values()),
            buckets=self.buckets,
            views=self.views,
            ranks=group.size(),
            copies=on_cpu and process_groups.backend_name(group) == "gloo",
            marks=tuple(self.marks),
        )

    def _parameter(self, name: str, one: torch.Tensor) -> ParameterMemory:
        values = [value for value in _states_of(self._optimizer).get(one, {}).values() if torch.is_tensor(value)]
        alike = [value.nbytes for value in values if value.shape == one.shape]
        others = sum(value.nbytes for value in values) - sum(alike)
        return ParameterMemory(name, tuple(one.shape), one.nbytes, one.requires_grad, sum(alike), others)


def _as_json(recorded: RecordedMemory) -> dict[str, Any]:
    """As a description: marks are columns."""
    made = asdict(recorded)
    made["marks"] = {name: [mark[name] for mark in made["marks"]] for name in Mark.__dataclass_fields__}
    return made
