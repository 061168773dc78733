"""Simulation of a step: a recorded (or synthetic) workload with other buckets, hooks, world sizes and links.

The launches come from the reducer's own schedule (`ddp_lab._schedule`) and the reducer's own bucket layout; the times
are explained in [Note: the replay's model] in `csrc/reduce/replay.h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from .._schedule import Replay
from ..analysis.step_metrics import covered
from ..bucketing import assign_buckets
from .link_model import CommModel
from .workload import StepTimes, Workload

__all__ = ["Assignment", "Configuration", "Hook", "Prediction", "Predictions", "caps_of", "simulate", "simulate_many"]

_Floats = npt.NDArray[np.float64]
_MEBIBYTE = 1024 * 1024
_FIRST_CAP, _OTHER_CAPS = 1 * _MEBIBYTE, 25 * _MEBIBYTE  # torch's defaults
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Hook:
    """The cost of a comm hook.

    Attributes:
        bytes_factor: communicated bytes divided by the bucket's bytes (0.5 for fp16).
        ns_per_byte: computation per byte of the bucket, before it is sent.
        ns: computation per bucket, before it is sent.
        after_ns_per_byte: computation per byte of the bucket, after it was received.
    """

    bytes_factor: float = 1.0
    ns_per_byte: float = 0.0
    ns: float = 0.0
    after_ns_per_byte: float = 0.0


@dataclass(frozen=True)
class Configuration:
    """The configuration to simulate. The defaults are those of the constructor of `DistributedDataParallel`.

    Attributes:
        bucket_cap_mb: bucket size limit in MiB: a number, one for each bucket (the last one repeats), or None: a first
            bucket of 1 MiB and others of 25. 0 makes a bucket for each parameter, `math.inf` a single bucket.
        order: the order in which parameters fill buckets; None: the order of readiness; "registration": the reverse
            of registration.
        hook: a comm hook instead of the recorded one (`Hook()`: a plain all-reduce); None: as recorded.
        sync_every: gradients are averaged in one of this many backwards (`no_sync` for the others); times are then
            averages over them, and the part outside of forward and backward happens once.
        world_size: number of ranks; None: as recorded. All ranks are assumed to behave like the recorded ones.
        overlap: False: no bucket is launched before the backward's computation is over.
        jitter_ns: standard deviation of each rank's computation from step to step beyond the recorded ranks. All wait
            for the slowest of n: `jitter_ns` * sqrt(2 ln n) is added to the step (the bound on the expected maximum
            of n normal deviates).
    """

    bucket_cap_mb: float | Sequence[float] | None = None
    order: Sequence[int] | str | None = None
    hook: Hook | None = None
    sync_every: int = 1
    world_size: int | None = None
    overlap: bool = True
    jitter_ns: float = 0.0

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ValueError(f"sync_every must be at least 1, got {self.sync_every}")
        if self.world_size is not None and self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if isinstance(self.order, str) and self.order != "registration":
            raise ValueError(f'order={self.order!r} is not valid; use "registration", None or the parameters\' indices')


def caps_of(bucket_cap_mb: float | Sequence[float] | None) -> tuple[int, ...]:
    """Caps in bytes, in the order of launch, as the constructor makes them of its argument."""
    if bucket_cap_mb is None:
        return (_FIRST_CAP, _OTHER_CAPS)
    given = bucket_cap_mb if isinstance(bucket_cap_mb, Sequence) else (bucket_cap_mb,)
    caps = tuple(int(min(cap * _MEBIBYTE, _UNLIMITED)) for cap in given)
    if not caps or min(caps) < 0:
        raise ValueError(f"bucket_cap_mb must be at least 0, got {bucket_cap_mb}")
    return caps


@dataclass(frozen=True)
class Assignment:
    """Which parameters share a bucket."""

    buckets: tuple[tuple[int, ...], ...]
    bucket_of: npt.NDArray[np.int32]
    bytes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, workload: Workload, configuration: Configuration, known: dict[Any, Assignment]) -> Assignment:
        """The buckets of a workload with this configuration; `known` keeps those that were found before."""
        order: tuple[int, ...] | None = workload.order
        if configuration.order == "registration":
            order = None
        elif configuration.order is not None:
            order = tuple(int(index) for index in configuration.order)
        caps = caps_of(configuration.bucket_cap_mb)
        key = (caps, order if configuration.order is not None else "ready")
        if key not in known:
            found = assign_buckets(workload.sizes.tolist(), workload.keys, caps, order)
            bucket_of = np.empty(len(workload.sizes), np.int32)
            bucket_of[[index for bucket in found for index in bucket]] = np.repeat(
                np.arange(len(found), dtype=np.int32), [len(bucket) for bucket in found]
            )
            size = np.bincount(bucket_of, workload.sizes, len(found)).astype(np.int64)
            known[key] = cls(tuple(map(tuple, found)), bucket_of, size)
        return known[key]


@dataclass(frozen=True)
class Prediction(StepTimes):
    """One configuration's step; its parts are those of the rank whose computation ends last.

    The forward ends when the backward begins. Exposed is communication after the computation; with jitter, also the
    wait for the slowest rank; and `Workload.waits_ns`. Writing gradients back is a part of the rest.

    Attributes:
        buckets: parameters of each bucket, in launch order.
        bytes: size of each bucket's buffer.
        ready_ns: when each rank had all of a bucket's gradients, from the step's begin, ``[ranks, buckets]``.
        launched_ns: when it launched it, ``[ranks, buckets]``.
        begun_ns: when its collective could begin, ``[buckets]``.
        reduced_ns: when it was complete, ``[buckets]``.
        gradients_ns: when each gradient was ready, ``[ranks, parameters]``.
        begin_ns: each rank's begin of backward, ``[ranks]``.
        computed_ns: end of its computation, ``[ranks]``.
        end_ns: end of its backward, ``[ranks]``.
    """

    buckets: tuple[tuple[int, ...], ...]
    bytes: npt.NDArray[np.int64]
    ready_ns: _Floats
    launched_ns: _Floats
    begun_ns: _Floats
    reduced_ns: _Floats
    gradients_ns: _Floats
    begin_ns: _Floats
    computed_ns: _Floats
    end_ns: _Floats


@dataclass(frozen=True)
class Predictions:
    """Many configurations' steps: one array of shape ``[configurations]`` for each of `Prediction`'s times."""

    step_ns: _Floats
    forward_ns: _Floats
    compute_ns: _Floats
    hidden_ns: _Floats
    exposed_ns: _Floats
    other_ns: _Floats


def simulate(workload: Workload, configuration: Configuration, link: CommModel) -> Prediction:
    """Predicts one configuration's step, with the times of every bucket.

    Args:
        workload: what each rank computes.
        configuration: the configuration to simulate.
        link: the communication model of the all-reduce.
    """
    return _Run(workload, [configuration], [link]).prediction()


def simulate_many(
    workload: Workload, configurations: Sequence[Configuration], links: CommModel | Sequence[CommModel]
) -> Predictions:
    """Predicts the steps of many configurations at once.

    Args:
        workload: what each rank computes.
        configurations: the configurations to simulate.
        links: one for all of them, or one for each.

    Raises:
        ValueError: the number of links differs from the number of configurations.
    """
    each = [links] * len(configurations) if isinstance(links, CommModel) else list(links)
    if len(each) != len(configurations):
        raise ValueError(f"{len(configurations)} configurations, but {len(each)} links")
    found = {field.name: np.zeros(len(configurations)) for field in fields(Predictions)}
    # What differs in contention or overlap starts from other times of readiness: one replay each.
    groups: dict[tuple[float, bool], list[int]] = {}
    for index, (configuration, link) in enumerate(zip(configurations, each, strict=True)):
        groups.setdefault((link.compute_slowdown, configuration.overlap), []).append(index)
    for chosen in groups.values():
        run = _Run(workload, [configurations[index] for index in chosen], [each[index] for index in chosen])
        for name, values in run.totals().items():
            found[name][chosen] = values
    return Predictions(**found)


class _Run:
    """Configurations that share slowdown and overlap, replayed together."""

    def __init__(self, workload: Workload, configurations: list[Configuration], links: list[CommModel]) -> None:
        self.base = workload.alone(links[0].compute_slowdown)
        self.configurations, self.links, self.world_size = configurations, links, workload.world_size
        known: dict[Any, Assignment] = {}
        self.assignments = [Assignment.of(workload, one, known) for one in configurations]
        most = max(len(one.bytes) for one in self.assignments)
        self.costs = {name: np.zeros((len(links), most)) for name in ("launch", "latency", "transfer", "write_back")}
        self._fill_costs()
        contention = [(one.compute_slowdown, one.comm_slowdown, one.sharing, one.lanes) for one in links]
        self.begin = self.base.other_ns + self.base.forward_ns
        ready = self.base.ready_ns
        if not configurations[0].overlap:
            ready = np.repeat(self.base.computed_ns[:, None], ready.shape[1], axis=1)
        replay = Replay(ready, self.begin, self.base.computed_ns)
        of = np.stack([one.bucket_of for one in self.assignments])
        found = replay.run(of, **self.costs, contention=np.asarray(contention, np.float64))
        self.launched, self.begun, self.reduced, self.computed, self.end = found

    def _fill_costs(self) -> None:
        fixed, per_byte = self.base.write_back_ns
        for row, (one, link) in enumerate(zip(self.configurations, self.links, strict=True)):
            size = self.assignments[row].bytes.astype(np.float64)
            hook, count = one.hook or Hook(), len(size)
            world = one.world_size or self.world_size
            travels = self.base.carried if one.hook is None else self.base.buffered * hook.bytes_factor
            latency, transfer = link.parts(size * travels, world)
            self.costs["latency"][row, :count], self.costs["transfer"][row, :count] = latency, transfer
            self.costs["launch"][row, :count] = link.launch_ns + hook.ns + hook.ns_per_byte * size
            self.costs["write_back"][row, :count] = fixed + (per_byte + hook.after_ns_per_byte) * size

    def totals(self) -> dict[str, _Floats]:
        """The times of `Predictions`."""
        rows = np.arange(len(self.configurations))
        last = self.computed.argmax(axis=1)  # and so the last one to end: all wait for the same buckets
        end, computed = self.end[rows, last], self.computed[rows, last]
        begin, forward = self.begin[last], self.base.forward_ns[last]
        valid = np.arange(self.begun.shape[1])[None, :] < [[len(one.bytes)] for one in self.assignments]
        reduced = np.where(valid, self.reduced, 0).max(axis=1)
        compute, exposed = computed - begin, np.maximum(reduced - computed, 0)
        hidden_end = np.minimum(self.reduced, computed[:, None])
        shown = valid & (hidden_end > self.begun)
        under = covered(self.begun.astype(np.int64), hidden_end.astype(np.int64), shown)
        every = np.array([one.sync_every for one in self.configurations], np.float64)
        # Backwards that only accumulate: computation alone.
        alone = self.base.computed_ns[last]
        compute = (compute + (every - 1) * alone) / every
        other = (end - forward - (computed - begin) - exposed) / every
        # For the slowest of all ranks, see `Configuration.jitter_ns`.
        worlds = np.array([one.world_size or self.world_size for one in self.configurations], np.float64)
        slowest = np.array([one.jitter_ns for one in self.configurations]) * np.sqrt(2 * np.log(worlds))
        exposed = (exposed + slowest) / every
        hidden = under / every
        # What is less than nothing of the waiting is less of the rest.
        waiting = exposed + self.base.waits_ns / every
        exposed, other = np.maximum(waiting, 0), other + np.minimum(waiting, 0)
        return {
            "step_ns": forward + compute + exposed + other,
            "forward_ns": forward,
            "compute_ns": compute,
            "hidden_ns": hidden,
            "exposed_ns": exposed,
            "other_ns": other,
        }

    def prediction(self) -> Prediction:
        """The first configuration, with its buckets."""
        totals = {name: float(values[0]) for name, values in self.totals().items()}
        assignment = self.assignments[0]
        count = len(assignment.bytes)
        launched, reduced = self.launched[0, :, :count], self.reduced[0, :count]
        gradients = self._gradients(assignment)
        ready = np.stack([gradients[:, list(bucket)].max(axis=1) for bucket in assignment.buckets], axis=1)
        return Prediction(
            **totals,
            buckets=assignment.buckets,
            bytes=assignment.bytes,
            ready_ns=ready,
            launched_ns=np.maximum(launched, ready),
            begun_ns=self.begun[0, :count],
            reduced_ns=reduced,
            gradients_ns=gradients,
            begin_ns=self.begin,
            computed_ns=self.computed[0],
            end_ns=self.end[0],
        )

    def _gradients(self, assignment: Assignment) -> _Floats:
        """When each gradient is ready, with what contention and launches have added to the computation."""
        made = np.empty_like(self.base.ready_ns)
        launch = self.costs["launch"][0]
        for rank in range(self.base.ranks):
            ready = self.base.ready_ns[rank]
            needed = np.array([ready[list(bucket)].max() for bucket in assignment.buckets])
            order = np.maximum.accumulate(needed) + np.cumsum(launch[: len(needed)])
            computed = self.base.computed_ns[rank] + launch.sum()
            # The replay gives the times of launches and of the end; in between time passes evenly.
            known = np.concatenate([[0.0], order, [max(computed, order[-1])]])
            times = [self.begin[rank], *self.launched[0, rank, : len(needed)], self.computed[0, rank]]
            added = np.concatenate([[0.0], np.cumsum(launch[: len(needed)])])
            before = np.searchsorted(np.maximum.accumulate(needed), ready, side="left")
            made[rank] = np.interp(ready + added[before], known, np.asarray(times))
        return made
