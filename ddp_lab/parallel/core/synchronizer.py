"""Averages the gradients of one module over the ranks: its reducer, the buckets, the comm hook, the buffers.

[Note: who knows whom]
`Runtime` has a `GradientSynchronizer` and further features (mixed precision, monitors, live requests). Features know
the synchronizer, which knows none of them: they register callbacks for a new reducer or a new group in its lists. All
of it belongs to the training thread; what other threads may call is documented there. References to the wrapper are
weak: a model is freed when the user drops it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel.distributed import _BufferCommHook

from ... import native, recording
from ...bucketing import assign_buckets
from . import agreement, arguments, buckets, comm_hooks, parameters, process_groups
from .arguments import BucketCaps, ReducerOptions
from .buckets import BucketInfo, OrderFollower
from .buffers import BufferSynchronizer
from .comm_hooks import Hook
from .parameters import Seen, Survey, TrainedParameters, module_text

__all__ = ["GradientSynchronizer", "Settings", "UnevenInputs", "synchronizer_of"]

_C = native.load()
_FORWARDS = 100  # steps whose forwards are counted
_RANKS = 3  # index of the first rank's element in the row


@dataclass(frozen=True)
class Settings:
    """What a model and its copies have in common; see [Note: a copy of a model].

    Attributes:
        options, caps: how gradients are reduced, and the size limits of buckets.
        sync_buffers, buffers_wanted, buffer_hook: see `BufferSynchronizer`.
        is_sharded: over the other dimensions of a device mesh, so that forwards replace parameters.
        in_python, wanted, follower, manual_end: the attributes of `GradientSynchronizer`.
    """

    options: ReducerOptions
    caps: BucketCaps
    sync_buffers: bool
    is_sharded: bool
    in_python: bool
    wanted: bool = True
    buffers_wanted: bool = True
    buffer_hook: _BufferCommHook | None = None
    follower: OrderFollower | None = None
    manual_end: bool = False


class GradientSynchronizer:
    """Averages the gradients of one module. See [Note: who knows whom].

    Args:
        module: the trained module.
        ignored: qualified names of ignored parameters and buffers.
        group: the ranks that train together.
        delayed: parameters that are averaged without it; they determine the device of a module without others.
        owner: the wrapper, for the user's hooks.
        settings: how gradients are averaged; most are attributes of the same names.

    Attributes:
        device: of the parameters, and of messages between the ranks.
        manual_end: whether the caller ends each backward: [Note: a backward that the caller ends].
        wanted: whether the next backward is averaged; False under `no_sync`.
        survey: the module's contents when the reducer was built.
        seen, idle_seen: the dicts at the last check, and when all parameters were frozen.
        trained: the parameters, by their index in the reducer.
        reducer: `ddp_lab._C.Reducer`; missing before `build`.
        model_id: the number of the model, equal on all its ranks.
        assignment: for each bucket, in the order of launch, the indices of its parameters.
        has_rebuilt_buckets: whether the layout follows the order of readiness.
        follower: rebuilds when the order of readiness changes; None: off.
        hooks: comm hooks with their states.
        hook_changes: how often these have changed.
        in_python: whether gradients are averaged without the reducer: [Note: the Python reducer].
        forwards: step -> synchronised forwards that have ended for it, of the last steps.
        step_agreed: whether the ranks' step counts are equal; they may differ after a failure.
        step_warnings: the kinds of warnings that `step_check` has given of this model.
        buffers, inputs: the module's buffers; the ranks that still have inputs.
        on_new_reducer: called with this object whenever there is a new reducer.
        on_new_group: called when the ranks have changed; weak, because listeners refer to this object.
    """

    reducer: Any
    model_id: int

    def __init__(
        self,
        module: torch.nn.Module,
        ignored: set[str],
        group: dist.ProcessGroup,
        *,
        owner: torch.nn.Module,
        settings: Settings,
        delayed: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        self.module = module
        self.ignored = ignored
        self.group = group
        self.owner = weakref.ref(owner)
        self.options = settings.options
        self.caps = settings.caps
        self.is_sharded = settings.is_sharded
        self.in_python = settings.in_python
        self.wanted = settings.wanted
        self.follower = settings.follower
        self.manual_end = settings.manual_end
        self.buffers = BufferSynchronizer(
            enabled=settings.sync_buffers, wanted=settings.buffers_wanted, hook=settings.buffer_hook
        )
        self.hooks: list[tuple[Hook, object]] = []
        self.hook_changes = 0
        self.inputs = UnevenInputs()
        self.on_new_reducer: list[Callable[[GradientSynchronizer], None]] = []
        self.on_new_group: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.has_rebuilt_buckets = False
        self.forwards: dict[int, int] = {}
        self.step_agreed = True
        self.step_warnings: set[str] = set()
        self._look_at(parameters.survey(module, ignored), delayed)

    def _look_at(self, survey: Survey, delayed: Sequence[torch.nn.Parameter] = ()) -> None:
        """Reads the module's contents."""
        self.survey = survey
        self.module_parameters = list(survey.parameters.values())
        arguments.check_module(self.module, survey)
        tensors = self.module_parameters or list(delayed)
        if not tensors:
            raise RuntimeError(arguments.nothing_to_train(self.module))
        self.device = tensors[0].device
        self.buffers.keep(survey.buffers)

    @property
    def settings(self) -> Settings:
        """The settings of a copy of the model."""
        return Settings(
            options=self.options,
            caps=self.caps,
            sync_buffers=self.buffers.enabled,
            is_sharded=self.is_sharded,
            in_python=self.in_python,
            wanted=self.wanted,
            buffers_wanted=self.buffers.wanted,
            buffer_hook=self.buffers.hook,
            follower=self.follower,
            manual_end=self.manual_end,
        )

    # -- the reducer

    def agree(self, *, collective: bool) -> None:
        """Checks that all ranks have the same model, and gets its common number.

        Raises:
            RuntimeError: they differ, or a rank has nothing to train; raised on all ranks.
        """
        self.model_id = self._agree(self.survey, collective=collective)
        if not self.survey.trained:  # here, because it may be so only on this rank
            raise RuntimeError(arguments.nothing_to_train(self.module))

    def _agree(self, survey: Survey, *, collective: bool) -> int:
        options = {"bucket_cap_mb": self.caps.rebuilt_mb(), **self.options.agreed()}
        named = survey.buffers if self.buffers.enabled else {}
        entries = agreement.model_description(survey.parameters.items(), named.items(), options) if collective else []
        return agreement.agree(entries, self.group, self.device, collective=collective)

    def broadcast_state(self, *, with_buffers: bool) -> None:
        """Broadcasts rank 0's values of all that is not ignored, including frozen parameters."""
        tensors = [*self.module_parameters, *(self.buffers.tensors if with_buffers else ())]
        if tensors:
            values = [tensor.detach() for tensor in tensors]
            process_groups.broadcast_coalesced(values, self.group, arguments.BROADCAST_BYTES)

    def broadcast_coalesced(
        self,
        bufs: list[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcasts tensors (the buffers, if None) from a rank of the group; hooks may call it."""
        tensors = self.buffers.tensors if bufs is None else bufs
        size = arguments.BROADCAST_BYTES if bucket_size is None else bucket_size
        process_groups.broadcast_coalesced(tensors, self.group, size, authoritative_rank)

    def note_forward(self) -> None:
        """A synchronised forward has ended."""
        step = self.reducer.step()
        self.forwards[step] = self.forwards.get(step, 0) + 1
        if len(self.forwards) > _FORWARDS:
            del self.forwards[next(iter(self.forwards))]

    def build(self, *, generation: int = 0, step: int = 0, finished: int = 0) -> None:
        """Makes the reducer for the last survey, and notifies listeners."""
        self.seen: Seen = self.survey.seen
        self.idle_seen: Seen | None = None
        self.trained = TrainedParameters.of(self.survey)
        self.step_agreed = True
        self.has_rebuilt_buckets = False
        self.assignment = self._first_assignment()
        self.reducer = _C.Reducer(
            parameters=self.trained.tensors,
            names=self.trained.names,
            assignment=self.assignment,
            process_group=self.group,
            reducer_id=self.model_id,
            process_group_index=process_groups.group_index(self.group),
            expect_sparse=self.trained.sparse,
            module=module_text(self.module),
            **self.options.for_reducer(),
        )
        self.reducer.set_generation(generation)
        self.reducer.set_step(step)
        self.reducer.set_finished(finished)
        self.reducer._set_manual_finalization_required(self.manual_end)
        if self.reducer.sums_pieces():
            _learn_references()
        for hook, state in self.hooks:
            comm_hooks.attach(self.reducer, hook, state)
        for tell in self.on_new_reducer:
            tell(self)
        self.describe()

    def renew(self, survey: Survey) -> None:
        """Replaces the reducer by one for `survey`; on all ranks.

        Raises:
            RuntimeError: the last backward is unfinished, or the ranks' models differ.
        """
        old = self.reducer
        old.check_ended()
        self.buffers.keep(survey.buffers)
        self._agree(survey, collective=True)
        old.remove_hooks()
        self._look_at(survey)
        self.build(generation=old.generation() + 1, step=old.step(), finished=old.finished())

    def replace_group(self, group: dist.ProcessGroup) -> None:
        """Continues with another group, e.g. after a rejoin. Communicates at the next forward.

        Buckets return to the first layout, because a failure may have happened when only some ranks had rebuilt
        them. The caller must replace the state of a comm hook that refers to the old group. On a rank that is not in
        the new group only the buckets change.
        """
        if isinstance(group, dist.ProcessGroup):
            self.group = group
        self.assignment = self._first_assignment()
        self.has_rebuilt_buckets = False
        self.step_agreed = False
        for reference in self.on_new_group:
            tell = reference()
            if tell is not None:
                tell()
        self.reducer.update_process_group(self.group, process_groups.group_index(self.group), self.assignment)
        self.describe()

    def learn_graph(self) -> None:
        """Declares that the graph is the same in every step; before the first forward."""
        self.reducer.set_static_graph()
        self.options = replace(self.options, static_graph=True)

    # -- the buckets

    def _first_assignment(self) -> list[list[int]]:
        caps = self.caps.initial(find_unused=not self.options.assigns_anew)
        return assign_buckets(self.trained.bytes, self.trained.kinds, caps, alone=self.trained.sparse)

    def assigned(self, caps: BucketCaps, order: Sequence[int]) -> list[list[int]]:
        """The buckets that result from these size limits and this order of the parameters."""
        known, sparse = self.trained, self.trained.sparse
        return assign_buckets(known.bytes, known.kinds, caps.rebuilt(), order, alone=sparse, small_last=caps.small_last)

    @property
    def held_order(self) -> list[int]:
        """The parameters in the order of the current buckets."""
        return [index for bucket in self.assignment for index in bucket]

    @property
    def may_still_rebuild(self) -> bool:
        """Whether the buckets will be rebuilt in the order of readiness: see `DistributedDataParallel`."""
        return self.options.assigns_anew and not self.has_rebuilt_buckets

    def rebuild(self) -> None:
        """Rebuilds the buckets in the order in which rank 0's gradients became ready. Once; all ranks."""
        order = torch.tensor(self.reducer.ready_order(), dtype=torch.int64, device=self.device)
        process_groups.broadcast(order, self.group)
        self.reassign(order.tolist())

    def rebuild_if_due(self, sync: bool) -> None:
        """All communication of forwards about the order; `sync`: in a synchronised one."""
        if self.reducer.rebuild_due():
            self.rebuild()
        elif sync and self.follower is not None and self.follower.is_due():
            arrived = list(self.reducer.ready_order())
            order = self.follower.drifted(arrived, self.held_order, self.group, self.device)
            if order is not None:
                self.reassign(order)

    def reassign(self, order: list[int]) -> None:
        """Rebuilds the buckets in this order; the same on all ranks, between two backwards."""
        self.assignment = self.assigned(self.caps, order)
        self.reducer.rebuild(self.assignment)
        self.has_rebuilt_buckets = True
        self.describe()

    def buckets(self) -> tuple[BucketInfo, ...]:
        """See `DistributedDataParallel.buckets`."""
        times = self.reducer.bucket_times()
        generation = self.reducer.generation()
        known = self.trained
        return tuple(
            BucketInfo(
                index=index,
                parameters=tuple(known.names[i] for i in members),
                **buckets.buffer_of([known.tensors[i] for i in members], self.options.mixed_precision),
                rebuilt=self.has_rebuilt_buckets,
                generation=generation,
                times=buckets.times_of(times[index]),
            )
            for index, members in enumerate(self.assignment)
        )

    def describe(self) -> None:
        """Describes to the timeline the bucket layout to which the next events refer."""
        recording.describe(self.description(), owner=self)

    def description(self) -> dict[str, Any]:
        """The bucket layout's description for the timeline."""
        options = self.options
        return buckets.describe(
            self.assignment,
            dict(zip(self.trained.names, self.trained.tensors, strict=True)),
            self.group,
            options.mixed_precision,
            [index for index, is_sparse in enumerate(self.trained.sparse) if is_sparse],
            reducer=self.model_id,
            generation=self.reducer.generation(),
            first_step=self.reducer.step(),
            module=type(self.module).__name__,
            rebuilt=self.has_rebuilt_buckets,
            options=arguments.described_options(
                options,
                self.caps,
                averages_in_place=self.reducer.sums_pieces() and not (self.hooks or options.batched_grad_copy),
                comm_hook=self.hook_name,
            ),
        )

    # -- the comm hook

    @property
    def hook_name(self) -> str | None:
        """The comm hook's name on the timeline; None without one."""
        return comm_hooks.name_of_hook(self.hooks)

    def attach_hook(self, hook: Hook, state: object) -> None:
        """Averages with this hook.

        Raises:
            TypeError: it is not a hook.
            RuntimeError: there is one already, or mixed precision reduces the gradients itself.
        """
        if self.options.mixed_precision is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once: mixed_precision reduces "
                "gradients itself, so such a model can't have a comm hook"
            )
        comm_hooks.attach(self.reducer, hook, state)
        self.hooks.append((hook, state))
        self.hook_changes += 1

    def detach_hook(self) -> None:
        """Averages without a comm hook."""
        self.reducer.clear_comm_hook()
        self.hooks.clear()
        self.hook_changes += 1

    # -- forwards

    def synchronize_buffers(self) -> None:
        """Runs the buffer hook, or broadcasts the buffers of rank 0 (under join: of a rank that has not joined)."""
        source = self.inputs.source()
        self.look_up_buffers()
        if self.buffers.hook is None:
            named = self.buffers.named
            self.buffers.unchanged.before_broadcast(lambda: named, self.model_id, self.reducer.step())
        futures = self.buffers.run(self.group, source)
        if futures is not None:
            self.reducer.install_post_backward_futures(futures)

    def look_up_buffers(self) -> None:
        """Modules may have reassigned buffers."""
        self.buffers.keep(parameters.buffers_now(self.survey))

    @property
    def divisor(self) -> int:
        """The divisor of the sum of this backward's gradients over the ranks."""
        return self.inputs.divisor(self.group.size())

    # -- copies on other ranks

    def history(self) -> dict[str, Any]:
        """The state with which a copy on another rank continues, besides comm hooks."""
        return {
            "reducer_id": self.model_id,
            "generation": self.reducer.generation(),
            "step": self.reducer.step(),
            "finished": self.reducer.finished(),
        }

    def resume(self, history: Mapping[str, Any], hooks: Sequence[tuple[Any, object]]) -> None:
        """Continues as the model of this `history`, on all ranks, with a new reducer that they build together.

        Args:
            history: of this model, or of the model of which it is a copy.
            hooks: its comm hooks with their states, for a copy.
        """
        if not self.hooks:
            self.hooks = list(hooks)
        self.model_id = history["reducer_id"]
        self.reducer.set_generation(history["generation"])
        self.reducer.set_step(history["step"])
        self.reducer.set_finished(history["finished"])
        self.renew(parameters.survey(self.module, self.ignored))


def synchronizer_of(module: torch.nn.Module) -> GradientSynchronizer | None:
    """What averages the gradients of a model of our class; None for any other module."""
    found = getattr(vars(module).get("_runtime"), "sync", None)
    return found if isinstance(found, GradientSynchronizer) else None


@functools.cache
def _learn_references() -> None:
    """Facts that the reducer needs before it reduces gradients in place, once per process."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True)
        _C.learn_references(leaf)
        (leaf * 2.0).sum().backward()


class UnevenInputs:
    """The data that ranks exchange in each iteration of a join context; outside one, all ranks train.

    Attributes:
        config: of torch's `Join`, which sets it.
        divide_by_initial_world_size: divide gradients by the size of the group, not by the number of training ranks.
        warned: whether it warned of SyncBatchNorm in this context.
        last_joiner: the rank whose model all ranks got at the end of the last context; None before.
        work: the `Work` of the last row; the reducer divides by its result.
    """

    def __init__(self) -> None:
        self.config: Any = _JoinConfig.construct_disabled_join_config()
        self.divide_by_initial_world_size = True
        self.warned = False
        self.last_joiner: int | None = None
        self.work: Any = None
        self._row = torch.empty(0)

    @property
    def uneven(self) -> bool:
        """Whether this is inside a join context."""
        return bool(self.config.enable)

    def leave(self) -> None:
        """Ends the context, which torch does not. Later forwards do not communicate about it."""
        self.config = _JoinConfig.construct_disabled_join_config()

    def meet(self, group: dist.ProcessGroup, device: torch.device, *, active: bool, sync: bool) -> None:
        """Starts the all-reduce of one row: how many ranks are active, whether they synchronise, and which they are.

        Args:
            group: the model's.
            device: of its collectives.
            active: whether this rank trains.
            sync: whether its backward is synchronised.
        """
        row = torch.zeros(_RANKS + group.size(), dtype=torch.float32, device=device)
        if active:
            row[0] = 1
            row[1] = sync
            row[2] = torch.is_grad_enabled()
            row[_RANKS + group.rank()] = 1
        self._row, self.work = row, process_groups.all_reduce_async(row, group)

    def settle(self) -> list[float]:
        """The row, once all ranks have contributed: active ranks, those that synchronise, with gradients; each rank."""
        process_groups.finish(self.work)
        return list(self._row.tolist())

    def source(self) -> int:
        """The rank, in the model's group, whose buffers count in this iteration: rank 0 outside a join context."""
        if not self.uneven:
            return 0
        return max(rank for rank, is_active in enumerate(self.settle()[_RANKS:]) if is_active)

    def divisor(self, size: int) -> int:
        """The divisor of the sum of this backward's gradients over a group of `size` ranks."""
        if not self.uneven or self.divide_by_initial_world_size:
            return size
        return int(self.settle()[0])
