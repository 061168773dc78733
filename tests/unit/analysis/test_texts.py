"""What is said of a training, word for word: findings, headlines, summaries, comparisons, reports."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from pandas import DataFrame

import ddp_lab
from ddp_lab.analysis import parameter_groups as grouping
from ddp_lab.analysis import step_metrics, stragglers
from ddp_lab.analysis.check_reports import DriftReport, HookProblem
from ddp_lab.analysis.clocks import Moments, Questions, clock_offset
from ddp_lab.analysis.collectives import impossible, schedule
from ddp_lab.analysis.comparison import before_after, compare_series, largest, median_change, student_t
from ddp_lab.analysis.findings import (
    Accumulation,
    Facts,
    Finding,
    UnchangedBuffers,
    buckets,
    findings,
    headline,
    options,
    parameter_groups,
)
from ddp_lab.analysis.parameter_groups import KINDS, DeviceCollectives, GroupedSteps, LateGroup, ModelCollectives
from ddp_lab.analysis.step_parts import SPANS, STARTS, Place, PlaceTime, RankSteps, step_parts
from ddp_lab.analysis.steps import DeviceSteps, Steps, fit_line
from ddp_lab.timeline.model_kinds import OF_GRADIENTS
from ddp_lab.timeline.timeline import Timeline
from tests.unit.analysis.program_facts import CPU, MODEL, REPLICATE, SHARD, at, facts, on_gpu
from tests.unit.analysis.program_facts import SMALL as SHARDED
from tests.unit.analysis.test_collectives import CASES, shown_of
from tests.unit.analysis.test_findings import BIG, FIRST, MB, PARAMETERS, SMALL, TUNED, crowded, in_buckets
from tests.unit.analysis.test_hook_report import report
from tests.unit.analysis.test_stragglers import busy, even, waited
from tests.unit.analysis.test_stragglers import crowded as crowded_times
from tests.unit.approved import approved
from tests.unit.step_model import StepModel
from tests.unit.timeline.test_parameter_groups import recorded, streamed

LATE = replace(TUNED, late=lambda rank, step: {9: 5.0} if rank == 1 else {})
QUICK = replace(TUNED, gradients=[0.05] * PARAMETERS, start=0.01, per_mb=0.02)
UNUSED = replace(TUNED, buckets=in_buckets(4), per_mb=1.5, unused=lambda rank, step: {12, 13, 14})
BOUND = replace(TUNED, per_mb=3.0, buckets=[[0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13, 14, 15]])
SEARCHING = replace(TUNED, options={**TUNED.options, "find_unused_parameters": True})
COPIED = StepModel(
    gradients=[0.2] * 60,
    sizes=[MB if i % 2 else 2_000 for i in range(60)],
    buckets=[*([i, i + 1] for i in range(0, 58, 2)), [59, 58]],
    per_mb=0.1,
    start=0.0,
    handling=0.02,
    copy_per_mb=0.3,
    tail=2.0,
)
MODELS = {
    "nothing": TUNED,
    "buckets too big": BIG,
    "buckets too small": SMALL,
    "the first bucket late": FIRST,
    "late at a layer": LATE,
    "late at a layer at times": replace(LATE, late=lambda rank, step: {9: 9.0} if rank == step % 3 == 1 else {}),
    "late at a layer after its data": replace(
        LATE,
        late=lambda rank, step: {9: 9.0} if rank == step % 3 == 1 else {},
        forward=lambda rank, step: 4.0 if rank == step % 3 == 1 else 1.0,
    ),
    "last by half a millisecond": replace(QUICK, forward=lambda rank, step: 1.5 if rank == 1 else 1.0),
    "last by turns": replace(QUICK, forward=lambda rank, step: 1.5 if rank == step % 2 else 1.0),
    "much communication of three": replace(TUNED, ranks=3, per_mb=1.5),
    "slower throughout": replace(TUNED, late=lambda rank, step: dict.fromkeys(range(PARAMETERS), 0.2 * (1 - rank))),
    "late to the backward": replace(TUNED, forward=lambda rank, step: 7.0 if rank == 1 else 1.0),
    "the last parameter": replace(
        TUNED, sizes=[MB] * 15 + [1_000], buckets=[[15, *range(10)], list(range(10, 15))], order=range(16), per_mb=0.9
    ),
    "another order": replace(TUNED, buckets=in_buckets(4)[::-1], order=range(PARAMETERS), per_mb=0.9),
    "a search for nothing": SEARCHING,
    "a static graph": replace(SEARCHING, unused=lambda rank, step: {3}),
    "unused parameters": UNUSED,
    "much communication": BOUND,
    "much communication of a hook": replace(BOUND, options={**BOUND.options, "comm_hook": "fp16_compress_hook"}),
    "copies": COPIED,
    "copies in batches": replace(COPIED, options={"batched_grad_copy": True}),
}
TIMELINES: dict[str, Callable[[], Timeline]] = {
    **{name: model.record for name, model in MODELS.items()},
    "no step": Timeline,
    "ranks that disturb each other": lambda: crowded(0.0).record(60),
    "a late rank among them": lambda: crowded(4.0).record(60),
    "too few steps": lambda: TUNED.record(3),
    "parameter groups": recorded,
    "a late parameter group": lambda: recorded(late=6.0),
    "replicate": lambda: recorded(kind="replicate"),
    "a mesh": lambda: recorded(mesh=(2, 2)),
    "parameter groups on devices": streamed,
    "a prefetch that misses": lambda: streamed(announced=2),
    "waits that are not known": lambda: recorded(backend="mpi"),
}


def loader(**fields: Any) -> PlaceTime:
    return PlaceTime(Place("data", "Images", "", **fields), 7e-3)


CONSTANTS = UnchangedBuffers(["freqs_cos", "freqs_sin"], 8 << 20, 8 << 20, looks=7, step=63, ns=4e6)
ADDED_UP = Accumulation(optimizer_steps=10, backwards=40, fewest=4, most=4)


def accumulated(model: StepModel, fewest: int) -> Facts:
    """Facts of a model of which up to four backwards add up gradients."""
    known = model.record().analysis_input()
    assert known is not None
    return replace(known, accumulation=replace(ADDED_UP, fewest=fewest, backwards=36 + fewest))


SHARED = {rank: {**CPU, "threads": 4} for rank in (0, 1)}
FACTS: dict[str, Callable[[], Facts]] = {
    "a loader": lambda: facts({"data": 7, "forward": 10.5}, loader(workers=0)),
    "a loader with workers": lambda: facts({"data": 7, "forward": 10.5}, loader(workers=2)),
    "a loader that starts workers": lambda: facts(
        {"data": 7, "forward": 10.5}, PlaceTime(Place("data", f"Images{STARTS}", "", workers=2), 7e-3)
    ),
    **{
        part: lambda part=part: facts({part: 2, "forward": 8}, at(part, "the_line()"))  # type: ignore[misc]
        for part in ("collectives", "evaluation", "logging", "checkpoint", "code")
    },
    "a quick loader": lambda: facts({"data": 1, "forward": 16.5}),
    **{
        f"quick {part}": lambda part=part: facts({part: 0.2, "forward": 9.8}, at(part, "the_line()", 0.2))  # type: ignore[misc]
        for part in ("collectives", "evaluation", "logging", "checkpoint", "code")
    },
    "a value that is read on a CPU": lambda: facts({"code": 2, "forward": 8}, at("code", "total += loss.item()")),
    "copies on a CPU": lambda: facts({"copies": 2, "forward": 8}, at("copies", "x = x.to(device)")),
    "cores of their own": lambda: facts({"forward": 8}, processes={0: CPU, 1: CPU}),
    "shared cores beside a device": lambda: on_gpu(replace(MODEL.record().analysis_input(), processes=SHARED)),  # type: ignore[type-var]
    "shared cores and one bucket": lambda: replace(  # type: ignore[type-var]
        replace(MODEL, buckets=[[*range(16)]]).record(20).analysis_input(), processes=SHARED
    ),
    "shared cores": lambda: replace(MODEL.record().analysis_input(), processes=SHARED),  # type: ignore[type-var]
    "more ranks than cores": lambda: facts({"forward": 8}, processes={0: {**CPU, "cores": 1}, 1: {**CPU, "cores": 1}}),
    "a value that is read": lambda: on_gpu(facts({"code": 2, "forward": 8}, at("code", "total += loss.item()"))),
    "copies to a device": lambda: on_gpu(
        facts({"copies": 2, "data": 0.1, "forward": 8}, at("copies", "x = x.to(device)"), at("data", workers=2))
    ),
    "pinned copies": lambda: on_gpu(
        facts({"copies": 2, "forward": 8}, at("copies", "x.cuda()"), at("data", workers=2, pin_memory=True))
    ),
    "contexts": lambda: facts({"forward": 8}, processes={0: CPU, 1: {**CPU, "contexts": [0, 1]}}),
    "unchanged buffers": lambda: facts({"forward": 8}, unchanged=CONSTANTS),
    "unchanged buffers beside others": lambda: facts({"forward": 8}, unchanged=replace(CONSTANTS, of_bytes=9 << 20)),
    "an unchanged buffer": lambda: facts({"forward": 8}, unchanged=replace(CONSTANTS, names=["freqs_cos"])),
    "reduced in each backward": lambda: accumulated(BOUND, 4),
    "reduced in each backward, of which not all steps have as many": lambda: accumulated(BOUND, 2),
    "reduced in each backward, at no cost": lambda: accumulated(TUNED, 4),
    "reduced in each backward of a sharded model": lambda: replace(recorded().analysis_input(), accumulation=ADDED_UP),  # type: ignore[type-var]
    "reduced in each backward, waits not known": lambda: replace(  # type: ignore[type-var]
        recorded(backend="mpi").analysis_input(), accumulation=ADDED_UP
    ),
    "dimensions of a mesh": lambda: replace(SHARDED.record().analysis_input(), dimensions=(SHARD, REPLICATE)),  # type: ignore[type-var]
    "late by an evaluation": lambda: late_by("evaluation", at("evaluation", "validate()", 6.0)),
    "late by a loader": lambda: late_by("data", at("data", workers=1, ms=6.0)),
    "late by its own lines": lambda: late_by("code", at("code", "quick()", 1.0), at("code", "prepare()", 4.0)),
    "late by nothing known": lambda: late_by("hidden"),
}


def late_by(part: str, *lines: PlaceTime) -> Facts:
    """Rank 1 is late to its backward, because of what takes it 6 ms; more is hidden, exposed, written or unnamed."""
    known, told = MODELS["late to the backward"].record().analysis_input(), facts({part: 1, "forward": 8}, *lines)
    assert known is not None
    assert told.parts is not None
    usual = {"forward": 8e-3, "alone": 1e-3, **dict.fromkeys(("hidden", "exposed", "written", "unnamed", part), 0.0)}
    more = dict.fromkeys(("alone", "hidden", "exposed", "written", "unnamed"), 9e-3)
    of_rank = {0: usual, 1: {**usual, **more, **({} if part == "hidden" else {part: 6e-3})}}
    return replace(known, parts=replace(told.parts, by_rank=of_rank), processes={0: CPU, 1: CPU})


def in_words(found: Sequence[Finding], facts: Facts | None) -> str:
    """A headline, and findings with all that they say."""
    about = ("kind", "gain_percent", "rank", "bucket", "parameter", "steps")
    known = [
        {name: getattr(one, name) for name in about} | {"gain_percent": round(one.gain_percent, 3)} for one in found
    ]
    told = [f"{about}\n{one}" for about, one in zip(known, found, strict=True)]
    return "\n".join([headline(facts, found), *told])


@pytest.mark.parametrize("name", TIMELINES)
def test_of_a_timeline(name: str) -> None:
    """Its findings, stragglers and summary."""
    made = TIMELINES[name]()
    late = [str(one) for one in made.stragglers()]
    approved(name, "\n\n".join([in_words(made.findings(), made.analysis_input()), *late, made.summary()]))


@pytest.mark.parametrize("name", FACTS)
def test_of_a_program(name: str) -> None:
    """Its findings."""
    made = FACTS[name]()
    approved(name, in_words(findings(made), made))


OF_OPTIONS = (options.communication, options.copies, options.search_of_unused, options.small_tensors)
OF_BUCKETS = (buckets.sizes, buckets.first_bucket, buckets.order, buckets.last_parameter)


def without_gradient(known: Facts, where: Any) -> Steps:
    """Steps in which a parameter got none."""
    made = known.steps.gradients.copy()
    made[where] = 0
    return replace(known.steps, gradients=made)


def on_device(steps: Steps) -> Steps:
    """The same as if devices had timed them."""
    return DeviceSteps(**vars(steps))


OTHERWISE: dict[str, Callable[[Facts], dict[str, Any]]] = {
    "as it is": lambda known: {},
    "of halves": lambda known: {"keys": [("float16", "cpu"), *known.keys[1:]]},
    "sparse": lambda known: {"sparse": True},
    "no options": lambda known: {"options": {}},
    "copied": lambda known: {"options": {**known.options, "gradient_as_bucket_view": False}},
    "averaged": lambda known: {"options": {**known.options, "gradient_as_bucket_view": False, "averages_in_place": 1}},
    "in batches": lambda known: {"options": {**known.options, "batched_grad_copy": False}},
    "static": lambda known: {"options": {"find_unused_parameters": True, "static_graph": True}},
    "small": lambda known: {"sizes": [16_384] * len(known.sizes)},
    "hardly small": lambda known: {"sizes": [16_384 + (place > 18) for place in range(len(known.sizes))]},
    "no size": lambda known: {"sizes": [0] * len(known.sizes)},
    "one bucket": lambda known: {"buckets": [sorted(index for bucket in known.buckets for index in bucket)]},
    "on a device": lambda known: {"steps": on_device(known.steps)},
    "on a device, without gradients": lambda known: {
        "steps": replace(on_device(known.steps), gradients=known.steps.gradients[:, :, :0])
    },
    "unused by one rank": lambda known: {"steps": without_gradient(known, (0, slice(None), 3))},
    "unused in one step": lambda known: {"steps": without_gradient(known, (slice(None), 4, 3))},
    "a parameter more": lambda known: {
        "names": [*known.names, "more"], "sizes": [*known.sizes, 9 * MB], "keys": [*known.keys, known.keys[0]]
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["a search for nothing", "a static graph", "unused parameters", "much communication", "copies"]
)
def test_models_otherwise(name: str) -> None:
    """What each rule would say if the model, but not its times, were another one, however little it would save."""
    known, told = MODELS[name].record().analysis_input(), []
    assert known is not None
    for how, change in OTHERWISE.items():
        other = replace(known, **change(known))
        every = (*OF_OPTIONS, options.unused_parameters, *(OF_BUCKETS if other.together else ()))
        rules = [rule for rule in every if other.steps.tells_gradients or rule not in OF_GRADIENTS]
        told += [
            f"== {how}",
            *(f"{one.kind} {one.bucket} {one.parameter} {one}" for rule in rules for one in rule(other)),
        ]
    approved(f"otherwise, {name}", "\n".join(told))


def test_groups_otherwise() -> None:
    """What is said of parameter groups with other sizes and times, on the CPU and on devices."""
    known, told = recorded(idle=6).analysis_input(), []
    assert known is not None
    draw = np.random.default_rng(1)
    sizes = {"blocks": [1 << 20] * 9, "whole": [0, 9 << 20, *[1 << 16] * 7], "tiny": [1 << n for n in range(9)]}
    shape = (len(KINDS), 2, len(known.steps), 9)
    for (name, of_size), start, share in itertools.product(sizes.items(), (0.1e6, 2e6), (0.02, 0.4, 1.5)):
        took = (start + 0.2 * np.asarray(of_size)) * draw.uniform(1, 1.05, shape)
        groups = replace(known.groups, sizes=of_size, took=took, exposed=share * took)

        def only(known: Any, groups: GroupedSteps = groups) -> GroupedSteps:
            return replace(groups, took=groups.took * known, exposed=groups.exposed * known)

        unknown = np.where(draw.uniform(size=shape) < 0.01, np.nan, groups.exposed)
        phases = ("forward", "backward", "reduction")
        late = (LateGroup(1, group, phase, 4e6, 0.8) for group, phase in enumerate(phases))
        for how, other in {
            "": groups,
            ", on devices": replace(groups, device_step_ns=90e6, missed=((2, (4, 5), 3),)),
            ", not known": replace(groups, exposed=unknown),
            ", all-reduced": only((np.arange(4) > 2)[:, None, None, None]),
            ", two": only(np.arange(9) < 2),
            ", late": replace(groups, late=[*late, LateGroup(0, -1, "before the forward", 1e6, 0.7)]),
        }.items():
            found = [one for rule in parameter_groups.RULES for one in rule(known, other)]
            told += [f"== {name}, {start:g} ns, waits {share}{how}"]
            told += [f"{one.kind} {one.rank} {one.bucket} {one}" for one in found]
    approved("parameter groups otherwise", "\n".join(told))


def test_headlines() -> None:
    """What is said of findings, or that there are none, by what is known of the steps."""
    known = TUNED.record().analysis_input()
    assert known is not None
    found, told = MODELS["unused parameters"].record().findings(), [headline(None, [])]
    few = TUNED.record(5).analysis_input()
    for one in (known, few, replace(known, buckets=[]), replace(known, missing_ranks=1), recorded().analysis_input()):
        assert one is not None
        told += [headline(replace(one, newer=newer), found[:count]) for newer in (0, 1, 2) for count in (0, 1, 2)]
        told.append(f"{len(findings(one))} of its own")
    approved("headlines", "\n".join(told))


def test_dimensions_otherwise() -> None:
    """What is said of two dimensions of a mesh by their bytes, rates and waits."""
    known, told = SHARDED.record().analysis_input(), []
    assert known is not None
    for sent, ns, wait, fast in itertools.product((1e6, 5e6, 2e9), (1e5, 4e6), (1e5, 2e6, 1e8), (0.1, 1.4, 1.6, 9)):
        outer = replace(SHARD, bytes=sent, ns=ns, waited_ns=wait)
        inner = replace(REPLICATE, bytes=1e6, ns=1e6 / sent * ns / fast)
        for pair in ((outer, inner), (inner, outer)):
            found = list(options.mesh_between_hosts(replace(known, dimensions=pair)))
            told += [f"{sent:g} {ns:g} {wait:g} {fast}: {one}" for one in found]
    pairs = {
        "alone": (SHARD,),
        "both between hosts": (SHARD, replace(REPLICATE, between_hosts=True)),
        "both within": (replace(SHARD, between_hosts=False), REPLICATE),
        "less": (replace(SHARD, bytes=0.9e6), REPLICATE),
        "as much": (replace(SHARD, bytes=1e6), REPLICATE),
        "nothing": (SHARD, replace(REPLICATE, bytes=0.0)),
        "overlapped": (replace(SHARD, waited_ns=0.0), REPLICATE),
        "names": (REPLICATE, SHARD),
    }
    told += [
        f"{name}: {list(options.mesh_between_hosts(replace(known, dimensions=pair)))}" for name, pair in pairs.items()
    ]
    approved("dimensions otherwise", "\n".join(told))


def columns(table: DataFrame) -> str:
    return "\n".join(f"{name}: {' '.join(map(str, values))}" for name, values in table.round(3).to_dict("list").items())


@pytest.mark.parametrize("name", ["nothing", "late to the backward", "parameter groups", "parameter groups on devices"])
def test_tables(name: str) -> None:
    """Times of steps, collectives and groups: the columns of the newest step."""
    made = TIMELINES[name]()
    tables = [made.steps(last_steps=2), made.spans(last_steps=1), made.all_reduces(last_steps=1)]
    tables += [made.collectives(last=9), made.parameter_groups(last_steps=1)]
    approved(f"tables, {name}", "\n\n".join(map(columns, tables)))


def test_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs, by what differs, and of steps before and after a change."""
    monkeypatch.chdir(tmp_path)
    paths = [MODELS[name].record(30).save(f"{name}.npz") for name in ("nothing", "late at a layer")]
    told = [str(ddp_lab.compare(*paths)), str(ddp_lab.compare(paths[0], paths[0]))]
    draw = Random(1)
    times = np.array([[draw.gauss(1, 0.05) for _ in range(60)] for _ in range(2)])
    told += [str(before_after(10 * times[0], factor * times[1])) for factor in (8, 10, 12)]
    told += [str(before_after(list(range(10)), list(range(10))))]
    for few in ((times[0], times[1][:9]), (times[0][:9], times[1])):
        with pytest.raises(ValueError, match="too few") as failed:
            before_after(*few)
        told.append(str(failed.value))
    steps = {"alike": times[0], "again": np.repeat(times[0, :30], 2), "few": times[0][:5], "none": 0 * times[0]}
    steps["slow"] = np.cumsum(times[1] - 1) + 5
    for (first, a), (second, b) in itertools.permutations(steps.items(), 2):
        told.append(f"{first}, {second}: {rounded(np.array(median_change(a, b)))}")
    series = [
        {("phase", name, None, None): factor * place * times[0] for place, name in enumerate("abc")}
        for factor in (1, 2)
    ]
    series[1]["phase", "a", None, None] = np.full(60, np.nan)
    told += [rounded(one) for count in (1, 9) for one in largest(compare_series(*series), "phase", count)]
    for length in (4, 5):
        short = {key: values[:length] for key, values in series[0].items()}
        try:
            told += [rounded(one) for one in compare_series(short, series[1])]
        except ValueError as error:
            told.append(str(error))
    told.append(str([rounded(student_t(0.995, freedom)) for freedom in (1.0, 2.5, 10.0, 200.0)]))
    approved("comparisons", "\n\n".join(told))


def test_reports_of_checks() -> None:
    """Of a hook, with an error and a warning and without, as text and as HTML; of drift between ranks."""
    bad, mild = HookProblem("bad", "1 < 2 is wrong.", "Fix it."), HookProblem("mild", "It is odd.", "Look.", "warning")
    drifted = DriftReport(False, 5, "a.weight", ((0, 2), (1,)), ("a.weight", "b"), ("c",), 7, 4_000_000, 0.002)
    even = DriftReport(True, 5, None, (), (), (), 7, 4_000, 0.002)
    usual = report(bad, mild)
    assert usual.training is not None
    apart = replace(usual.training, losses=(5.0, 4.0, 2.5, 3.0), plain_losses=(5.0, 3.0, 2.0), equal=False)
    flat = replace(usual.training, losses=(2.0,), plain_losses=(2.0,))
    unknown = replace(usual.training, losses=(math.nan, math.nan), plain_losses=(math.nan,), step_ms=math.nan)
    buckets = (*usual.buckets, replace(usual.buckets[0], equal=False, communicate_ms=math.nan))
    more = [replace(usual, buckets=buckets, training=one) for one in (apart, flat, unknown)]
    told = [usual, report(mild), report(), *more, drifted, even]
    pages = [one._repr_html_().replace("><", ">\n<") for one in (usual, *more)]
    approved("reports of checks", "\n\n".join([*map(str, told), *pages]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives_in_steps(ranks: int) -> None:
    """Who sends what to whom in each step of every algorithm."""
    told = []
    for collective, algorithm in CASES:
        if not impossible(algorithm, ranks):
            told.append(str(shown_of(collective, algorithm, ranks)))
            told += [" ".join(map(str, step)) for step in schedule(collective, algorithm, ranks)]
    for wrong in (("all_sum", "ring"), ("all_reduce", "square"), ("all_reduce", "halving")):
        if ranks == 3:
            with pytest.raises(ValueError) as failed:
                schedule(*wrong, ranks)
            told.append(str(failed.value))
    approved(f"collectives of {ranks}", "\n".join(told))


def test_clocks() -> None:
    """Offsets of another host's clock, from questions and answers and from moments at which both were the same."""
    draw, asked, told = Random(3), Questions(), []
    for number in range(200):
        sent = 10**12 + number * 700_000_001
        there, back = (round(50_000 + draw.expovariate(1 / 200_000)) for _ in range(2))
        answer = sent + there + 5_000_000 + round(20e-6 * (sent - 10**12))  # 5 ms ahead, and fast by 20 ppm
        asked.add(sent, answer, sent + there + back)
        if number % 20 < 2:
            told += [f"{number}: {rounded(asked.offset(at))}" for at in (sent, 10**12, sent + 3_600 * 10**9)]
    told.append(str(Questions().offset(0)))
    stepped = Questions()
    for number in range(400):  # asked once a second; set back by 3 ms in the middle
        sent = 10**12 + number * 10**9
        stepped.add(sent, sent + 100_000 + number % 7 * 1_000 + 3_000_000 * (number < 250), sent + 200_000)
        if number % 50 in (0, 1, 4):
            told.append(f"{number}: {rounded(stepped.offset(sent))}")
    early, late = np.array([100, 207, 300]), np.array([113, 214, 322])
    here, there = Moments(np.array([1, 2, 3]), early, late), Moments(np.array([2, 3, 4]), early + 1_003, late + 1_001)
    told += [str(clock_offset(here, there)), str(clock_offset(there, here)), str(clock_offset(here, here))]
    told.append(str(clock_offset(here, Moments(np.array([7]), early[:1], late[:1]))))
    approved("clocks", "\n".join(told))


def rounded(value: Any) -> str:
    """A number or an array with six digits; of a dataclass, its fields."""
    if is_dataclass(value):
        return ", ".join(f"{one.name}={rounded(getattr(value, one.name))}" for one in fields(value))
    if isinstance(value, tuple):
        return "; ".join(map(rounded, value))
    if isinstance(value, str):
        return value
    numbers = np.asarray(value)
    if numbers.dtype.kind == "f":  # what is left of a difference depends on the processor
        numbers = np.where(np.abs(numbers) < 1e-12, 0.0, numbers)
    return np.array2string(numbers, precision=6, max_line_width=10_000)


def test_metrics() -> None:
    """Of few times, some of them unknown: means, medians, waits, bandwidths, edges and parts of steps."""
    values = np.array([[1.0, 3.0, np.nan, 7.0], [np.nan] * 4, [2.0, np.nan, np.nan, np.nan], [-4.0, 5.0, 6.0, 9.0]])
    times = np.array([[10, 40, 0, 90], [20, 35, 70, 95], [5, 60, 75, 0]])
    told = {name: getattr(step_metrics, name)(values) for name in ("median", "mean")}
    told["typical"] = step_metrics.typical(np.array([4, 4, 5, 6]), values[:, 1])
    told["milliseconds"] = step_metrics.milliseconds(times * 1_000_000, np.array([3_000_000, 0, 1_000_000, 5_000_000]))
    told["covered"] = step_metrics.covered(times, times + 30, times > 0)
    told["alone, waits"] = [step_metrics.alone(times.T), step_metrics.waits(times.T).sum(axis=1)]
    told["bus_factor"] = [step_metrics.bus_factor(ranks) for ranks in (0, 1, 2, 8)]
    told["bandwidth"] = step_metrics.algorithm_bandwidth(np.array([6, 8, -1, 3]), np.array([2, 0, 5, -1]))
    told["sync"] = step_metrics.gradient_sync(times, times + 20, np.array([100, 200, 300, -1]))
    told["sync of none"] = step_metrics.gradient_sync(times[:0], times[:0], np.array([100]))
    told["edges"] = step_metrics.edges(times - 4, times - 2, times, times + 20, np.array([50, 60, 0]))
    late = np.array([[0, 30, 0, 40], [60, 0, 0, 0], [5, 70, 80, 0]])
    told["edges of what has not happened"] = step_metrics.edges(late, times, times, late, np.array([50, 0, 20]))
    told["edges of none"] = step_metrics.edges(*4 * [times[:0]], np.array([], int))
    told["sync of three"] = step_metrics.gradient_sync(times + 7, times + 7 + late, np.array([0, 1, 2, -1]))
    begun, ended = np.where(times > 0, times + 5, 0), np.where(times > 0, times + 9, 0)
    for name, clock in {"of the host": (late, late * 0), "of a device": (begun, ended), "mixed": (late, ended)}.items():
        told[f"overlap {name}"] = step_metrics.overlap_of(times, times + 25, *clock, np.array([60, 1_000, 0]))
        told[f"share {name}"] = told[f"overlap {name}"].hidden_share
    told["overlap of none"] = step_metrics.overlap_of(*4 * [times[:, :0]], np.array([60, 1_000, 0]))
    told["of nothing"] = (step_metrics.median(values[..., :0]), step_metrics.alone(times[:, :1]))
    told["covered by none"] = step_metrics.covered(times[:, :0], times[:, :0], times[:, :0] > 0)
    told["medians of many"] = step_metrics.median(np.stack([values, values + 1])), step_metrics.mean(values[None, :])
    columns = {name: np.abs(values) * (2 + place) for place, name in enumerate(step_metrics.BREAKDOWN)}
    told["breakdown"] = step_metrics.breakdown(np.arange(4), columns)
    whole = {name: columns[name] + (1_000 if name == "step_ms" else 0) for name in columns}
    told["breakdown of long steps"] = step_metrics.breakdown(np.arange(4), whole)
    told["total, floor, efficiency"] = [getattr(told["breakdown"], name) for name in ("total", "floor", "efficiency")]
    approved("metrics", "\n".join(f"{name}: {rounded(value)}" for name, value in told.items()))


def test_late_places() -> None:
    """Every number of those who are late, on quiet, busy and crowded machines."""
    told = []
    for seed, delay in itertools.product(range(3), (0, 1, 3, 8)):
        for begin, ready in (even(3, noise=0.2), busy(seed, 3), crowded_times(seed, 0.5 * delay)):
            forward = np.random.default_rng(seed).normal(5, 1, begin.shape) * 1e6
            often = (np.arange(ready.shape[1]) % 2 == 0) | (delay > 1)
            ready[1, :, 5:] += (delay * often[:, None] * 1_000_000).astype(np.int64)
            forward[1] += 4e6 * often
            told += [rounded(one) for one in stragglers.find_stragglers(begin, ready, forward)]
            told += [rounded(one) for one in stragglers.find_varying(waited(ready), 60e6)]
            slow = ready.copy()
            slow[2] += 250_000 * np.arange(ready.shape[2])
            told += [rounded(one) for one in stragglers.find_stragglers(begin, slow, minimum_share=0.5)]
    for slower, share in itertools.product(
        (0.1e6, 0.3e6, 0.6e6), (0.5, 1.0)
    ):  # at every place, in a share of the steps
        begin, ready = even(3, noise=0.02)
        ready[2, : int(share * ready.shape[1])] += (slower * np.arange(1, ready.shape[2] + 1)).astype(np.int64)
        told += [f"{slower:g} ns more, {share}: {rounded(one)}" for one in stragglers.find_stragglers(begin, ready)]
    approved("late places", "\n".join(told))


def test_late_places_by_a_hair() -> None:
    """Who is late where times differ by the least that counts or nothing, few steps are known and some are missing."""
    draw, told = np.random.default_rng(8), []
    for number in range(400):
        ranks, steps = (int(draw.choice(sizes)) for sizes in ((1, 2, 3, 4), (1, 2, 7, 8, 9, 15, 16, 20, 40)))
        places, length, half = int(draw.choice((0, 1, 2, 5))), int(draw.choice((20, 100, 400))), 500_000
        own = draw.integers(2, 5, (ranks, steps, places)) * half
        arrived, forward = draw.integers(0, 3, (ranks, steps)) * half, draw.integers(9, 11, (ranks, steps)) * 1.0 * half
        often = draw.random(steps) < draw.choice((0.25, 0.5, 0.75, 0.9, 1))
        late, more = int(draw.integers(ranks)), int(draw.choice((0, 2, 3, 4, 8))) * half
        forward[late] += more * often * draw.choice((0, 1))
        if (place := int(draw.integers(-1, places + 1))) in (-1, places):
            (arrived if place < 0 else own)[late] += more * (often if place < 0 else often[:, None])
        else:
            own[late, :, place] += more * often
            own[draw.integers(ranks), :, draw.integers(places)] += int(draw.choice((0, 4, 9))) * half
        begin = np.arange(1, steps + 1) * 2 * length * half + arrived
        ready = begin[:, :, None] + np.cumsum(own, axis=2)
        if number % 3 == 1:
            begin[draw.random(begin.shape) < 0.1] = 0
            ready[draw.random(ready.shape) < 0.1] = 0
            forward[draw.random(forward.shape) < 0.2] = np.nan
        share = float(draw.choice((0.25, 0.5)))
        found = stragglers.find_stragglers(begin, ready, forward if number % 2 else None, minimum_share=share)
        waits = draw.integers(0, 3, (ranks, steps)) * half * (draw.random((ranks, steps)) < 0.8)
        waits[late] += more * often
        varying = stragglers.find_varying(waits, float(length * half))
        told += [f"{number}: {short(one)}" for one in (*found, *varying)]
    approved("late places by a hair", "\n".join(told))


def short(one: stragglers.Late) -> str:
    steps = "".join(map(str, one.late.astype(int)))
    return f"{one.rank} {one.place} {one.delay_ns:.6g} {one.share:.4f} {one.pattern} {steps}"


def of_groups(draw: np.random.Generator, number: int) -> tuple[list[ModelCollectives], list[dict[str, Any]]]:
    """Steps of three parameter groups on up to three ranks, one of which is slow before one collective; the layout."""
    ranks, steps = (int(draw.choice(sizes)) for sizes in ((1, 2, 2, 3), (0, 1, 4, 5, 6, 7, 10, 20)))
    prefetch = [(), (1,), (2,), (1, 2)][int(draw.integers(4))]
    layout: list[dict[str, Any]] = [
        {"forward_prefetch": prefetch},
        {},
        {"forward_prefetch": (1,)} if number % 5 else {},
    ]
    order = [(0, 0, False), *((0, group, group in prefetch) for group in (1, 2))]
    for group in (2, 1, 0):
        order += [(1, group, bool(draw.random() < 0.5))] * (group < 2) + [(2, group, False)]
        order += [(3, group, False)] * (number % 4 == 0)
    if number % 9 == 0:  # replicated
        order = [(3, group, False) for group in (2, 1, 0)]
    slow = np.zeros((ranks, len(order), steps), np.int64)
    for _ in range(2):
        often = draw.random(steps) < draw.choice((0.5, 0.7, 0.9, 1))
        slow[draw.integers(ranks), draw.integers(len(order))] += 2 * draw.choice((0, 1, 2, 4)) * often
    models = []
    for rank in range(ranks):
        met = []
        begin = (np.arange(steps) + 1) * 100_000_000
        for step, now in enumerate(begin.tolist()):
            usual = order if draw.random() > 0.05 else order[::-1]
            for index, what in enumerate(usual):
                now += 500_000 * int(draw.integers(2, 4) + slow[rank, index, step])
                wait = 1_000_000 * int(draw.integers(0, 4))
                met.append((step, *what, now, now + wait, now if wait else 0, wait, draw.random() > 0.01))
                now += wait
        row, kind, group, ahead, now, end, wait_begin, wait, told = np.array(met, np.int64).reshape(-1, 9).T
        begin[draw.random(steps) < 0.1] = 0
        model = (ModelCollectives if number % 3 else DeviceCollectives)(
            **{"begin": begin, "end": begin + 90_000_000, "row": row, "group": group, "kind": kind},
            **{"ahead": ahead > 0, "goes_on": wait == 0, "bytes": 0 * row, "entered": now, "ended": end, "met": now},
            **{"wait_begin": wait_begin, "wait_ns": wait, "told": told > 0},
        )
        models.append(model)
    return models, layout


def test_late_groups_by_a_hair() -> None:
    """Which rank is late in which group, what it did between collectives, and which prefetch misses."""
    draw, told = np.random.default_rng(9), []
    for number in range(400):
        models, layout = of_groups(draw, number)
        late = grouping.late_groups(models, layout, float(draw.choice((1e7, 1e8, 2e8, 4e8))))
        told += [f"{number}: {rounded(one)}" for one in late]
        if number % 10 in (0, 3) and len(models[0].row):
            last = np.flatnonzero(models[0].row == models[0].row[-1])
            told += [f"{number}: {one}" for one in grouping.done_between(models[0], last, layout)]
        told += [f"{number} misses {one}" for one in grouping.missed_prefetches(models[-1], layout)]
    approved("late groups by a hair", "\n".join(told))


def test_parts_by_a_hair() -> None:
    """Where the time of steps goes, if few samples tell, places have no part, and some times are not known."""
    draw, told = np.random.default_rng(10), []
    places = [
        Place("code", "a.py:1"),
        Place("logging", "a.py:2", "print()"),
        Place("data", "Images", "", 2),
        Place("", "b"),
    ]
    for number in range(60):
        steps, ranks = int(draw.choice((1, 2, 5))), {}
        for rank in range(int(draw.choice((0, 1, 2)))):
            columns = {name: draw.integers(0, 4, steps) * 1e6 for name in ("forward", "compute", "hidden", "exposed")}
            columns["backward"] = columns["compute"] + draw.integers(0, 3, steps) * 1e6
            columns["exposed"][draw.random(steps) < 0.2] = np.nan
            whole = draw.choice((-1, 0, 1e7, 2e7, 1e8), steps, p=(0.1, 0.1, 0.3, 0.3, 0.2))
            samples = int(draw.choice((0, 1, 2, 3, 7, 8, 30)))
            seen = draw.integers(-1, len(places), samples), draw.integers(0, 3, samples)
            spent = [(int(draw.integers(-1, 3)), int(draw.integers(0, 3)) * 1_000_000) for _ in range(3)]
            spans = draw.integers(0, 3, (steps, len(SPANS))) * 1_000_000
            ranks[rank] = RankSteps(whole=whole, **columns, spans=spans, places=spent, samples=seen)
        found = step_parts(ranks, places)
        told.append(f"{number}: {found.steps} steps, samples {found.samples}, named {rounded(found.named)}")
        told += [
            f"{rank}: {key} {rounded(1e3 * ms)}" for rank, parts in found.by_rank.items() for key, ms in parts.items()
        ]
        told += [
            f"{rank}: {one.place} {rounded(1e3 * one.seconds)}" for rank in found.places for one in found.places[rank]
        ]
        told += [f"all: {key} {rounded(1e3 * seconds)}" for key, seconds in found.mean.items()] * (len(ranks) > 1)
        told += [f"{place}: {list(by_rank)}" for place, by_rank in found.lines("code")]
    approved("parts by a hair", "\n".join(told))


def test_replays() -> None:
    """What steps would save with other buckets, collectives and ranks."""
    told = []
    for name in ("nothing", "buckets too big", "late at a layer at times", "late to the backward", "unused parameters"):
        known = MODELS[name].record(8).analysis_input()
        assert known is not None
        replay, delay = known.replay, np.linspace(0, 4e6, len(known.steps))
        told += [f"== {name}", rounded(replay.line), rounded(replay.service[-1]), rounded(replay.tail)]
        told += [rounded(replay.base), rounded(replay.waited), rounded(replay.with_service(0.5 * replay.service))]
        told += [rounded(replay.with_buckets(in_buckets(size))) for size in (1, 4, 16)]
        told += [rounded(replay.mean_saved_without(rank, place, delay)) for rank in (0, 1) for place in (-1, 0, 9)]
        told.append(f"{known.by_readiness} {known.step_ns} {known.steps.forward_ns()[0, :2]} {len(known.steps)}")
    lines = [([1e6, 2e6, 4e6], [1.5e6, 2.5e6, 4.5e6]), ([1e6, 4e6], [5e6, 1e6]), ([1e6, 2e6], [1e5, 2e6])]
    lines += [([1, 1.4], [1e6, 3e6]), ([1.0, 2.0, 3.0], [1e3, 1e3 + 4, 1e3 + 8]), ([2e6, 4e6], [0.5, 1.0])]
    lines += [([1e6, 1.4e6], [1e6, 3e6]), ([], []), ([0.0, 0.0], [1e6, 2e6]), ([1e6, 1.5e6], [1e6, 3e6])]
    told += [f"{rounded(fit_line(*line))}, {fit_line(*line).time_ns(3e6):.6g}" for line in lines]
    approved("replays", "\n".join(told))
