"""Findings about the program around the model, and about the dimensions of a mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddp_lab.analysis.findings import Facts, MeshDimension, findings, headline
from ddp_lab.analysis.findings.facts import Finding
from ddp_lab.analysis.step_parts import Place, PlaceTime, StepParts
from tests.unit.step_model import StepModel

# 16 gradients of 1 MB, each 1 ms; collectives of 0.1 ms + 0.4 ms a MB: hidden.
MODEL = StepModel(
    gradients=[1.0] * 16,
    sizes=[1_000_000] * 16,
    buckets=[[one] for one in range(16)],
    per_mb=0.4,
    options={"gradient_as_bucket_view": True},
)
CPU = {"host": "here", "cores": 4, "threads": 2}


def facts(parts: dict[str, float], *lines: PlaceTime, **fields: Any) -> Facts:
    """Facts about two ranks whose mean step has these parts (ms)."""
    known = MODEL.record(20).judgement()
    seconds = {name: ms / 1e3 for name, ms in parts.items()}
    told = StepParts(20, dict.fromkeys((0, 1), seconds), dict.fromkeys((0, 1), lines), {0: 50, 1: 50})
    return replace(known, **{"parts": told, "processes": {0: CPU, 1: CPU}, **fields})


def on_gpu(made: Facts) -> Facts:
    return replace(made, keys=[(dtype, "cuda:0") for dtype, _ in made.keys])


def kinds(made: Facts) -> dict[str, Finding]:
    return {one.kind: one for one in findings(made)}


def at(part: str, text: str = "", ms: float = 2.0, **fields: Any) -> PlaceTime:
    return PlaceTime(Place(part, "train.py:7", text, **fields), ms / 1e3)


def test_a_loader_that_all_ranks_wait_for() -> None:
    """Its share of the step is the saving; the fix depends on whether it has workers."""
    for workers, fix in ((0, "num_workers=2"), (2, "can't keep up")):
        one = kinds(facts({"data": 7, "forward": 10.5}, at("data", workers=workers)))["data-loading"]
        assert round(one.gain_percent) == 40
        assert fix in one.remedy
    assert "data-loading" not in kinds(facts({"data": 1, "forward": 16.5}))


def test_other_work_of_a_step_is_named_with_its_line() -> None:
    """Collectives, evaluation, logging, checkpoints and a long line: each has its kind, and evidence names the line."""
    for part, kind in (
        *(("collectives", "other-collectives"), ("evaluation", "evaluation-cost"), ("logging", "logging-cost")),
        *(("checkpoint", "checkpoint-cost"), ("code", "program-line")),
    ):
        found = kinds(facts({part: 2, "forward": 8}, at(part, "the_line()")))
        assert set(found) == {kind}
        assert "train.py:7 (the_line())" in found[kind].evidence
        assert kinds(facts({part: 0.2, "forward": 9.8}, at(part, "the_line()", 0.2))) == {}


def test_ranks_that_share_cores() -> None:
    """More threads than cores is a finding, and what a replay estimates of buckets is left out then. Values that are
    read, copies from memory that is not pinned, contexts on several GPUs: never on CPUs."""
    known = replace(MODEL, buckets=[[*range(16)]]).record(20).judgement()
    assert "bucket-too-big" in kinds(known)
    shared = replace(known, processes={rank: {**CPU, "threads": 4} for rank in (0, 1)})
    found = kinds(shared)
    assert "bucket-too-big" not in found
    assert "2 ranks with 8 threads run on 4 cores" in found["shared-cores"].title
    assert "tune()" in found["shared-cores"].remedy
    assert "shared-cores" not in kinds(replace(known, processes={0: CPU, 1: CPU}))
    assert "shared-cores" not in kinds(on_gpu(shared))
    read = facts({"code": 2, "forward": 8}, at("code", "total += loss.item()"))
    assert "value-read" not in kinds(read)
    assert "train.py:7" in kinds(on_gpu(read))["value-read"].evidence
    moved = facts({"copies": 2, "data": 0.1, "forward": 8}, at("copies", "x = x.to(device)"), at("data", workers=2))
    assert "blocking-copies" not in kinds(moved)
    assert "not in pinned memory" in kinds(on_gpu(moved))["blocking-copies"].evidence
    two = facts({"forward": 8}, processes={0: CPU, 1: {**CPU, "contexts": [0, 1]}})
    assert kinds(two)["context-on-other-gpu"].rank == 1


def test_nothing_is_said_of_steps_that_were_not_judged() -> None:
    """That no change would save time is said only of enough steps."""
    few = MODEL.record(3).judgement()
    assert headline(few, []).startswith("Too few steps to say")
    many = facts({"forward": 8})
    assert headline(many, []).startswith("No change would save")


SMALL = StepModel(
    gradients=[1.0] * 4, sizes=[1_000_000] * 4, buckets=[[0, 1], [2, 3]], options={"gradient_as_bucket_view": True}
)
SHARD = MeshDimension("shard", between_hosts=True, bytes=3e6, ns=3e6, waited_ns=2e6)  # 1 GB/s
REPLICATE = MeshDimension("replicate", between_hosts=False, bytes=1e6, ns=1e5, waited_ns=1e5)  # 10 GB/s


def gains(*dimensions: MeshDimension) -> list[float]:
    """What is to be gained by exchanging dimensions, in ns of a step."""
    facts = SMALL.record(20).judgement()
    assert isinstance(facts, Facts)
    found = [one for one in findings(replace(facts, dimensions=dimensions)) if one.kind.startswith("mesh-dimension")]
    return [one.gain_percent / 100 * facts.step_ns for one in found]


def test_the_dimension_that_sends_more_belongs_within_a_host() -> None:
    """What is saved is the difference of what they send, at the difference of their rates; at most what is waited."""
    assert gains(SHARD, REPLICATE) == pytest.approx([2e6 * (1 - 0.1)])
    assert gains(REPLICATE, replace(SHARD, waited_ns=1e6)) == pytest.approx([1e6])


@pytest.mark.parametrize(
    "dimensions",
    [
        (SHARD,),
        (SHARD, replace(REPLICATE, between_hosts=True)),
        (replace(SHARD, between_hosts=False), REPLICATE),
        (replace(SHARD, bytes=0.9e6), REPLICATE),  # it sends less
        (SHARD, replace(REPLICATE, ns=0.8e6)),  # at nearly the same rate
        (SHARD, replace(REPLICATE, bytes=0.0)),
        (replace(SHARD, waited_ns=0.0), REPLICATE),  # it is overlapped
    ],
)
def test_nothing_is_to_be_gained(dimensions: tuple[MeshDimension, ...]) -> None:
    """Where they are at their places, or it is not known."""
    assert gains(*dimensions) == []
