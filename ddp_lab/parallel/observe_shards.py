"""What torch's `fully_shard` (FSDP2, HSDP) and `replicate` do with a model: the events of a step, and what each
collective is for.

[Note: what is wrapped]
`fully_shard` keeps the parameters that are gathered and reduced together in objects of its own, its parameter groups.
We wrap methods of those of one model, and of its states, on the objects themselves; the classes stay as they are, but
for `FSDPState._lazy_init`, where torch finds out which module is a root. A wrapper takes times and says what the
collectives inside are for (`csrc/comm/collective_interception.h`); then it calls torch's method with the same
arguments. So parameters, gradients and the order of collectives are torch's.

[Note: waits of a device]
On the CPU a rank waits inside the call of a collective. A device runs it on a stream of its own, and the stream that
computes waits for it later, at these places: before the gathered parameters are copied out (`wait_for_unshard`), before
the next group is reduced (`post_backward`, between its reshard and `_wait_for_post_backward`), and at the end of the
backward (`finalize_backward`). An event of the device before the wait and one after it tell how long it was. Torch
waits and copies out in one call: there we let the stream wait, and torch does once more.

A parameter group takes the place of a bucket in events and tables. A step is a backward that reduces gradients and is
the last one (`set_requires_gradient_sync`, `set_is_last_backward`); earlier ones are accumulation.
"""

from __future__ import annotations

import operator
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo import eval_frame
from torch.distributed import _composable_state

from .. import native, recording
from ..protocol.events import Kind
from .core import agreement, process_groups
from .monitoring import activity, group_collectives
from .monitoring.accumulation import AccumulationWatch

__all__ = ["ShardObservation", "observe_every_root", "observe_root", "state_of"]

_C = native.load()
_FORWARD, _FORWARD_AHEAD, _BACKWARD, _BACKWARD_AHEAD, _REDUCTION, _EVALUATION = map(
    _C.USES.index, ("forward", "forward ahead", "backward", "backward ahead", "reduction", "evaluation")
)
_READY, _LAUNCHED, _REDUCED = int(Kind.BUCKET_READY), int(Kind.BUCKET_LAUNCHED), int(Kind.BUCKET_REDUCED)
_record = _C.record
_current_backward = torch._C._current_graph_task_id
_prefetches_of = operator.attrgetter("_states_to_forward_prefetch", "_states_to_backward_prefetch")  # new lists if set
_reshards_of = operator.attrgetter("_reshard_after_forward", "unshard_async_op")
_METHODS: Final = ("unshard", "use_training_state", "post_backward", "_wait_for_post_backward", "finalize_backward")
_STATES: Final = "torch.distributed.fsdp._fully_shard._fsdp_state"
_observations: weakref.WeakKeyDictionary[nn.Module, ShardObservation] = weakref.WeakKeyDictionary()


def state_of(module: Any) -> Any:
    """What `fully_shard` or `replicate` keeps of a module; None if neither was applied to it."""
    states = sys.modules.get(_STATES)
    found = _composable_state._get_module_state(module) if states and isinstance(module, nn.Module) else None
    return found if states is not None and isinstance(found, states.FSDPState) else None


def _groups_of(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one for each state
    found = [state._fsdp_param_group] if several is None else several
    return [one for one in found if one is not None and one.fsdp_params]


def _theirs(owner: Any, name: str) -> Callable[..., Any]:
    """Calls the method of this name that the object's class has then: programs replace methods of torch's classes.

    If the object has one of its own, what it has now: somebody else has wrapped it.
    """
    if name in vars(owner):
        found: Callable[..., Any] = vars(owner)[name]
        return found
    kind = type(owner)

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(kind, name)(owner, *args, **kwargs)

    return call


def _in_backward() -> bool:
    return _current_backward() != -1


class ShardObservation:
    """The result of `observe_root`: `remove`, or the end of a ``with`` block, ends the recording of this model.

    Attributes:
        model_id: the number of the model in events.
    """

    def __init__(self, root: nn.Module, state: Any) -> None:
        self._root = weakref.ref(root)
        self._states: list[Any] = list(state._state_ctx.all_states)
        self._groups = [group for one in self._states for group in _groups_of(one)]
        self._ranks = sorted({rank for group in self._groups for rank in group.mesh_info.mesh.mesh.flatten().tolist()})
        self._collectives_of = process_groups.group_index(_process_group(self._groups[0]))
        self.model_id = agreement.next_number(self._ranks)
        self._sizes = [_reduced_bytes(group) for group in self._groups]
        self._step = self._generation = 0
        self._settings: tuple[object, ...] = ()
        self._wrapped: list[tuple[Any, str]] = []
        self._handles: list[Any] = []
        self._evaluates = self._in_backward = self._reduced = self._launched = self._posting = False
        self._prefetched: Any = None  # the group for which torch has just announced a gather ahead
        self._gathers: dict[int, Any] = {}  # group -> what a device gathers for it
        self._reductions: list[Any] = []  # of a device, for which no stream has waited yet, the oldest first
        self._last_reduction: Any = None
        self._wait: Any = None  # what the current stream waits for
        self._accumulation = AccumulationWatch(self, lambda one: (one._step, one.model_id))

    def start(self, root: nn.Module) -> None:
        """Wraps, and adds the hooks of the root."""
        self._accumulation.follow(
            (one.sharded_param for group in self._groups for one in group.fsdp_params), hook=False
        )
        for number, group in enumerate(self._groups):
            self._wrap(group, "unshard", self._unshard(number, group))
            self._wrap(group, "use_training_state", self._use_training_state(group))
            self._wrap(group, "post_backward", self._post_backward(number, group))
            self._wrap(group, "_wait_for_post_backward", self._wait_for_post_backward(number, group))
            if group.device.type != "cpu":
                self._wrap(group, "wait_for_unshard", self._wait_for_unshard(number, group))
                self._wrap(group, "reshard", self._reshard(group))
                self._wrap(group, "finalize_backward", self._finalize_backward(_theirs(group, "finalize_backward")))
        for state in self._states:
            self._wrap(state, "_register_root_post_backward_final_callback", self._begin_backward(state))
            self._wrap(state, "_root_post_backward_final_callback", self._end_backward(state))
            if hasattr(state, "_end_backward_iteration"):  # torch 2.15
                theirs = _theirs(state, "_end_backward_iteration")
                self._wrap(state, "_end_backward_iteration", self._finalize_backward(theirs, ends=True))
        hooks = _RootHooks(self)
        self._handles = [
            root.register_forward_pre_hook(hooks.before, prepend=True),
            root.register_forward_hook(hooks.after),
        ]
        self._describe(root)

    def remove(self) -> None:
        """Restores everything; the model continues as if it had never been observed. A second call does nothing."""
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        for handle in self._handles:
            handle.remove()
        self._wrapped, self._handles = [], []
        root = self._root()
        if root is not None and _observations.get(root) is self:
            del _observations[root]

    def __enter__(self) -> ShardObservation:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    # ---- the root's forward

    def begin_forward(self, root: nn.Module) -> None:
        """Before the root's forward: what torch does in it begins here."""
        if _in_backward():  # it is computed again
            return
        self._evaluates = not torch.is_grad_enabled()
        if self._evaluates:
            return
        if self._in_backward:  # ended by an exception
            self._end_wait()
            self._reductions, self._last_reduction = [], None
            self._record(Kind.ABANDONED)
            self._step += 1
            self._in_backward = self._reduced = False
        self._describe(root)
        self._record(Kind.FORWARD_BEGIN)

    def end_forward(self) -> None:
        """After it."""
        if _in_backward():
            return
        if not self._evaluates:
            self._record(Kind.FORWARD_END)
        self._evaluates = False

    # ---- wrappers

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        setattr(owner, name, wrapper)
        self._wrapped.append((owner, name))

    def _unshard(self, number: int, group: Any) -> Callable[..., Any]:
        """[Note: what a wrapper costs] It runs often, so what is the same each time is looked up here, once."""
        theirs, idle, on_device = (
            _theirs(group, "unshard"),
            type(group._training_state).IDLE,
            group.device.type != "cpu",
        )
        grad_enabled, set_purpose, model_id = torch.is_grad_enabled, _C.set_purpose, self.model_id

        def unshard(*args: Any, **kwargs: Any) -> Any:
            asked = group._training_state is idle  # by the program
            ahead, self._prefetched = self._prefetched is group, None
            if _current_backward() != -1:
                use = _BACKWARD_AHEAD if ahead else _BACKWARD
            elif self._evaluates or (asked and not grad_enabled()):
                use = _EVALUATION
            else:
                use = _FORWARD_AHEAD if ahead or asked else _FORWARD
            before = set_purpose(model_id, number, use)
            try:
                result = theirs(*args, **kwargs)
            finally:
                set_purpose(*before)
            if on_device:
                for one in _C.take_device_collectives():
                    self._gathers[number] = one
            return result

        return unshard

    def _wait_for_unshard(self, number: int, group: Any) -> Callable[[], Any]:
        theirs = _theirs(group, "wait_for_unshard")

        def wait_for_unshard() -> Any:
            gather, result = self._gathers.pop(number, None), group._all_gather_result
            if gather is not None and result is not None:
                gather.wait_begins()
                try:
                    if result.all_gather_event is not None:
                        group.device_handle.current_stream().wait_event(result.all_gather_event)
                    if isinstance(result.all_gather_work, dist.Work):
                        result.all_gather_work.wait()
                finally:
                    gather.wait_ends()
            return theirs()

        return wait_for_unshard

    def _use_training_state(self, group: Any) -> Callable[..., Any]:
        theirs = _theirs(group, "use_training_state")

        def use_training_state(*args: Any, **kwargs: Any) -> Any:
            """Torch calls it to prefetch, and only then: what it does next is to gather this group."""
            self._prefetched = group
            return theirs(*args, **kwargs)

        return use_training_state

    def _post_backward(self, number: int, group: Any) -> Callable[..., Any]:
        theirs, on_device = _theirs(group, "post_backward"), group.device.type != "cpu"
        set_purpose, model_id, smallest = _C.set_purpose, self.model_id, self._smallest_trained(group)

        def post_backward(*args: Any) -> Any:
            if group.reduce_grads:
                self._record(_READY, number)
                if smallest is not None:
                    gradient = smallest.sharded_param.grad
                    self._accumulation.before_accumulation(getattr(gradient, "_local_tensor", gradient))
            self._launched, self._posting = False, True
            if on_device and group.reduce_grads and not group.reshard_after_backward:
                self._wait_for_oldest()
            before = set_purpose(model_id, number, _REDUCTION)
            try:
                result = theirs(*args)
            finally:
                set_purpose(*before)
                self._posting = False
                self._end_wait()
            if not on_device:
                if self._launched:
                    self._record(_REDUCED, number)
            elif taken := _C.take_device_collectives():  # not done yet
                self._reductions.append(taken[0])  # before an all-reduce of it
                self._last_reduction = taken[-1]
            return result

        return post_backward

    def _smallest_trained(self, group: Any) -> Any:
        """The smallest trained parameter of the model, if it is in this group."""
        trained = [one for other in self._groups for one in other.fsdp_params if one.sharded_param.requires_grad]
        smallest = min(trained, key=_sharded_bytes, default=None)
        return smallest if smallest in group.fsdp_params else None

    def _reshard(self, group: Any) -> Callable[[], Any]:
        theirs = _theirs(group, "reshard")

        def reshard() -> Any:
            result = theirs()
            if self._posting and group.reduce_grads:
                self._wait_for_oldest()
            return result

        return reshard

    def _wait_for_oldest(self) -> None:
        """The current stream is about to wait for the oldest reduction, unless torch lets more of them run."""
        most = getattr(self._groups[0].comm_ctx, "reduce_scatter_max_input_buffers", 1)  # torch 2.13 or later
        if len(self._reductions) >= most:
            self._begin_wait(self._reductions.pop(0))

    def _begin_wait(self, collective: Any) -> None:
        if self._wait is None:
            self._wait = collective
            self._wait.wait_begins()

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.wait_ends()
            self._wait = None

    def _finalize_backward(self, theirs: Callable[[], Any], ends: bool = False) -> Callable[[], Any]:
        def finalize_backward() -> Any:
            """Torch waits for all that is left, before it calls it for the groups or while it does."""
            if self._last_reduction is not None:
                self._begin_wait(self._last_reduction)
            result = theirs()
            if ends:
                self._end_wait()
                self._last_reduction = None
            return result

        return finalize_backward

    def _wait_for_post_backward(self, number: int, group: Any) -> Callable[[], Any]:
        theirs = _theirs(group, "_wait_for_post_backward")

        def wait_for_post_backward() -> Any:
            """Torch calls it just before it reduces, if there is something to reduce."""
            result = theirs()
            if self._posting:  # else the backward ends
                self._end_wait()
                self._launched = self._reduced = True
                self._record(_LAUNCHED, number)
            return result

        return wait_for_post_backward

    def _begin_backward(self, state: Any) -> Callable[[], Any]:
        theirs = _theirs(state, "_register_root_post_backward_final_callback")

        def register_root_post_backward_final_callback() -> Any:
            """Torch calls it whenever the gradient of a module's output is known."""
            if not state._state_ctx.post_backward_final_callback_queued and self._synchronises():
                self._in_backward = True
                self._record(Kind.BACKWARD_BEGIN)
            return theirs()

        return register_root_post_backward_final_callback

    def _end_backward(self, state: Any) -> Callable[[], Any]:
        theirs = _theirs(state, "_root_post_backward_final_callback")

        def root_post_backward_final_callback() -> Any:
            last = state._state_ctx.is_last_backward
            if self._in_backward and last:
                self._record(Kind.FINALIZE_BEGIN)
            result = theirs()
            self._end_wait()
            if last:
                self._reductions, self._last_reduction = [], None
            if last and self._in_backward and self._reduced:
                self._record(Kind.BACKWARD_END)
                self._step += 1
                self._reduced = False
            else:
                _C.record(Kind.GRAD_READY, reducer=self.model_id, step=self._step, parameter=0)  # only accumulated
            self._in_backward = False
            return result

        return root_post_backward_final_callback

    def _synchronises(self) -> bool:
        return any(group.reduce_grads for group in self._groups)

    def _record(self, kind: int, bucket: int = -1) -> None:
        size = self._sizes[bucket] if bucket >= 0 else -1
        # By position, which costs half of what names do: ..., bucket, parameter, bytes, process group, generation.
        _record(kind, self.model_id, self._step, bucket, -1, size, self._collectives_of, self._generation)

    # ---- description

    def _describe(self, root: nn.Module) -> None:
        """Reports to the timeline the parameter groups, and what the program has changed about them."""
        settings = self._read_settings()
        if settings == self._settings:
            return
        if self._settings:
            self._generation += 1
            self._record(Kind.REBUILT)
        self._settings = settings
        index = {id(group): number for number, group in enumerate(self._groups)}
        of_state = {id(state): [index[id(one)] for one in _groups_of(state)] for state in self._states}
        owner = {id(group): state for state in self._states for group in _groups_of(state)}

        def ahead(group: Any, which: str) -> list[int]:
            return [number for state in getattr(owner[id(group)], which) for number in of_state.get(id(state), ())]

        now = [
            {
                "forward_prefetch": ahead(group, "_states_to_forward_prefetch"),
                "backward_prefetch": ahead(group, "_states_to_backward_prefetch"),
                "reshard_after_forward": bool(group._reshard_after_forward),
                "unshard_async": bool(group.unshard_async_op),
            }
            for group in self._groups
        ]
        recording.describe(self._description(root, now), owner=root)

    def _read_settings(self) -> tuple[object, ...]:
        """What a program may change about parameter groups while it trains; it is compared in each forward."""
        return (*map(_prefetches_of, self._states), *map(_reshards_of, self._groups))

    def _description(self, root: nn.Module, settings: list[dict[str, Any]]) -> dict[str, Any]:
        parameters: list[dict[str, Any]] = []
        layout = []
        for number, (group, about) in enumerate(zip(self._groups, settings, strict=True)):
            first = len(parameters)
            parameters += [_parameter(one, first + place) for place, one in enumerate(group.fsdp_params)]
            layout.append(
                {
                    "bucket": number,
                    "name": str(group._module_fqn or _class_name(root)),
                    "bytes": self._sizes[number],
                    "dtype": str(group._reduce_dtype or group.fsdp_params[0].orig_dtype).removeprefix("torch."),
                    "device": str(group.device),
                    "parameters": list(range(first, len(parameters))),
                    "sharded_bytes": sum(_sharded_bytes(one) for one in group.fsdp_params),
                    "unsharded_bytes": sum(_unsharded_bytes(one) for one in group.fsdp_params),
                    "mesh": _mesh(group),
                    **about,
                }
            )
        return {
            "type": "assignment",
            "kind": "replicate" if _replicates(self._groups) else "fully_shard",
            "reducer": self.model_id,
            "generation": self._generation,
            "first_step": self._step,
            "module": _class_name(root),
            "process_group": self._collectives_of,
            "group_ranks": self._ranks,
            "backend": process_groups.backend_name(_process_group(self._groups[0])),
            "rebuilt": False,
            "parameters": parameters,
            "buckets": layout,
        }


def _class_name(root: nn.Module) -> str:
    """Of the module as the program wrote it: `fully_shard` gives it a class of its own, with a prefix."""
    kind = type(root)
    return next(
        (base.__name__ for base in kind.__mro__[1:] if not base.__module__.startswith("torch.distributed")),
        kind.__name__,
    )


def _replicates(groups: list[Any]) -> bool:
    return not any(hasattr(group.mesh_info, "shard_process_group") for group in groups)


def _process_group(group: Any) -> dist.ProcessGroup:
    info = group.mesh_info
    found: dist.ProcessGroup = getattr(info, "shard_process_group", None) or info.replicate_process_group
    return found


def _mesh(group: Any) -> list[dict[str, Any]]:
    mesh = group.mesh_info.mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return [{"name": str(name), "size": int(size)} for name, size in zip(names, mesh.mesh.shape, strict=True)]


def _parameter(one: Any, index: int) -> dict[str, Any]:
    size = list(one._orig_size)
    numel = torch.Size(size).numel()
    return {
        "index": index,
        "name": str(one._param_fqn or one._module_info.param_name),
        "shape": size,
        "numel": numel,
        "bytes": numel * one.orig_dtype.itemsize,
        "dtype": str(one.orig_dtype).removeprefix("torch."),
        "device": str(one.device),
    }


def _sharded_bytes(one: Any) -> int:
    """What this rank keeps of a parameter, padding included."""
    held: torch.Tensor = one._sharded_param_data
    return held.numel() * held.element_size()


def _unsharded_bytes(one: Any) -> int:
    return torch.Size(one._orig_size).numel() * int((one.param_dtype or one.orig_dtype).itemsize)


def _reduced_bytes(group: Any) -> int:
    """Of the gradients of the group's trained parameters, before they are scattered."""
    trained = [one for one in group.fsdp_params if one.sharded_param.requires_grad]
    return sum(
        torch.Size(one._orig_size).numel() * int((one.reduce_dtype or one.orig_dtype).itemsize) for one in trained
    )


class _RootHooks:
    """The hooks on the root; a copied or unpickled model has inert ones and is not observed."""

    def __init__(self, observation: ShardObservation | None) -> None:
        self._observation = observation

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[None]]:
        return _RootHooks, (None,)

    def before(self, root: nn.Module, inputs: Any) -> None:
        """Before forward."""
        if self._observation is not None:
            self._observation.begin_forward(root)

    def after(self, root: nn.Module, inputs: Any, output: Any) -> None:
        """After forward."""
        if self._observation is not None:
            self._observation.end_forward()


def observe_root(root: nn.Module) -> ShardObservation:
    """Records what `fully_shard` or `replicate` does with a model; a second call returns the first observation.

    Raises:
        ValueError: it is no root module, or has no parameter that is handled in groups.
    """
    if root in _observations:
        return _observations[root]
    state = state_of(root)
    state._lazy_init()
    if not state._is_root:
        raise ValueError("this module is inside of another one with fully_shard or replicate: pass the outermost one")
    if root in _observations:  # `observe_every_root` was told by _lazy_init
        return _observations[root]
    if (reason := _why_not(state)) is not None:
        raise ValueError(f"this model can't be observed: {reason}")
    activity.install(root)
    group_collectives.record()
    made = ShardObservation(root, state)
    made.start(root)
    _observations[root] = made
    return made


def _why_not(state: Any) -> str | None:
    """Why the model of this root can't be observed; None if it can."""
    groups = [group for one in state._state_ctx.all_states for group in _groups_of(one)]
    if not groups:
        return "none of its parameters is in a parameter group"
    if lacking := [name for name in _METHODS if not hasattr(groups[0], name)]:
        return f"the parameter groups of this torch have no {lacking[0]}()"
    return None


_follows = False


def observe_every_root() -> Callable[[], None]:
    """Observes each model when `fully_shard` or `replicate` finds out that it is a root; returns what ends that.

    [Note: before torch is asked for it]
    The classes are imported by the program, later or never, and that takes seconds. So we do not import them: their
    common base is asked to tell when they are made.
    """
    global _follows
    undo: list[Callable[[], None]] = []
    if _follows:
        return lambda: None
    _follows = True

    def follow(kind: type) -> None:
        if kind.__module__ != _STATES or kind.__name__ != "FSDPState":
            return
        theirs: Any = kind._lazy_init  # type: ignore[attr-defined]

        def lazy_init(state: Any) -> None:
            begins = state._is_root is None
            theirs(state)
            if not begins:
                return
            root = state._modules[0]
            if (reason := _why_not(state)) is None:
                observe_root(root)
            else:
                warnings.warn(f"A {_class_name(root)} is not observed: {reason}", stacklevel=2)

        kind._lazy_init = lazy_init  # type: ignore[attr-defined]
        undo.append(lambda: setattr(kind, "_lazy_init", theirs))

    base: Any = _composable_state._State
    made = sys.modules.get(_STATES)
    if made is not None:
        follow(made.FSDPState)
    else:
        base.__init_subclass__ = classmethod(lambda kind: follow(kind))
        undo.append(lambda: delattr(base, "__init_subclass__"))

    def end() -> None:
        global _follows
        _follows = False
        for one in undo:
            one()
        undo.clear()

    return end


# torch.compile leaves them, and what they call, alone: see [Note: what torch.compile sees]
_skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
for _hook in (_RootHooks.before, _RootHooks.after):
    eval_frame.set_code_exec_strategy(_hook.__code__, _skip)
