"""Averages the gradients of one module over the ranks: its reducer, the buckets, the comm hook, the buffers.

[Note: who knows whom]
`DistributedDataParallel` holds a `GradientSynchronizer` and the features beside it (mixed precision, monitors, what is
asked of a model while it trains). Features know the synchronizer, which knows none of them: what they have to do with a
new reducer, or a new group, they put into its lists. All of it belongs to the thread that trains; what other threads
may ask is said where it is defined. Nothing here refers to the wrapper but weakly: a model goes when the user drops it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ... import native, recording
from ...bucketing import assign_buckets
from . import agreement, arguments, buckets, comm_hooks, parameters, process_groups
from .arguments import MEBIBYTE, BucketCaps, ReducerOptions
from .buckets import BucketInfo, OrderFollower
from .buffers import BufferSynchronizer
from .comm_hooks import Hook
from .parameters import Seen, Survey, TrainedParameters, module_text
from .uneven_inputs import UnevenInputs

__all__ = ["GradientSynchronizer"]

_C = native.load()


class GradientSynchronizer:
    """What averages the gradients of one module. See [Note: who knows whom].

    Args:
        module: what is trained.
        ignored: qualified names of parameters and buffers that are left alone.
        group: the ranks that train together.
        delayed: parameters that are averaged without it; they say the device of a module that has no others.
        owner: the wrapper, for what is given to its user.
        options, caps: how gradients are reduced, and where buckets are closed.
        sync_buffers, buffers_wanted, buffer_hook: see `BufferSynchronizer`.
        is_sharded: over the other dimensions of a device mesh, so that forwards replace parameters.
        in_python, wanted, follower, manual_end: the attributes of these names; with the above they are `settings`.

    Attributes:
        device: of the parameters, and of what the ranks tell each other.
        manual_end: the caller ends each backward: [Note: a backward that the caller ends].
        wanted: the next backward is to be averaged; False under `no_sync`.
        survey: what the module held when the reducer was built.
        seen, idle_seen: when it was looked at last; when all parameters were frozen.
        trained: what the reducer knows by their index.
        reducer: `ddp_lab._C.Reducer`; missing before `build`.
        reducer_id: the number of the model, equal on all its ranks.
        assignment: for each bucket, in the order of launch, the indices of its parameters.
        has_rebuilt_buckets: whether the order of readiness has decided it.
        follower: follows the order of readiness further; None: it does not.
        hooks: comm hooks with their states.
        hook_changes: how often these have changed.
        in_python: gradients are averaged without the reducer: [Note: the Python reducer].
        step_agreed: whether the ranks count their steps alike; they may not after a failure.
        buffers, inputs: the module's buffers; who still has inputs.
        on_new_reducer: called with this object whenever there is a new reducer.
        on_new_group: called when the ranks are others; weak, since who listens holds this object.
    """

    reducer: Any
    reducer_id: int

    def __init__(
        self,
        module: torch.nn.Module,
        ignored: set[str],
        group: dist.ProcessGroup,
        *,
        owner: torch.nn.Module,
        options: ReducerOptions,
        caps: BucketCaps,
        sync_buffers: bool,
        is_sharded: bool = False,
        in_python: bool = False,
        delayed: Sequence[torch.nn.Parameter] = (),
        wanted: bool = True,
        buffers_wanted: bool = True,
        buffer_hook: Any = None,
        follower: OrderFollower | None = None,
        manual_end: bool = False,
    ) -> None:
        self.module = module
        self.ignored = ignored
        self.group = group
        self.owner = weakref.ref(owner)
        self.options = options
        self.caps = caps
        self.is_sharded = is_sharded
        self.in_python = in_python
        self.wanted = wanted
        self.follower = follower
        self.manual_end = manual_end
        self.hooks: list[tuple[Hook, object]] = []
        self.hook_changes = 0
        self.buffers = BufferSynchronizer(enabled=sync_buffers, wanted=buffers_wanted, hook=buffer_hook)
        self.inputs = UnevenInputs()
        self.on_new_reducer: list[Callable[[GradientSynchronizer], None]] = []
        self.on_new_group: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.has_rebuilt_buckets = False
        self.step_agreed = True
        self._look_at(parameters.survey(module, ignored), delayed)

    def _look_at(self, survey: Survey, delayed: Sequence[torch.nn.Parameter] = ()) -> None:
        """Takes what the module holds."""
        self.survey = survey
        self.module_parameters = list(survey.parameters.values())
        arguments.check_module(self.module, survey)
        tensors = self.module_parameters or list(delayed)
        if not tensors:
            raise RuntimeError(arguments.nothing_to_train(self.module))
        self.device = tensors[0].device
        self.buffers.keep(survey.buffers)

    @property
    def settings(self) -> dict[str, Any]:
        """What a copy of the model is built with; see [Note: a copy of a model]."""
        return {
            "options": self.options,
            "caps": self.caps,
            "is_sharded": self.is_sharded,
            "in_python": self.in_python,
            "wanted": self.wanted,
            "sync_buffers": self.buffers.enabled,
            "buffers_wanted": self.buffers.wanted,
            "buffer_hook": self.buffers.hook,
            "follower": self.follower,
            "manual_end": self.manual_end,
        }

    # -- the reducer

    def agree(self, *, collective: bool) -> None:
        """Checks that all ranks have the same model, and takes the number that they give to it.

        Raises:
            RuntimeError: they have not; or, on all ranks, there is nothing to train on one.
        """
        self.reducer_id = self._agree(self.survey, collective=collective)
        if not self.survey.trained:  # here, because it may be so on this rank alone
            raise RuntimeError(arguments.nothing_to_train(self.module))

    def _agree(self, survey: Survey, *, collective: bool) -> int:
        options = {
            "bucket_cap_mb": [cap / MEBIBYTE for cap in self.caps.rebuilt()],
            "find_unused_parameters": self.options.find_unused_parameters,
            "static_graph": self.options.static_graph,
            "skip_all_reduce_unused_params": self.options.skip_all_reduce_unused_params,
        }
        named = survey.buffers if self.buffers.enabled else {}
        entries = agreement.model_description(survey.parameters.items(), named.items(), options) if collective else []
        return agreement.agree(entries, self.group, self.device, collective=collective)

    def broadcast_state(self, *, with_buffers: bool) -> None:
        """Makes all that is not ignored rank 0's, also frozen parameters."""
        tensors = [*self.module_parameters, *(self.buffers.tensors if with_buffers else ())]
        if tensors:
            values = [tensor.detach() for tensor in tensors]
            process_groups.broadcast_coalesced(values, self.group, arguments.BROADCAST_BYTES)

    def build(self, *, generation: int = 0, step: int = 0, finished: int = 0) -> None:
        """Makes the reducer for what the last survey found, and tells whom it concerns."""
        self.seen: Seen = self.survey.seen
        self.idle_seen: Seen | None = None
        self.trained = TrainedParameters.of(self.survey)
        self.step_agreed = True
        self.has_rebuilt_buckets = False
        self.assignment = self._first_assignment()
        options = {name: value for name, value in vars(self.options).items() if name != "mixed_precision"}
        self.reducer = _C.Reducer(
            parameters=self.trained.tensors,
            names=self.trained.names,
            assignment=self.assignment,
            process_group=self.group,
            reducer_id=self.reducer_id,
            process_group_index=agreement.process_group_index(self.group),
            expect_sparse=self.trained.sparse,
            module=module_text(self.module),
            **options,
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
        """Puts a reducer for what `survey` found in the place of the old one; all ranks.

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
        """Goes on with other ranks, e.g. after a rejoin. Communicates at the next forward.

        Buckets go back to the first assignment, because a failure may have struck when only some ranks had
        rebuilt them. State of a comm hook that holds the old group is the caller's to replace. On a rank that is
        not in the new group only the buckets change.
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
        self.reducer.update_process_group(self.group, agreement.process_group_index(self.group), self.assignment)
        self.describe()

    def learn_graph(self) -> None:
        """The graph is the same in every step from now on; before the first forward."""
        self.reducer.set_static_graph()
        self.options = replace(self.options, static_graph=True)

    # -- the buckets

    def _first_assignment(self) -> list[list[int]]:
        caps = self.caps.initial(find_unused=not self.options.assigns_anew)
        return assign_buckets(self.trained.bytes, self.trained.kinds, caps, alone=self.trained.sparse)

    def assigned(self, caps: BucketCaps, order: Sequence[int]) -> list[list[int]]:
        """The buckets that these caps and this order of the parameters would make."""
        known, sparse = self.trained, self.trained.sparse
        return assign_buckets(known.bytes, known.kinds, caps.rebuilt(), order, alone=sparse, small_last=caps.small_last)

    @property
    def held_order(self) -> list[int]:
        """The parameters in the order of the present buckets."""
        return [index for bucket in self.assignment for index in bucket]

    @property
    def may_still_rebuild(self) -> bool:
        """Whether the buckets will be assigned in the order of readiness after the first backward."""
        return self.options.assigns_anew and not self.has_rebuilt_buckets

    def rebuild(self) -> None:
        """Assigns the buckets anew in the order in which rank 0's gradients became ready. Once; all ranks."""
        order = torch.tensor(self.reducer.ready_order(), dtype=torch.int64, device=self.device)
        process_groups.broadcast(order, self.group)
        self.reassign(order.tolist())

    def rebuild_if_due(self, sync: bool) -> None:
        """Everything that forwards communicate about the order, `sync`: in a synchronised one."""
        if self.reducer.rebuild_due():
            self.rebuild()
        elif sync and self.follower is not None and self.follower.is_due():
            arrived = list(self.reducer.ready_order())
            order = self.follower.drifted(arrived, self.held_order, self.group, self.device)
            if order is not None:
                self.reassign(order)

    def reassign(self, order: list[int]) -> None:
        """Assigns the buckets anew in this order; on all ranks alike, between two backwards."""
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
        """Tells the timeline of the assignment that the next events refer to."""
        recording.describe(self.description(), owner=self)

    def description(self) -> dict[str, Any]:
        """The assignment as the timeline is told of it."""
        options, caps = self.options, self.caps
        return buckets.describe(
            self.assignment,
            dict(zip(self.trained.names, self.trained.tensors, strict=True)),
            self.group,
            options.mixed_precision,
            reducer=self.reducer_id,
            generation=self.reducer.generation(),
            first_step=self.reducer.step(),
            module=type(self.module).__name__,
            rebuilt=self.has_rebuilt_buckets,
            options={
                "find_unused_parameters": options.find_unused_parameters,
                "static_graph": options.static_graph,
                "gradient_as_bucket_view": options.gradient_as_bucket_view,
                "batched_grad_copy": options.batched_grad_copy,
                "averages_in_place": self.reducer.sums_pieces() and not (self.hooks or options.batched_grad_copy),
                "bucket_cap_mb": caps.others / MEBIBYTE,
                "bucket_cap_mb_list": [cap / MEBIBYTE for cap in caps.rebuilt()],
                "comm_hook": self.hook_name,
            },
        )

    # -- the comm hook

    @property
    def hook_name(self) -> str | None:
        """What the timeline calls the comm hook; None without one."""
        return comm_hooks.name_of_hook(self.hooks)

    def attach_hook(self, hook: Hook, state: object) -> None:
        """Averages with this hook.

        Raises:
            TypeError: it is no hook.
            RuntimeError: there is one already, or gradients are reduced in a way of their own.
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
        futures = self.buffers.run(self.group, source)
        if futures is not None:
            self.reducer.install_post_backward_futures(futures)

    def look_up_buffers(self) -> None:
        """Modules may have assigned buffers anew."""
        self.buffers.keep(parameters.buffers_now(self.survey))

    @property
    def divisor(self) -> int:
        """What a sum of this backward's gradients over the ranks is to be divided by."""
        return self.inputs.divisor(self.group.size())

    # -- copies on other ranks

    def history(self) -> dict[str, Any]:
        """What a copy on another rank has to continue with, besides comm hooks."""
        return {
            "reducer_id": self.reducer_id,
            "generation": self.reducer.generation(),
            "step": self.reducer.step(),
            "finished": self.reducer.finished(),
        }

    def resume(self, history: Mapping[str, Any], hooks: Sequence[tuple[Any, object]]) -> None:
        """Goes on as the model whose `history` this is, on all ranks: with a new reducer, built together.

        Args:
            history: of the model that this one is, or is a copy of.
            hooks: its comm hooks with their states, for a copy.
        """
        if not self.hooks:
            self.hooks = list(hooks)
        self.reducer_id = history["reducer_id"]
        self.reducer.set_generation(history["generation"])
        self.reducer.set_step(history["step"])
        self.reducer.set_finished(history["finished"])
        self.renew(parameters.survey(self.module, self.ignored))


@functools.cache
def _learn_references() -> None:
    """What the reducer has to know before it reduces gradients in place, once for each process."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True)
        _C.learn_references(leaf)
        (leaf * 2.0).sum().backward()
