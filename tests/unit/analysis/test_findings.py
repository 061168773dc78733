"""Findings: what is wrong is found, with a gain that the change then brings, and nothing else is."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.analysis.findings.facts import Finding
from ddp_lab.bucketing import assign_buckets
from ddp_lab.dashboard.live import ViewFacts
from ddp_lab.protocol.events import Batch
from ddp_lab.timeline.timeline import Timeline
from tests.unit.step_model import StepModel

MB = 1_000_000
# 16 gradients of 1 MB, each 1 ms; collectives of 0.1 ms + 0.4 ms a MB: hidden if the buckets are of a good size.
PARAMETERS = 16
TUNED = StepModel(
    gradients=[1.0] * PARAMETERS,
    sizes=[MB] * PARAMETERS,
    buckets=[[i] for i in range(PARAMETERS)],
    per_mb=0.4,
    options={"gradient_as_bucket_view": True},
)


def in_buckets(of: int) -> list[list[int]]:
    return [list(range(i, min(i + of, PARAMETERS))) for i in range(0, PARAMETERS, of)]


def found(model: StepModel, kind: str, steps: int = 20) -> Finding:
    """The only finding of a kind."""
    (one,) = [one for one in model.record(steps).findings() if one.kind == kind]
    return one


def really_gained(before: StepModel, after: StepModel) -> float:
    """By how many percent of its step the first model's step is longer than the second's."""
    return 100 * (1 - after.step_ms() / before.step_ms())


def caps_of(one: Finding) -> list[int]:
    """The caps in bytes that a remedy names."""
    listed = re.search(r"bucket_cap_mb_list=\[([^]]+)\]", one.remedy)
    if listed:
        return [int(float(cap) * 2**20) for cap in listed[1].split(",")]
    (cap,) = re.findall(r"bucket_cap_mb=(\d+(?:\.\d+)?)", one.remedy)
    return [int(float(cap) * 2**20)]


def rebuilt(model: StepModel, one: Finding) -> StepModel:
    """The model as the remedy of a finding builds it."""
    order = model.order or [i for members in model.buckets for i in members]
    keys = ["float32"] * len(model.sizes)
    return replace(model, buckets=assign_buckets(model.sizes, keys, caps_of(one), order))


BIG = replace(TUNED, buckets=[list(range(10)), list(range(10, 16))], per_mb=0.9)
SMALL = replace(TUNED, start=3.0, per_mb=0.1, buckets=[[0, 1], *([i] for i in range(2, PARAMETERS))])
FIRST = replace(TUNED, buckets=[list(range(7)), list(range(7, 11)), list(range(11, 16))], per_mb=1.2)


@pytest.mark.parametrize(
    ("kind", "model", "least"),
    [("bucket-too-big", BIG, 10), ("bucket-too-small", SMALL, 10), ("first-bucket-late", FIRST, 0)],
)
def test_other_buckets_gain_what_is_told(kind: str, model: StepModel, least: float) -> None:
    """Of two huge buckets, of collectives that cost 3 ms whatever their size, and of a largest bucket that comes first:
    other sizes are proposed, and building them brings the gain that was told."""
    one = found(model, kind)
    assert one.gain_percent == pytest.approx(really_gained(model, rebuilt(model, one)), abs=4)
    assert one.gain_percent > least
    if kind == "bucket-too-big":
        assert "2 buckets (15.3 MiB in total)" in one.evidence
    assert (one.bucket == 0) == (len(caps_of(one)) == 2) == (kind == "first-bucket-late")


def test_a_straggler_costs_what_is_told() -> None:
    """5 ms at one layer of rank 1: rank, layer and bucket, and without it the step is shorter by what was told."""
    model = replace(TUNED, late=lambda rank, step: {9: 5.0} if rank == 1 else {})
    one = found(model, "straggler")
    assert (one.rank, one.parameter, one.bucket) == (1, "layer9.weight", 9)
    assert "late by 5.0 ms (median) in 100 % of the steps; pattern: persistent." in one.evidence
    assert one.gain_percent == pytest.approx(really_gained(model, TUNED), abs=0.5)
    assert model.record().findings()[0] == one, "the largest gain comes first"


def test_fewer_than_twenty_steps_say_nothing_of_speed() -> None:
    """The same straggler is a finding of 20 steps, warm-up included, and of 19 it is not, nor in the summary; what has
    no effect is told all the same."""
    model = replace(TUNED, late=lambda rank, step: {9: 5.0} if rank == 1 else {})
    model = replace(model, options={**model.options, "find_unused_parameters": True})
    few, enough = model.record(19), model.record(20)
    assert [one.kind for one in few.findings()] == ["find-unused-for-nothing"]
    assert [one.kind for one in enough.findings()] == ["straggler", "find-unused-for-nothing"]
    assert "falls behind" not in few.summary()
    assert "falls behind" in enough.summary()


def test_a_rank_that_is_late_as_a_whole() -> None:
    """20 % more on every layer of rank 0: no layer is to blame, the rank is. A forward that takes 6 ms longer on rank
    1: it starts its backward late."""
    model = replace(TUNED, late=lambda rank, step: dict.fromkeys(range(PARAMETERS), 0.2) if rank == 0 else {})
    (late,) = model.record().stragglers()
    assert (late.rank, late.where, late.parameter) == (0, "everywhere", None)
    one = found(model, "straggler")
    assert one.title.startswith("Rank 0 is slower than the others throughout its backward")
    assert one.gain_percent == pytest.approx(really_gained(model, TUNED), abs=1)
    model = replace(TUNED, forward=lambda rank, step: 7.0 if rank == 1 else 1.0)
    one = found(model, "straggler")
    assert one.title.startswith("Rank 1 starts its backward late")
    assert (one.rank, one.parameter, one.bucket) == (1, None, None)
    assert one.gain_percent == pytest.approx(really_gained(model, TUNED), abs=1)


def crowded(delay: float) -> StepModel:
    """Three ranks that disturb each other in each step; rank 1's forward takes longer by about `delay` ms."""
    random = np.random.default_rng(4)
    accidents, places = random.exponential(3.0, (3, 200)), random.integers(0, PARAMETERS, (3, 200))
    before = random.exponential(3.0, (3, 200)) + np.where(np.arange(3)[:, None] == 1, delay, 0.0)
    return replace(
        TUNED,
        ranks=3,
        per_mb=1.1,
        late=lambda rank, step: {int(places[rank, step]): float(accidents[rank, step])},
        forward=lambda rank, step: 1.0 + float(before[rank, step]),
    )


def test_a_straggler_on_busy_cores_has_no_place() -> None:
    """Where its delay is lost among accidents, the rank is told with what is known; summary, stragglers and findings
    say the same of it, and it stands before communication."""
    timeline = crowded(4.0).record(60)
    one = timeline.findings()[0]
    assert (one.kind, one.rank, one.parameter, one.bucket) == ("straggler", 1, None, None)
    assert re.fullmatch(
        r"Rank 1 is last in \d\d % of the steps, and the others wait \d\.\d ms for it \(median\)\. The delay varies "
        r"too much to name a layer\. It spends in forward \d\.\d ms per step, \d\.\d ms on the others\.",
        one.evidence,
    )
    (late,) = timeline.stragglers()
    assert (late.rank, late.where) == (1, "varying")
    assert late.cost_percent == pytest.approx(one.gain_percent)
    seen = ViewFacts(timeline)
    seen.look("page", ["findings", "stragglers"], None)
    told = seen.update(force=True)
    assert str(told["stragglers"]["blocks"][0]["text"]).startswith(one.evidence.split(" It spends")[0])
    assert told["findings"]["blocks"][1]["advice"][0]["title"] == one.title
    assert f"{one.evidence.split(' It spends')[0]} It costs" in timeline.summary()
    assert f"% of the step: {one.title}" in timeline.summary()
    assert not {"communication-bound", "bucket-too-small"} & {other.kind for other in timeline.findings()}


def test_a_last_parameter_and_another_order() -> None:
    """A small parameter whose gradient comes at the very end holds up its bucket, which is the largest. Buckets in the
    reverse of the order of readiness: following the order saves what the finding says."""
    sizes = [MB] * 15 + [1_000]
    order = list(range(16))
    buckets = [[15, *range(10)], list(range(10, 15))]
    model = replace(TUNED, sizes=sizes, buckets=buckets, order=order, per_mb=0.9)
    one = found(model, "parameter-last")
    assert (one.parameter, one.bucket) == ("layer15.weight", 0)
    after = replace(model, buckets=[list(range(10)), list(range(10, 15)), [15]])
    assert one.gain_percent == pytest.approx(really_gained(model, after), abs=3)
    model = replace(TUNED, buckets=in_buckets(4)[::-1], order=list(range(PARAMETERS)), per_mb=0.9)
    one = found(model, "order-changed")
    assert one.gain_percent == pytest.approx(really_gained(model, replace(model, buckets=in_buckets(4))), abs=3)
    assert "rebuild_buckets_on_reorder" in one.remedy


def test_the_search_for_unused_parameters() -> None:
    """Searched for nothing; always the same: a static graph; changing ones: nothing to say; not asked for: neither.
    Parameters that never get a gradient are named with their bytes; without them the step is shorter as told."""
    searching = replace(TUNED, options={**TUNED.options, "find_unused_parameters": True})
    assert found(searching, "find-unused-for-nothing").gain_percent > 0
    same = replace(searching, unused=lambda rank, step: {3})
    assert "1 of 16 parameters were unused in all" in found(same, "static-graph-possible").evidence
    changing = replace(searching, unused=lambda rank, step: {step % 2})
    static = replace(same, options={**same.options, "static_graph": True})
    for model in (changing, static, TUNED):
        kinds = {one.kind for one in model.record().findings()}
        assert not kinds & {"find-unused-for-nothing", "static-graph-possible"}
    model = replace(
        TUNED,
        buckets=[[0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15]],
        per_mb=1.5,
        unused=lambda rank, step: {12, 13, 14},
    )
    one = found(model, "unused-parameters")
    assert "layer12.weight, layer13.weight, layer14.weight: 2.86 MiB of 15.3 MiB" in one.evidence
    gone = replace(model, sizes=[MB] * 12 + [0, 0, 0] + [MB])
    assert one.gain_percent == pytest.approx(really_gained(model, gone), abs=1)


def test_communication_bound() -> None:
    """Collectives longer than the backward: half the bytes gain as told; with a hook, only seldom synchronising."""
    model = replace(TUNED, per_mb=3.0, buckets=[[0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13, 14, 15]])
    one = found(model, "communication-bound")
    assert one.gain_percent == pytest.approx(really_gained(model, replace(model, per_mb=1.5)), abs=1)
    assert "fp16_compress_hook" in one.remedy
    hooked = replace(model, options={**model.options, "comm_hook": "fp16_compress_hook"})
    assert "fp16_compress_hook" not in found(hooked, "communication-bound").remedy
    assert "no_sync" in found(hooked, "communication-bound").remedy


def test_copies_and_small_tensors() -> None:
    """Copies are told by their measured rate, small gradients by what each costs; views do away with the former. Where
    the rate is not known, what a rank loses between its last bucket and the end is not theirs."""
    sizes = [MB if i % 2 else 2_000 for i in range(60)]
    model = StepModel(
        gradients=[0.2] * 60,
        sizes=sizes,
        buckets=[[i, i + 1] for i in range(0, 58, 2)] + [[59, 58]],
        per_mb=0.1,
        start=0.0,
        handling=0.02,
        copy_per_mb=0.3,
        tail=2.0,
    )
    copies = found(model, "copy-cost")
    assert "28.7 MiB each way: copying in takes about 9.0 ms of the backward; 2.0 ms" in copies.evidence
    alike = found(replace(TUNED, options={}, tail=2.0), "copy-cost")  # tells nothing of the rate
    assert alike.evidence == "15.3 MiB each way: 2.0 ms pass between the last all-reduce and the end of the backward."
    step = model.step_ms()
    assert copies.gain_percent == pytest.approx(100 * (2.0 + 0.3 * 30.06 / 2) / step, rel=0.1)
    small = found(model, "small-tensors")
    assert small.title.startswith("30 of 60 gradients")
    assert small.gain_percent == pytest.approx(100 * 30 * 0.02 / step, rel=0.2)
    for option in ("gradient_as_bucket_view", "averages_in_place"):
        without = replace(model, options={option: True})
        assert "copy-cost" not in {one.kind for one in without.record().findings()}
    model = StepModel(gradients=[1.0], sizes=[MB], buckets=[[0]], tail=20.0)
    assert found(model, "copy-cost").gain_percent == pytest.approx(100 * 1.0 / model.step_ms(), rel=0.1)


def test_what_is_not_known_is_not_told() -> None:
    """With the events of one rank of two, only what a rank knows by itself is told; without the options that a model
    was built with, findings that need them are left out."""
    model = replace(TUNED, per_mb=3.0, options={"find_unused_parameters": True})
    whole, alone = model.record(), Timeline()
    alone.describe(0, model.assignment())
    model_of_one = replace(model, ranks=1)
    for rank, events in model_of_one.record().since(0)[0]:
        alone.extend(Batch(rank, 1, 0, 0, events))
    assert {one.kind for one in whole.findings()} > {one.kind for one in alone.findings()}
    assert {one.kind for one in alone.findings()} == {"find-unused-for-nothing"}
    model = replace(TUNED, per_mb=3.0)
    timeline = Timeline()
    for rank in range(2):
        timeline.describe(rank, {key: value for key, value in model.assignment().items() if key != "options"})
    for rank, events in model.record().since(0)[0]:
        timeline.extend(Batch(rank, 1, 0, 0, events))
    assert {one.kind for one in timeline.findings()} == {"communication-bound", "bucket-too-small"}


@settings(max_examples=25)
@given(
    st.lists(st.floats(0.05, 3.0), min_size=2, max_size=12),
    st.floats(0.0, 2.0),
    st.floats(0.0, 5.0),
    st.integers(1, 6),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_every_finding_has_a_number(
    gradients: list[float], start: float, per_mb: float, of: int, ranks: int, random: object
) -> None:
    """Whatever the model: gains are finite and not negative, largest first, texts are whole sentences."""
    count = len(gradients)
    sizes = [random.choice([4, 4_000, MB]) for _ in range(count)]  # type: ignore[attr-defined]
    buckets = [list(range(i, min(i + of, count))) for i in range(0, count, of)]
    model = StepModel(gradients, sizes, buckets, ranks=ranks, start=start, per_mb=per_mb, tail=0.2)
    told = model.record(20).findings()
    gains = [one.gain_percent for one in told]
    assert gains == sorted(gains, reverse=True)
    assert all(math.isfinite(gain) and 0 <= gain <= 100 for gain in gains)
    for one in told:
        assert one.title.endswith(".")
        assert re.search(r"\d", one.evidence), one
        assert one.remedy.endswith(".")
        assert "nan" not in str(one)
