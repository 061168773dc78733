"""The most bytes of tensors that a rank holds in a training step, under other strategies than the recorded one.

[Note: how memory is predicted]
A recorded step is a list of marks: where forward and backward reach a module, where a gradient is there, where the
optimizer works. Between two marks the most bytes are known. What DDP holds at a mark is known, too: parameters,
buffers, gradients, buckets, the optimizer's state. The rest are activations and temporary tensors, and these are the
same under each strategy. So a strategy is predicted by going through the marks with what *it* holds instead.

For `fully_shard` these are, beside shards: the parameters of groups that are unsharded; the buffer of an all-gather,
which torch copies into parameters and keeps, in the forward, until the next group is unsharded; full gradients until
the backward of their group is complete; and the input of a reduce-scatter, which it keeps until the next one. Gloo
copies the output of an all-gather and the input of a reduce-scatter once more. Shards are padded to equal sizes. A
group of several modules is unsharded from the forward of its first module to that of its last one, and the other way
round in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from .parameter_groups import ParameterGroup, Sharding, groups_by_name, numbered_modules

__all__ = [
    "Mark",
    "MemoryPart",
    "ModuleUse",
    "ParameterMemory",
    "PredictedMemory",
    "RecordedMemory",
    "predict",
    "words_of",
]

_FOREACH = 4  # an optimizer that needs more than so many times its largest parameter handles many at once


class MemoryPart(str, Enum):
    """What a mark stands for; its text is in files."""

    BEGIN = "begin"  # of the step
    FORWARD = "forward"  # of a module
    FORWARD_END = "forward end"
    BACKWARD = "backward"  # the gradient of a module's output is known
    GRADIENT = "gradient"  # of a parameter is accumulated
    OPTIMIZER = "optimizer"
    OPTIMIZER_END = "optimizer end"
    END = "end"


@dataclass(frozen=True)
class Mark:
    """A point of the step.

    Attributes:
        part: which.
        index: of the module or the parameter; -1 for neither.
        bytes: held now.
        peak: the most bytes held since the last mark.
        gradients: bytes of parameters that have a gradient now.
    """

    part: MemoryPart
    index: int
    bytes: int
    peak: int
    gradients: int


@dataclass(frozen=True)
class ParameterMemory:
    """A parameter.

    Attributes:
        name: in the module that DDP wraps.
        shape: of the whole.
        bytes: of the whole.
        trained: it requires a gradient.
        state: bytes of the optimizer's tensors that have the parameter's shape.
        counters: bytes of its other tensors.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    trained: bool = True
    state: int = 0
    counters: int = 0


@dataclass(frozen=True)
class ModuleUse:
    """A module that the forward calls: its name, and whether any of its inputs requires a gradient."""

    name: str
    inputs_require_grad: bool = True


@dataclass(frozen=True)
class RecordedMemory:
    """A step of DDP on one rank.

    Attributes:
        parameters, modules: what indices of marks refer to.
        buffers: bytes.
        buckets: bytes that they take.
        views: gradients are views of the buckets.
        ranks: world size.
        copies: the backend copies gathered parameters, and gradients that it scatters, once more, as Gloo does.
        marks: in order of time, from `MemoryPart.BEGIN` to `MemoryPart.END`.
    """

    parameters: tuple[ParameterMemory, ...]
    modules: tuple[ModuleUse, ...]
    buffers: int
    buckets: int
    views: bool
    ranks: int
    copies: bool
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class PredictedMemory:
    """What a rank holds at the moment when it holds most: the attributes but `peak` and `where` add up to `peak`.

    Attributes:
        strategy: ``"ddp"``, ``"ddp, views"``, ``"zero-1"`` or ``"fully_shard"``.
        peak: the most bytes of tensors in a step.
        where: the part of the step, for example ``"backward of layers.3"``.
        parameters: bytes: all of them, or shards and unsharded groups; buffers of the model count here.
        gradients, buckets, optimizer: bytes.
        communication: bytes of buffers of all-gathers and reduce-scatters.
        activations: bytes of activations and temporary tensors.
    """

    strategy: str
    peak: int
    where: str
    parameters: int
    gradients: int
    buckets: int
    optimizer: int
    communication: int
    activations: int


def predict(
    recorded: RecordedMemory, strategy: str, *, ranks: int | None = None, sharding: Sharding | None = None
) -> PredictedMemory:
    """The peak of a rank under a strategy; of several ranks that differ, of the one that holds most.

    Args:
        recorded: a step of DDP.
        strategy: see `PredictedMemory`.
        ranks: world size; None: as recorded.
        sharding: for ``"fully_shard"``; None: `numbered_modules` are groups.

    Raises:
        ValueError: there is no such strategy; a group names no module; nothing was recorded.
    """
    ranks = recorded.ranks if ranks is None else ranks
    if ranks < 1:
        raise ValueError(f"a world size of {ranks} is not possible; give at least 1")
    if not recorded.marks:
        raise ValueError("the recorded step has no marks; measure a step with `ddp_lab.measure_memory`")
    if strategy == "fully_shard":
        return _Sharded(recorded, ranks, sharding or _usual(recorded)).predict()
    if strategy == "zero-1":
        shares = _partition(recorded.parameters, ranks)
        found = [_replicated(recorded, strategy, recorded.views, [share]) for share in shares if share]
        return max(found, key=lambda one: one.peak)
    if strategy in ("ddp", "ddp, views"):
        return _replicated(recorded, strategy, strategy != "ddp", [recorded.parameters])
    raise ValueError(f'there is no strategy {strategy!r}: choose "ddp", "ddp, views", "zero-1" or "fully_shard"')


def _usual(recorded: RecordedMemory) -> Sharding:
    names = [one.name for one in recorded.parameters]
    return Sharding(groups_by_name(names, numbered_modules(names)))


# ---- what the recorded step holds, and what any other does -----------------------------------------------------------


@dataclass
class _Held:
    """What a strategy holds at a moment, in bytes, without activations."""

    parameters: int = 0
    gradients: int = 0
    buckets: int = 0
    optimizer: int = 0
    communication: int = 0

    def total(self) -> int:
        return self.parameters + self.gradients + self.buckets + self.optimizer + self.communication


@dataclass
class _Peak:
    """The largest moment so far."""

    strategy: str
    found: PredictedMemory | None = None

    def see(self, held: _Held, activations: float, where: str) -> None:
        rest = max(0, round(activations))
        if self.found is None or held.total() + rest > self.found.peak:
            self.found = PredictedMemory(self.strategy, held.total() + rest, where, **vars(held), activations=rest)

    def result(self) -> PredictedMemory:
        assert self.found is not None
        return self.found


def _total(parameters: Iterable[ParameterMemory], size: Callable[[ParameterMemory], int]) -> int:
    return sum(size(one) for one in parameters)


def _state(one: ParameterMemory) -> int:
    return one.state + one.counters


def _trained(recorded: RecordedMemory) -> list[int]:
    return [one.bytes for one in recorded.parameters if one.trained]


def _recorded(recorded: RecordedMemory, mark: Mark) -> _Held:
    whole = recorded.parameters
    return _Held(
        parameters=_total(whole, lambda one: one.bytes) + recorded.buffers,
        gradients=0 if recorded.views else mark.gradients,
        buckets=recorded.buckets,
        optimizer=_total(whole, _state),
    )


def words_of(mark: Mark, modules: Sequence[ModuleUse], parameters: Sequence[str]) -> str:
    """The part of the step that begins with a mark, for readers.

    Args:
        mark: which.
        modules, parameters: what its index refers to: modules, names of parameters.
    """
    if mark.part in (MemoryPart.FORWARD, MemoryPart.FORWARD_END, MemoryPart.BACKWARD):
        of = modules[mark.index].name or "the model"
        after = mark.part is MemoryPart.FORWARD_END
        return f"after the forward of {of}" if after else f"{mark.part.value} of {of}"
    if mark.part is MemoryPart.GRADIENT:
        return f"backward, after the gradient of {parameters[mark.index]}"
    words = {MemoryPart.BEGIN: "before the forward", MemoryPart.OPTIMIZER: "optimizer"}
    return words.get(mark.part, "after the optimizer")


def _where(recorded: RecordedMemory, mark: Mark) -> str:
    return words_of(mark, recorded.modules, [one.name for one in recorded.parameters])


def _intervals(recorded: RecordedMemory) -> Iterable[tuple[Mark, int, int]]:
    """Each mark, bytes of activations at it, and the most until the next mark."""
    marks = recorded.marks
    for place, mark in enumerate(marks):
        known = _recorded(recorded, mark).total()
        most = marks[place + 1].peak if place + 1 < len(marks) else mark.bytes
        yield mark, mark.bytes - known, max(most, mark.bytes) - known


# [Note: an optimizer's temporary tensors]
# An optimizer that goes through its parameters one by one needs some tensors of the size of each, and the last of them
# lives until the next parameter has its own: so the order of parameters matters. `ZeroRedundancyOptimizer` sorts them
# by size. One that handles all parameters at once ("foreach") needs bytes in proportion to all of them.


def _optimizers_need(temporary: int, sizes: Sequence[int], mine: Sequence[float]) -> float:
    """Bytes of temporary tensors that an optimizer needs for other parameters.

    Args:
        temporary: what the recorded one needed.
        sizes: bytes of its parameters, in its order.
        mine: of the other ones, in theirs.
    """
    if not sizes or not mine:
        return 0.0
    if temporary > _FOREACH * max(sizes):
        return temporary * sum(mine) / sum(sizes)
    before = [0, *sizes[:-1]]
    factor = min((temporary - last) / size for last, size in zip(before, sizes, strict=True) if size)
    if factor < 1:  # nothing lives on
        return temporary * max(mine) / max(sizes)
    return max(last + factor * size for last, size in zip([0.0, *mine[:-1]], mine, strict=True))


# ---- DDP and ZeRO-1 --------------------------------------------------------------------------------------------------


def _partition(parameters: Sequence[ParameterMemory], ranks: int) -> list[list[ParameterMemory]]:
    """Whole parameters to ranks, the largest first, each to the rank that has least: as `ZeroRedundancyOptimizer`."""
    shares: list[list[ParameterMemory]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    trained = (one for one in parameters if one.trained)
    for one in sorted(trained, key=lambda one: math.prod(one.shape), reverse=True):
        rank = sizes.index(min(sizes))
        shares[rank].append(one)
        sizes[rank] += math.prod(one.shape)
    return shares


def _replicated(
    recorded: RecordedMemory, strategy: str, views: bool, optimized: Sequence[Sequence[ParameterMemory]]
) -> PredictedMemory:
    mine = [one for share in optimized for one in share]
    peak = _Peak(strategy)
    state = _total(mine, _state)
    for mark, _, most in _intervals(recorded):
        held = _recorded(recorded, mark)
        held.gradients, held.optimizer = 0 if views and recorded.buckets else mark.gradients, state
        if mark.part is MemoryPart.OPTIMIZER:
            most = round(_optimizers_need(most, _trained(recorded), [one.bytes for one in mine if one.trained]))
        peak.see(held, most, _where(recorded, mark))
    return peak.result()


# ---- fully_shard -----------------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """A parameter group: bytes, and the modules that its forward begins and ends with."""

    first: str
    last: str
    parameters: tuple[int, ...]  # indices
    shard: int = 0  # padded
    padded: int = 0  # all shards
    reduced: int = 0  # padded, of those with gradients
    missing: int = 0  # gradients that this backward has not made yet
    full: int = 0  # gradients that are there, not reduced


def _shard(one: ParameterMemory, ranks: int) -> int:
    rows = one.shape[0] if one.shape else 1
    return one.bytes // max(rows, 1) * math.ceil(rows / ranks)


def _largest_part(one: ParameterMemory, ranks: int) -> float:
    return _shard(one, ranks) / one.bytes if one.bytes else 0.0


def _groups(recorded: RecordedMemory, groups: Sequence[ParameterGroup], ranks: int) -> list[_Group]:
    """The groups; the last one is the root's, and may be empty.

    Raises:
        ValueError: a module was not called.
    """
    called = [one.name for one in recorded.modules]
    for name in (name for group in groups for name in group.modules):
        if name not in called:
            raise ValueError(f"no module {name!r} was called in the recorded step; groups are names of modules")
    begun, ended = (_modules(recorded, part) for part in (MemoryPart.FORWARD, MemoryPart.FORWARD_END))
    inside = {index for group in groups for index in group.parameters}
    root = ParameterGroup(("",), tuple(index for index in range(len(recorded.parameters)) if index not in inside))
    made = []
    for one in (*groups, root):
        first, last = (next((name for name in order if name in one.modules), "") for order in (begun, ended[::-1]))
        group = _Group(first, last, one.parameters)
        for parameter in (recorded.parameters[index] for index in one.parameters):
            shard = _shard(parameter, ranks)
            group.shard += shard
            group.padded += shard * ranks
            group.reduced += shard * ranks if parameter.trained else 0
        made.append(group)
    return made


def _modules(recorded: RecordedMemory, part: MemoryPart) -> list[str]:
    """The modules of all such marks, in order."""
    return [recorded.modules[mark.index].name for mark in recorded.marks if mark.part is part]


class _Sharded:
    """Goes through a recorded step as `fully_shard` would: see [Note: how memory is predicted]."""

    def __init__(self, recorded: RecordedMemory, ranks: int, sharding: Sharding) -> None:
        self._recorded, self._ranks, self._sharding = recorded, ranks, sharding
        self._groups = _groups(recorded, sharding.groups, ranks)
        self._root = self._groups[-1]
        self._group_of = {index: group for group in self._groups for index in group.parameters}
        self._begins = {group.first: group for group in self._groups}
        self._ends = {group.last: group for group in self._groups}
        self._trained = max(1, _total(recorded.parameters, lambda one: one.bytes if one.trained else 0))
        self._peak = _Peak("fully_shard")
        self._unsharded: list[_Group] = []
        self._gathered: _Group | None = None  # its buffer is still there
        self._ahead: list[_Group] = []  # prefetched, not copied out yet
        self._reducing = 0  # bytes of the last reduce-scatter's input
        begun = dict.fromkeys(_modules(recorded, MemoryPart.FORWARD))
        self._begun = [self._begins[name] for name in begun if name in self._begins]  # in the forward's order
        self._ended: list[_Group] = []  # in the order of the forwards' ends
        self._shards = 0  # bytes of sharded gradients

    def predict(self) -> PredictedMemory:
        in_backward = False
        for mark, now, most in _intervals(self._recorded):
            where = _where(self._recorded, mark)
            if not in_backward and mark.part is not MemoryPart.BACKWARD:
                self._shards = round(sum(g.reduced for g in self._groups) / self._ranks * self._part_alive(mark))
            if mark.part is MemoryPart.FORWARD:
                self._begin_forward(mark.index, now, where)
            elif mark.part is MemoryPart.FORWARD_END:
                self._end_forward(mark.index)
            elif mark.part is MemoryPart.BACKWARD:
                if not in_backward:
                    self._begin_backward(mark)
                in_backward = True
                self._backward(mark.index, now, where)
            elif mark.part is MemoryPart.GRADIENT:
                self._gradient(mark.index, now, where)
            elif mark.part is MemoryPart.OPTIMIZER:
                self._end_backward(now, "end of the backward")
                most = round(_optimizers_need(most, _trained(self._recorded), self._optimized()))
            self._see(most, where)
        return self._peak.result()

    def _part_alive(self, mark: Mark) -> float:
        return mark.gradients / self._trained

    def _optimized(self) -> list[float]:
        return [one.bytes * _largest_part(one, self._ranks) for one in self._recorded.parameters if one.trained]

    # ---- what is held

    def _held(self, communication: int = 0) -> _Held:
        every = self._recorded.parameters
        buffers = [self._reducing, *(one.padded for one in (self._gathered, *self._ahead) if one)]
        return _Held(
            parameters=sum(g.shard for g in self._groups)
            + sum(g.padded for g in self._unsharded)
            + self._recorded.buffers,
            gradients=self._shards + sum(group.full for group in self._groups),
            optimizer=sum(round(one.state * _largest_part(one, self._ranks)) + one.counters for one in every),
            communication=sum(buffers) + communication,
        )

    def _see(self, activations: int, where: str, communication: int = 0) -> None:
        self._peak.see(self._held(communication), activations, where)

    # ---- collectives

    def _gather(self, group: _Group, now: int, where: str) -> None:
        """The buffer, and while the backend copies one more; needs `group.padded` until it is copied out."""
        copy = group.padded if self._recorded.copies else 0
        self._see(now, f"all-gather, {where}", group.padded + copy)

    def _unshard(self, group: _Group, now: int, where: str, *, in_forward: bool) -> None:
        if group in self._unsharded or not group.parameters:
            return
        if group in self._ahead:
            self._ahead.remove(group)
        else:
            self._gather(group, now, where)
        if in_forward:
            self._gathered = None
        self._unsharded.append(group)
        self._see(now, f"all-gather, {where}", group.padded)
        if in_forward:
            self._gathered = group

    def _prefetch(self, groups: Iterable[_Group], now: int, where: str) -> None:
        for group in groups:
            if group.parameters and group not in self._unsharded and group not in self._ahead:
                self._gather(group, now, where)
                self._ahead.append(group)

    def _reduce(self, group: _Group, now: int, where: str) -> None:
        """The backward of the group is complete: its parameters are freed, its gradients reduced."""
        if group in self._unsharded:
            self._unsharded.remove(group)
        if not group.full:
            return
        self._reducing = 0
        self._see(now, f"reduce-scatter, {where}", group.reduced)
        group.full = 0
        self._shards += group.reduced // self._ranks
        self._reducing = group.reduced
        self._see(now, f"reduce-scatter, {where}", group.reduced if self._recorded.copies else 0)

    # ---- marks

    def _begin_forward(self, module: int, now: int, where: str) -> None:
        group = self._begins.get(self._recorded.modules[module].name)
        if group is not None:
            self._unshard(group, now, where, in_forward=True)
            place = self._begun.index(group)
            self._prefetch(self._begun[place + 1 :][: self._sharding.prefetch or 0], now, where)

    def _end_forward(self, module: int) -> None:
        group = self._ends.get(self._recorded.modules[module].name)
        if group is None:
            return
        self._ended.append(group)
        if group is self._root:
            self._gathered = None
        elif self._sharding.reshard_after_forward and group in self._unsharded:
            self._unsharded.remove(group)

    def _begin_backward(self, mark: Mark) -> None:
        self._gathered = None
        for group in self._groups:
            group.missing = sum(self._recorded.parameters[index].trained for index in group.parameters)

    def _backward(self, module: int, now: int, where: str) -> None:
        group = self._ends.get(self._recorded.modules[module].name)
        if group is None:
            return
        self._unshard(group, now, where, in_forward=False)
        place = self._ended.index(group) if group in self._ended else 0
        ahead = 1 if self._sharding.prefetch is None else self._sharding.prefetch
        self._prefetch(self._ended[:place][::-1][:ahead], now, where)

    def _gradient(self, parameter: int, now: int, where: str) -> None:
        group = self._group_of[parameter]
        group.full += self._recorded.parameters[parameter].bytes
        group.missing -= 1
        if group.missing == 0 and not self._ends_late(group):
            self._reduce(group, now, where)

    def _ends_late(self, group: _Group) -> bool:
        """No gradient of an input tells torch that the group's backward is complete: it waits for the end."""
        return not any(one.inputs_require_grad for one in self._recorded.modules if one.name == group.first)

    def _end_backward(self, now: int, where: str) -> None:
        for group in self._groups:
            self._reduce(group, now, where)
        self._reducing, self._ahead = 0, []
