"""Sharded steps counted by hand, their laws, and groups by the names of modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.simulation.link_model import CommModel
from ddp_lab.simulation.parameter_groups import ParameterGroup, Sharding
from ddp_lab.simulation.parameter_groups import groups_by_name as named_groups
from ddp_lab.simulation.sharding import (
    Cost,
    ShardedStep,
    ShardedWorkload,
    ShardingCosts,
    simulate_sharded,
    simulate_zero_1,
)

MS = 1e6
MIB = 1 << 20
NAMES = ("embedding.weight", "layers.0.up.weight", "layers.0.down.weight", "layers.1.up.weight", "head")


def groups_of(*parameters: tuple[int, ...]) -> tuple[ParameterGroup, ...]:
    """Groups of these parameters, whose modules don't matter for times."""
    return tuple(ParameterGroup((), one) for one in parameters)


EACH = groups_of((0,), (1,), (2,))


def groups_by_name(names: tuple[str, ...], groups: Any) -> tuple[tuple[int, ...], ...]:
    """The parameters of the groups."""
    return tuple(one.parameters for one in named_groups(names, groups))


def workload(layers: int = 3, *, ranks: int = 2) -> ShardedWorkload:
    """Layers of 1 MiB that take 10 ms forward and 20 ms backward; the optimizer 8 ms, the rest 5 ms."""
    return ShardedWorkload(
        names=tuple(f"{number}.weight" for number in range(layers)),
        sizes=np.full(layers, MIB),
        order=tuple(range(layers)),
        forward_ns=np.full((1, 1, layers), 10 * MS),
        backward_ns=np.full((1, 1, layers), 20 * MS),
        optimizer_ns=8 * MS,
        other_ns=5 * MS,
        ranks=ranks,
    )


def costs(gather: float = 4, reduce: float = 6, *, copies: float = 0, contention: float = 0) -> ShardingCosts:
    """Milliseconds for each MiB."""
    each = [Cost(byte_ns=ms * MS / MIB) for ms in (gather, reduce, copies, copies, gather)]
    return ShardingCosts(*each, contention=contention)


def test_where_the_host_waits_all_adds_up() -> None:
    """3 groups gather twice and reduce; without resharding, or in one group, they gather once; one group ahead only the
    first is waited for."""
    found = simulate_sharded(workload(), Sharding(EACH), costs())
    assert found.exposed_ns == pytest.approx((24 + 18) * MS)
    assert (found.forward_ns, found.compute_ns, found.other_ns) == pytest.approx((30 * MS, 60 * MS, 9 * MS))
    assert found.step_ns == pytest.approx((24 + 18 + 90 + 9) * MS)
    kept = simulate_sharded(workload(), Sharding(EACH, reshard_after_forward=False), costs())
    whole = simulate_sharded(workload(), Sharding(), costs())
    for found in (kept, whole):
        assert found.exposed_ns == pytest.approx((12 + 18) * MS)
    assert whole.groups == ((0, 1, 2),)
    found = simulate_sharded(workload(), Sharding(EACH, prefetch=1), costs())
    assert found.exposed_ns == pytest.approx((4 + 12 + 18) * MS)
    assert found.hidden_ns == pytest.approx(8 * MS)
    late = simulate_sharded(workload(), Sharding(EACH, prefetch=1), costs(gather=14))
    assert late.exposed_ns == pytest.approx((14 + 4 + 4 + 3 * 14 + 18) * MS)


def test_streams_and_contention() -> None:
    """On devices: the first gathering of each pass, and the reduction of the last group, are exposed. With full
    contention a step with prefetching takes as long as without; half of it leaves half of the gain."""
    found = simulate_sharded(workload(), Sharding(EACH), costs(), waits="streams")
    assert found.exposed_ns == pytest.approx((4 + 4 + 6) * MS)
    assert found.step_ns == pytest.approx((90 + 14 + 9) * MS)
    slow = simulate_sharded(workload(), Sharding(EACH, reshard_after_forward=False), costs(reduce=50), waits="streams")
    # Reductions of 50 follow each other from the end of the first backward, at 4 + 30 + 20.
    assert slow.step_ns == pytest.approx((54 + 150 + 9) * MS)
    plain, ahead = (
        [simulate_sharded(workload(), Sharding(EACH, prefetch=depth), costs(contention=c)).step_ns for c in (0, 0.5, 1)]
        for depth in (None, 1)
    )
    assert plain == pytest.approx([plain[0]] * 3)
    assert plain[0] - np.array(ahead) == pytest.approx([8 * MS, 4 * MS, 0], abs=1)


def test_copies_tensors_and_world_sizes() -> None:
    """Copies are computation: half of the gathering's before its collective, half after it. A ring of 8 sends 7/8 of
    the bytes instead of 1/2, in 7 messages; a single rank sends nothing."""
    found = simulate_sharded(workload(), Sharding(EACH), costs(copies=2))
    assert (found.forward_ns, found.compute_ns) == pytest.approx(((30 + 6) * MS, (60 + 6 + 6) * MS))
    made = replace(costs(), gathering=Cost(MS, 2 * MS), optimizer_ns=MS)
    assert simulate_sharded(workload(), Sharding(), made).forward_ns == pytest.approx((30 + 1 + 6) * MS)
    assert simulate_sharded(workload(), Sharding(), made).other_ns == pytest.approx((5 + 4 + 3) * MS)
    made = costs()
    assert Cost(2.0, 3.0, 4.0).over(8, 2) == Cost(14.0, 3.0, 7.0)
    found = simulate_sharded(workload(), Sharding(), made, ranks=8)
    assert found.exposed_ns == pytest.approx((12 + 18) * 7 / 4 * MS)
    assert found.other_ns == pytest.approx((5 + 1) * MS)
    alone = simulate_sharded(workload(), Sharding(), made, ranks=1)
    assert (alone.exposed_ns, alone.other_ns) == pytest.approx((0, 13 * MS))


def test_zero_1_and_fitted_costs() -> None:
    """Sizes 2, 1, 1 on 2 ranks: each updates half. Of three equal ones a rank updates two; all are broadcast. The parts
    of a cost come back from its times; an all-reduce is split into two halves."""
    step = ShardedStep(100 * MS, 20 * MS, 50 * MS, 5 * MS, 10 * MS, 20 * MS)
    fair = replace(workload(), sizes=np.array([2, 1, 1]) * MIB)
    found = simulate_zero_1(fair, step, costs())
    assert (found.step_ns, found.other_ns, found.exposed_ns) == pytest.approx((112 * MS, 16 * MS, 26 * MS))
    assert simulate_zero_1(workload(), step, costs()).other_ns == pytest.approx((20 - 8 / 3) * MS)
    one = Cost(3e5, 2e4, 0.5)
    points = [(float(size), tensors, one.ns(size, tensors)) for size in (1e4, 1e6, 1e7) for tensors in (1, 8)]
    found = Cost.fitted(points)
    assert (found.fixed_ns, found.tensor_ns, found.byte_ns) == pytest.approx((3e5, 2e4, 0.5))
    halves = ShardingCosts.of_all_reduce(CommModel(1e5, 0.5), 2)
    assert 2 * halves.all_gather.ns(4e6, 1) == pytest.approx(float(CommModel(1e5, 0.5).time_ns(4e6, 2)))


@given(
    sizes=st.lists(st.integers(1, 8 * MIB), min_size=1, max_size=8),
    prefetch=st.none() | st.integers(0, 3),
    contention=st.sampled_from([0.0, 0.5, 1.0]),
    waits=st.sampled_from(["host", "streams"]),
    reshard=st.booleans(),
)
def test_laws(sizes: list[int], prefetch: int | None, contention: float, waits: str, reshard: bool) -> None:
    """Parts add up, collectives follow each other, and the step lies between its computation and a serial one."""
    made = replace(workload(len(sizes)), sizes=np.array(sizes, np.int64))
    groups = groups_of(*((index,) for index in range(len(sizes))))
    price = costs(copies=1, contention=contention)
    found = simulate_sharded(made, Sharding(groups, reshard, prefetch), price, waits=waits)
    assert found.forward_ns + found.compute_ns + found.exposed_ns + found.other_ns == pytest.approx(found.step_ns)
    serial = simulate_sharded(made, Sharding(groups, reshard, 0), price)
    assert found.step_ns <= serial.step_ns * (1 + 1e-9)
    assert found.step_ns >= 30 * MS * len(sizes)
    sent = [one for one in found.spans if one.what in ("gather", "reduce")]
    assert len(sent) == len(sizes) * (3 if reshard else 2)
    begun = [one.begin_ns for one in sent]
    assert begun == sorted(begun)


class _Slow:
    """A step with streams or a host that waits, with a list of all that happened, which each delay goes through."""

    def __init__(self, contention: float) -> None:
        self.contention, self.now, self.waited = contention, 0.0, 0.0
        self.sent: list[list[float]] = []  # begin and end

    def send(self, ns: float) -> list[float]:
        begin = max([self.now, *(end for _, end in self.sent)])
        self.sent.append([begin, begin + ns])
        return self.sent[-1]

    def wait(self, until: float) -> None:
        self.waited += max(until - self.now, 0)
        self.now = max(until, self.now)

    def compute(self, ns: float) -> None:
        busy = max([0.0, *(end - self.now for _, end in self.sent)])
        later = min(ns, busy) * self.contention
        for one in self.sent:
            if one[1] > self.now:
                one[:] = [one[0] + later * (one[0] > self.now), one[1] + later]
        self.now += ns + later


def _slowly(made: ShardedWorkload, sharding: Sharding, price: ShardingCosts, host: bool) -> _Slow:
    """The step of groups of one parameter each, in the order of the forward."""
    slow, count = _Slow(price.contention), len(made.sizes)
    gathered: dict[int, list[float]] = {}
    for backward in (False, True):
        ahead = sharding.prefetch if sharding.prefetch is not None and not (backward and host) else int(not host)
        order = list(range(count))[:: -1 if backward else 1]
        if backward and sharding.reshard_after_forward:
            gathered = {}
        for place, group in enumerate(order):
            size = float(made.sizes[group])
            fresh = [one for one in order[place : place + 1 + ahead] if one not in gathered]
            for other in fresh:
                slow.compute(price.gathering.ns(float(made.sizes[other]), 1) / 2)
                gathered[other] = slow.send(price.all_gather.ns(float(made.sizes[other]), 1))
                if host and other == group:
                    slow.wait(gathered[other][1])
            if gathered[group]:
                slow.wait(gathered[group][1])
                slow.compute(price.gathering.ns(size, 1) / 2)
                gathered[group] = []
            slow.compute(float((made.backward_ns if backward else made.forward_ns)[0, 0, group]))
            if backward:
                slow.compute(price.reducing.ns(size, 1))
                reduced = slow.send(price.reduce_scatter.ns(size, 1))
                if host:
                    slow.wait(reduced[1])
    slow.wait(max(end for _, end in slow.sent))
    return slow


@given(
    of_groups=st.lists(st.tuples(st.integers(1, 8 * MIB), st.integers(0, 20)), min_size=1, max_size=12),
    prefetch=st.none() | st.integers(0, 3),
    contention=st.sampled_from([0.0, 0.3, 1.0]),
    host=st.booleans(),
    reshard=st.booleans(),
    copies=st.integers(0, 3),
)
def test_as_if_each_delay_went_through_all_collectives(
    of_groups: list[tuple[int, int]], prefetch: int | None, contention: float, host: bool, reshard: bool, copies: int
) -> None:
    """Times of the step and of each collective are those of a schedule that moves every collective for each delay."""
    count = len(of_groups)
    computed = np.array([[[ms * MS for _, ms in of_groups]]])
    made = replace(workload(count), sizes=np.array([size for size, _ in of_groups]))
    made = replace(made, forward_ns=computed, backward_ns=2 * computed)
    sharding = Sharding(groups_of(*((index,) for index in range(count))), reshard, prefetch)
    price = costs(copies=copies, contention=contention)
    found = simulate_sharded(made, sharding, price, waits="host" if host else "streams")
    slow = _slowly(made, sharding, price, host)
    assert found.exposed_ns == pytest.approx(slow.waited, abs=1)
    assert found.step_ns - found.other_ns == pytest.approx(slow.now)
    sent = [(one.begin_ns, one.end_ns) for one in found.spans if one.what in ("gather", "reduce")]
    assert np.array(sent) == pytest.approx(np.array(slow.sent), abs=1)


def test_groups_by_name() -> None:
    """As `fully_shard` groups: a pattern for each module it fits, several names for one group, the inner one first."""
    assert groups_by_name(NAMES, ["layers.*"]) == groups_by_name(NAMES, "layers.*") == ((1, 2), (3,))
    assert groups_by_name(NAMES, ["layers.0.up", "layers.*", "embedding"]) == ((1,), (2,), (3,), (0,))
    assert groups_by_name(NAMES, [("embedding", "layers.1"), "layers.*.*"]) == ((0,), (1,), (2,), (3,))
    assert groups_by_name(NAMES, [("embedding", "layers.*")]) == ((0, 1, 2, 3),)
    assert groups_by_name(NAMES, []) == ()


def test_refusals() -> None:
    """What makes no sense is refused with the reason."""
    with pytest.raises(ValueError, match=r"no module with parameters is called 'layer\.\*'.*embedding, layers"):
        groups_by_name(NAMES, ["layer.*"])
    with pytest.raises(ValueError, match="world_size"):
        simulate_sharded(workload(), Sharding(), costs(), ranks=0)
    with pytest.raises(ValueError, match="prefetch"):
        Sharding(prefetch=-1)
    with pytest.raises(ValueError, match="waits"):
        simulate_sharded(workload(), Sharding(), costs(), waits="both")
