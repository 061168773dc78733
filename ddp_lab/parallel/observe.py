"""`ddp_lab.observe(model)`: the events of our class from torch's own DistributedDataParallel, `fully_shard` and
`replicate` (`observe_shards.py`).

[Note: what observing leaves alone]
Gradients, launches and the order of collectives are torch's: our hooks only take times (`csrc/observe`). One of them
runs Python in the backward, for one parameter ([Note: backwards that add up]): about a microsecond. Per forward there
are two Python hooks on the wrapper, and we call torch's broadcast of the buffers; both cost some microseconds. Nothing
is communicated, so the ranks need not observe at the same time; but models have the same numbers on all ranks only if
each rank observes the same ones in the same order.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, overload

import torch
from torch._C._dynamo import eval_frame
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .. import native, recording
from .core import agreement, arguments, buckets, comm_hooks, parameters, process_groups
from .core.arguments import BucketCaps, ReducerOptions
from .core.buffers import UnchangedBuffers
from .core.outputs import find_tensors
from .distributed import DistributedDataParallel
from .monitoring import activity, inspection
from .monitoring.accumulation import AccumulationWatch
from .observe_shards import ShardObservation, observe_every_root, observe_root, state_of

__all__ = ["EveryModel", "Observation", "observe", "observe_every_model", "observed_number"]

_C = native.load()
_BUFFERS = _C.USES.index("buffers")

_observations: weakref.WeakKeyDictionary[TorchDDP, Observation] = weakref.WeakKeyDictionary()


class Observation:
    """The result of `observe`: `remove`, or the end of a ``with`` block, ends the recording of this model.

    Attributes:
        model_id: the number of the model in events.
        reducer: the C++ side of the observation; torch's reducer is the model's.
    """

    def __init__(self, model: TorchDDP) -> None:
        self._model = weakref.ref(model)
        held = {id(parameter) for parameter in _C.parameters_of(model.reducer)}
        named = [(name, p) for name, p in model.module.named_parameters() if id(p) in held]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        sparse = parameters.survey(model.module, set()).sparse
        self._sparse = [index for index, name in enumerate(self._names) if name in sparse]
        self.model_id = agreement.agree([], model.process_group, model.device, collective=False)
        self.reducer = _C.Observation(
            reducer=model.reducer,
            parameters=self._parameters,
            reducer_id=self.model_id,
            process_group_index=process_groups.group_index(model.process_group),
            static_graph=model.static_graph,
        )
        self._accumulation = AccumulationWatch(self, lambda one: (one.reducer.step(), one.model_id))
        self._rebuilt = model._has_rebuilt_buckets
        self._assignment: list[list[int]] = self.reducer.read_buckets(rebuilt=False)
        self._described = self._what_is_described(model)
        self._handles: list[Any] = []

    def start(self, model: TorchDDP) -> None:
        """Adds the hooks."""
        self.reducer.start()
        self._accumulation.follow(self._parameters)
        hooks = _ForwardHooks(self)
        self._handles = [
            model.register_forward_pre_hook(hooks.before, prepend=True),
            model.register_forward_hook(hooks.after),
        ]
        if model.mixed_precision is not None:
            self._follow_mixed_precision(model)
        model._sync_buffers = _BufferBroadcast(self, model)  # type: ignore[method-assign]
        self._describe(model)

    def remove(self) -> None:
        """Removes all hooks; the model continues as if it had never been observed. A second call does nothing."""
        self.reducer.stop()
        self._accumulation.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        model = self._model()
        if model is not None:
            for name in ("_fire_reducer_autograd_hook", "_sync_buffers"):
                vars(model).pop(name, None)
            if _observations.get(model) is self:
                del _observations[model]

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _what_is_described(self, model: TorchDDP) -> tuple[object, ...]:
        return (model._has_rebuilt_buckets, len(model._comm_hooks), model.static_graph, model.process_group)

    def describe_if_changed(self, model: TorchDDP) -> None:
        """Reports to the timeline buckets that torch has rebuilt, a comm hook, and another process group."""
        now = self._what_is_described(model)
        if now == self._described:
            return
        self._described = now
        if model._has_rebuilt_buckets != self._rebuilt:
            self._rebuilt = model._has_rebuilt_buckets
            self._assignment = self.reducer.read_buckets(rebuilt=True)
        self.reducer.update(process_groups.group_index(model.process_group), model.static_graph)
        self._describe(model)

    def _describe(self, model: TorchDDP) -> None:
        description = buckets.describe(
            self._assignment,
            dict(zip(self._names, self._parameters, strict=True)),
            model.process_group,
            model.mixed_precision,
            self._sparse,
            reducer=self.model_id,
            generation=self.reducer.generation(),
            first_step=self.reducer.step(),
            module=type(model.module).__name__,
            rebuilt=self._rebuilt,
            options=arguments.described_options(
                ReducerOptions.of(model),
                BucketCaps.of_torch(model),
                averages_in_place=False,
                # built-in hooks are only in the logging data
                comm_hook=model._get_ddp_logging_data().get("comm_hook") or comm_hooks.name_of_hook(model._comm_hooks),
            ),
        )
        recording.describe(description, owner=model)

    def _follow_mixed_precision(self, model: TorchDDP) -> None:
        """With mixed precision the gradients arrive at copies of the parameters, and this method notifies torch."""
        index = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        told: Callable[..., Any] = model._fire_reducer_autograd_hook
        numbers = [index.get(id(parameter)) for parameter in model._module_parameters]
        reducer = self.reducer

        def tell(number: int, *unused: Any) -> Any:
            known = numbers[number]
            if known is not None:
                reducer.on_gradient(known)
            return told(number, *unused)

        model._fire_reducer_autograd_hook = tell  # type: ignore[method-assign]


def observed_number(model: TorchDDP) -> int | None:
    """The number in events of a model of torch's class; None if it is not observed."""
    found = _observations.get(model)
    return found.model_id if found is not None else None


class _ForwardHooks:
    """The hooks on the wrapper; a copied or unpickled model has inert ones and is not observed."""

    def __init__(self, observation: Observation | None) -> None:
        self._observation = observation

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[None]]:
        return _ForwardHooks, (None,)

    def before(self, model: TorchDDP, inputs: Any) -> None:
        """Before forward."""
        if self._observation is not None and torch.is_grad_enabled():
            self._observation.reducer.begin_forward(model.require_backward_grad_sync)

    def after(self, model: TorchDDP, inputs: Any, output: Any) -> None:
        """After a forward, whose start may have rebuilt the buckets."""
        if self._observation is not None and torch.is_grad_enabled():
            self._observation.describe_if_changed(model)
            self._observation.reducer.end_forward(find_tensors(output), model.require_backward_grad_sync)


class _BufferBroadcast:
    """Torch's `_sync_buffers` of a model, which says what it communicates for, and which buffers never change."""

    def __init__(self, observation: Observation, model: TorchDDP) -> None:
        self._observation, self._model = observation, weakref.ref(model)
        self._unchanged = UnchangedBuffers()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[TorchDDP | None, str]]:
        return getattr, (self._model(), "_sync_buffers")  # a copied or unpickled model has torch's own

    def __call__(self) -> None:
        model, observation = self._model(), self._observation
        assert model is not None, "it calls this"
        if not hasattr(model, "buffer_hook"):
            self._unchanged.before_broadcast(self._find, observation.model_id, observation.reducer.step())
        before = _C.set_purpose(-1, -1, _BUFFERS)
        try:
            TorchDDP._sync_buffers(model)
        finally:
            _C.set_purpose(*before)

    def _find(self) -> dict[str, torch.Tensor]:
        model = self._model()
        assert model is not None, "it calls this"
        model._assign_modules_buffers()
        return model.named_module_buffers


@overload
def observe(model: TorchDDP) -> Observation: ...  # type: ignore[overload-overlap]
@overload
def observe(model: torch.nn.Module) -> ShardObservation: ...
def observe(model: torch.nn.Module) -> Observation | ShardObservation:
    """Records what torch does with a model: its own DistributedDataParallel, `fully_shard` (FSDP2, HSDP), `replicate`.

    All views and findings work with them. Gradients are bit for bit the same as without it. The recording ends with
    the model, or with `Observation.remove`; you need not keep the result. Call it on each rank, for several models in
    the same order, after the model was wrapped and outside a backward. A second call returns the first observation.

    Args:
        model: a `torch.nn.parallel.DistributedDataParallel` (comm hooks may be registered before or after); or the
            outermost module with `fully_shard` or `replicate`, after these were applied to all modules: their buckets
            are its parameter groups (`Timeline.parameter_groups`).

    Raises:
        TypeError: it is none of these, or is our class, which records by itself.
        ValueError: with `fully_shard` or `replicate`: it is not the outermost module, or has no parameter. With a
            DistributedDataParallel: its gradients are averaged without buckets: by torch.compile
            (``optimize_ddp="python_reducer"``), or all of them delayed (``delay_all_reduce_named_params``); or torch
            does not expose the buckets: 2.15 and later with sparse gradients or ``lazy_bucket_allocation``.

    Example:
        >>> model = torch.nn.parallel.DistributedDataParallel(net)
        >>> ddp_lab.observe(model)
    """
    if isinstance(model, DistributedDataParallel):
        raise TypeError("observe() is for torch's class; ddp_lab.DistributedDataParallel records by itself")
    if state_of(model) is not None:
        return observe_root(model)
    if not isinstance(model, TorchDDP):
        raise TypeError(
            "observe() expects a torch.nn.parallel.DistributedDataParallel, or a module with fully_shard or replicate, "
            f"got {type(model).__name__}: pass the wrapped model"
        )
    if (reason := _why_not(model)) is not None:
        raise ValueError(f"this model can't be observed: {reason}")
    if model not in _observations:
        activity.install(model)
        made = Observation(model)
        made.start(model)
        _observations[model] = made
        inspection.install(made, observed=True)
    return _observations[model]


class EveryModel:
    """The result of `observe_every_model`: `remove` ends it; models observed until then stay observed."""

    def __init__(self) -> None:
        self._before = TorchDDP.__init__
        built = self._before

        @functools.wraps(built)
        def build(model: TorchDDP, *args: Any, **kwargs: Any) -> None:
            built(model, *args, **kwargs)
            if isinstance(model, DistributedDataParallel):
                return
            if (reason := _why_not(model)) is None:
                observe(model)
            else:
                warnings.warn(f"A {type(model.module).__name__} is not observed: {reason}", stacklevel=2)

        TorchDDP.__init__ = build  # type: ignore[method-assign,assignment]
        self._end_roots = observe_every_root()

    def remove(self) -> None:
        """Restores torch's classes."""
        self._end_roots()
        TorchDDP.__init__ = self._before  # type: ignore[method-assign]


def _why_not(model: TorchDDP) -> str | None:
    """Why this model can't be observed; None if it can."""
    if getattr(model, "_use_python_reducer", False):
        return "torch.compile averages its gradients without buckets (optimize_ddp='python_reducer')"
    if not hasattr(model, "reducer"):
        return "its gradients are averaged without buckets (delay_all_reduce_named_params)"
    try:
        _C.parameters_of(model.reducer)
    except RuntimeError as error:  # torch 2.15: of sparse gradients, and with lazy_bucket_allocation
        return f"this torch does not expose its buckets ({str(error).splitlines()[0]}); ddp_lab's class records them"
    return None


def observe_every_model() -> EveryModel:
    """Observes every model that torch's class wraps, or `fully_shard` and `replicate` handle, from now on here."""
    return EveryModel()


# torch.compile leaves them, and what they call, alone: see [Note: what torch.compile sees]
_skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
for _hook in (_ForwardHooks.before, _ForwardHooks.after, _BufferBroadcast.__call__):
    eval_frame.set_code_exec_strategy(_hook.__code__, _skip)
