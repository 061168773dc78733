"""The simulator: steps counted by hand, laws that hold for every workload, and the same schedule as the reducer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab import _schedule
from ddp_lab.bucketing import assign_buckets
from ddp_lab.simulation.link_model import CommModel
from ddp_lab.simulation.simulator import Configuration, Hook, caps_of, simulate, simulate_many
from ddp_lab.simulation.workload import Workload

MS = 1e6
MIB = 1 << 20


def four(**options: float) -> Workload:
    """Four parameters of 1 MiB whose gradients come at 10, 20, 30 and 40 ms; two ranks."""
    made = Workload.made_up([MIB] * 4, forward_ns=20 * MS, backward_ns=40 * MS, other_ns=5 * MS, **options)  # type: ignore[arg-type]
    return replace(made, world_size=2)


def link(ms_per_mib: float, **options: float) -> CommModel:
    return CommModel(0, ms_per_mib * MS / MIB, **options)  # type: ignore[arg-type]


def test_a_step_counted_by_hand() -> None:
    """Collectives of 15 ms behind gradients every 10 ms: they end at 25, 40, 55 and 70; 30 are exposed. One bucket for
    all, and no overlap, both leave the whole communication exposed."""
    found = simulate(four(), Configuration(bucket_cap_mb=1), link(15))
    assert [bucket[0] for bucket in found.buckets] == [3, 2, 1, 0]
    start = 25 * MS
    assert found.launched_ns[0] == pytest.approx(start + np.array([10, 20, 30, 40]) * MS)
    assert found.reduced_ns == pytest.approx(start + np.array([25, 40, 55, 70]) * MS)
    assert found.step_ns == pytest.approx(95 * MS)
    assert found.exposed_ns == pytest.approx(30 * MS)
    assert found.hidden_ns == pytest.approx(30 * MS)
    parts = (found.forward_ns, found.compute_ns, found.exposed_ns, found.other_ns)
    assert parts == pytest.approx((20 * MS, 40 * MS, 30 * MS, 5 * MS))
    for configuration in (Configuration(math.inf), Configuration(1, overlap=False)):
        found = simulate(four(), configuration, link(15))
        assert found.hidden_ns == pytest.approx(0)
        assert found.exposed_ns == pytest.approx(60 * MS)


def test_lanes_and_jitter() -> None:
    """Two lanes overlap latencies; transfers share the link (sharing=1) or don't (sharing=0). Jitter costs sigma times
    sqrt(2 ln n), and nothing alone."""
    latency = CommModel(10 * MS / 2, 0)  # two hops of a ring of 2
    ready = replace(four(), ready_ns=np.zeros((1, 4)), order=(0, 1, 2, 3), computed_ns=np.zeros(1))
    configuration = Configuration(1)
    assert simulate(ready, configuration, latency).exposed_ns == pytest.approx(40 * MS)
    assert simulate(ready, configuration, replace(latency, lanes=2)).exposed_ns == pytest.approx(20 * MS)
    shared = link(10, lanes=2)
    assert simulate(ready, configuration, shared).exposed_ns == pytest.approx(40 * MS)
    assert simulate(ready, configuration, replace(shared, sharing=0)).exposed_ns == pytest.approx(20 * MS)
    link_ = CommModel(0, 0)
    times = [simulate(four(), Configuration(1, world_size=n, jitter_ns=MS), link_).step_ns for n in (1, 256, 16384)]
    assert times[1] - times[0] == pytest.approx(MS * math.sqrt(2 * math.log(256)))
    assert times[2] > times[1]


def test_contention_counted_by_hand() -> None:
    """While the collective of 4 ms runs the rank computes at half speed, and the collective at half speed, too. A
    workload as a slowed-down step shows it gives that very step again, and the unslowed one without a link."""
    one = Workload.made_up([MIB, MIB], forward_ns=0, backward_ns=20 * MS)
    slow = link(4, compute_slowdown=1.0, comm_slowdown=1.0)
    found = simulate(replace(one, world_size=2), Configuration(1), slow)
    # First bucket at 10, its collective until 18 while 4 ms of computation are done; 6 are left, then 4 ms alone.
    assert found.reduced_ns == pytest.approx([18 * MS, 28 * MS])
    assert found.compute_ns == pytest.approx(24 * MS)
    recorded = replace(
        Workload.made_up([MIB, MIB], forward_ns=0, backward_ns=20 * MS),
        ready_ns=np.array([[24.0 * MS, 10 * MS]]),
        computed_ns=np.array([24.0 * MS]),
        busy_ns=np.array([[[10.0 * MS, 18 * MS], [24 * MS, 28 * MS]]]),
        world_size=2,
    )
    found = simulate(recorded, Configuration(1), slow)
    assert found.reduced_ns == pytest.approx([18 * MS, 28 * MS])
    assert simulate(recorded, Configuration(1, world_size=1), slow).compute_ns == pytest.approx(20 * MS)


def test_hooks_skipped_steps_and_a_straggler() -> None:
    """A hook's bytes and computation count; steps that only accumulate cost computation alone. A rank 30 ms late in one
    layer delays every rank's step by as much; without it the delay is gone."""
    plain = simulate(four(), Configuration(math.inf), link(15))
    half = simulate(four(), Configuration(math.inf, hook=Hook(bytes_factor=0.5)), link(15))
    assert plain.step_ns - half.step_ns == pytest.approx(30 * MS)
    costly = simulate(four(), Configuration(math.inf, hook=Hook(ns=7 * MS)), link(15))
    assert costly.step_ns - plain.step_ns == pytest.approx(7 * MS)
    every = simulate(four(), Configuration(math.inf, sync_every=4), link(15))
    assert every.step_ns == pytest.approx((125 + 3 * 60) / 4 * MS)
    base = four()
    ready = np.repeat(base.ready_ns, 3, axis=0)
    ready[1, :2] += 30 * MS  # the last two gradients to come
    three = np.array([1.0, 1, 1])
    late = replace(
        base,
        ready_ns=ready,
        computed_ns=np.array([40.0, 70, 40]) * MS,
        forward_ns=20 * MS * three,
        other_ns=5 * MS * three,
        busy_ns=np.zeros((3, 0, 2)),
        world_size=3,
    )
    slowed, fixed = (simulate(one, Configuration(1), link(1)) for one in (late, late.without(1)))
    assert slowed.step_ns - fixed.step_ns == pytest.approx(30 * MS)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(4, 8 * MIB), min_size=count, max_size=count))
    shares = draw(st.lists(st.floats(0.01, 1), min_size=count, max_size=count))
    made = Workload.made_up(sizes, forward_ns=MS, backward_ns=draw(st.floats(1e3, 1e9)), shares=shares)
    return replace(made, world_size=draw(st.integers(1, 64)), order=tuple(draw(st.permutations(range(count)))))


@given(workload=workloads(), cap=st.floats(0, 16), slowdown=st.sampled_from([0.0, 0.5]), lanes=st.integers(1, 3))
def test_laws(workload: Workload, cap: float, slowdown: float, lanes: int) -> None:
    """Buckets begin in order after their launch, parts add up, and the step lies between its two bounds."""
    model = CommModel(1e4, 0.5, lanes=lanes, compute_slowdown=slowdown)
    found = simulate(workload, Configuration(cap), model)
    assert (np.diff(found.begun_ns) >= 0).all()
    assert (np.diff(found.launched_ns[0]) >= 0).all()
    assert (found.begun_ns >= found.launched_ns[0] - 1).all()
    assert (found.reduced_ns >= found.begun_ns).all()
    assert (found.launched_ns >= found.ready_ns).all()
    parts = (found.forward_ns, found.compute_ns, found.exposed_ns, found.other_ns)
    assert sum(parts) == pytest.approx(found.step_ns)
    assert found.step_ns == pytest.approx(found.end_ns.max())
    times = model.time_ns(found.bytes.astype(float), workload.world_size)
    computed = float(workload.computed_ns[0])
    assert found.step_ns >= MS + max(computed, float(times.max())) - 1
    assert found.step_ns <= MS + (computed + float(times.sum())) * (1 + slowdown) + 1


@given(workload=workloads(), cap=st.floats(0, 16))
def test_the_launches_are_the_schedules(workload: Workload, cap: float) -> None:
    """Without contention each bucket is launched at the gradient at which `BucketSchedule` launches it."""
    found = simulate(workload, Configuration(cap), CommModel(1e4, 0.5))
    assert [list(bucket) for bucket in found.buckets] == assign_buckets(
        workload.sizes.tolist(), workload.keys, caps_of(cap), workload.order
    )
    schedule = _schedule.BucketSchedule([list(bucket) for bucket in found.buckets])
    schedule.arm()
    expected: dict[int, float] = {}
    for parameter in np.argsort(workload.ready_ns[0], kind="stable").tolist():
        for bucket in schedule.mark_ready(parameter):
            expected[bucket] = float(workload.ready_ns[0, parameter]) + MS
    assert found.launched_ns[0] == pytest.approx([expected[bucket] for bucket in range(len(found.buckets))])


def test_many_are_the_same_as_each() -> None:
    """`simulate_many` gives for each configuration and link what `simulate` gives for it alone."""
    configurations = [
        Configuration(cap, sync_every=every, overlap=overlap, world_size=world)
        for cap in (None, 0, 2.5, [1, 3])
        for every in (1, 4)
        for overlap in (True, False)
        for world in (2, 16384)
    ]
    links = [link(1 + index % 3, compute_slowdown=0.2 * (index % 2)) for index in range(len(configurations))]
    many = simulate_many(four(), configurations, links)
    for index, (configuration, one) in enumerate(zip(configurations, links, strict=True)):
        alone = simulate(four(), configuration, one)
        for name in ("step_ns", "forward_ns", "compute_ns", "hidden_ns", "exposed_ns", "other_ns"):
            assert getattr(many, name)[index] == pytest.approx(getattr(alone, name)), (index, name)


def test_refusals() -> None:
    """What makes no sense is refused with the reason."""
    refused = {
        "sync_every": lambda: Configuration(sync_every=0),
        "world_size": lambda: Configuration(world_size=0),
        "registration": lambda: Configuration(order="alphabetical"),
        "bucket_cap_mb": lambda: caps_of(-1),
        "there is no rank": lambda: four().without(0),
        "3 configurations, but 2 links": lambda: simulate_many(four(), [Configuration()] * 3, [link(1)] * 2),
        "ready must have shape": lambda: _schedule.Replay(np.zeros((1, 2)), np.zeros(3), np.zeros(1)),
    }
    for reason, call in refused.items():
        with pytest.raises(ValueError, match=reason):
            call()
