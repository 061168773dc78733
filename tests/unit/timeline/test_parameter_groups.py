"""Parameter groups from constructed events: times, exposed parts, overlapped all-gathers, who is late, and the view."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from ddp_lab import native
from ddp_lab.analysis.parameter_groups import REDUCE_SCATTER, late_groups
from ddp_lab.dashboard.views.overlap import breakdown
from ddp_lab.dashboard.views.parameter_groups import ParameterGroups, parameter_groups_scene
from ddp_lab.protocol.events import Batch, Kind
from ddp_lab.timeline.tables.parameter_groups import USES
from ddp_lab.timeline.timeline import Timeline
from tests.unit.backwards import rows as events_of

STEP = 100.0  # ms from the end of a step to the end of the next
_PIECE = 40  # steps
NAMES = ("Net", "blocks.0", "blocks.1")
SIZE = 1_000


@dataclass(frozen=True)
class Collective:
    """Times in ms since the step before has ended; `waits`: None where no thread ever waited for a `Work`."""

    operation: str
    use: str
    group: int
    entered: float
    ended: float
    waits: tuple[float, float] | None


GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
USUAL = (
    Collective(GATHER, "forward", 0, 1, 3, (1, 3)),
    Collective(GATHER, "forward", 1, 4, 8, (4, 8)),
    Collective(GATHER, "forward ahead", 2, 9, 19, (15, 19)),  # asked for by the program: goes on for 6 ms
    Collective(GATHER, "backward", 2, 40, 44, (40, 44)),
    Collective(GATHER, "backward ahead", 1, 44, 47, (44, 47)),
    Collective(SCATTER, "reduction", 2, 60, 66, (60, 66)),
    Collective(SCATTER, "reduction", 1, 80, 85, (80, 85)),
    Collective(SCATTER, "reduction", 0, 90, 91, None),  # ended inside the call
)


def recorded(
    *,
    steps: int = 20,
    backend: str = "gloo",
    device: str = "cpu",
    late: float = 0.0,
    evaluates: bool = False,
    kind: str = "fully_shard",
    mesh: tuple[int, ...] = (2,),
    idle: int = 0,
) -> Timeline:
    """Ranks with three parameter groups: as many as the mesh has.

    Args:
        steps: how many.
        backend, device: of all collectives.
        late: ms that rank 1 computes longer in the forward of blocks.0; the others then wait that long.
        evaluates: there is an all-gather of an evaluation in each step.
        kind, mesh: of the model; with two dimensions, blocks.1 is all-reduced after its reduce-scatter, and with
            "replicate" all groups are all-reduced, and that alone.
        idle: so many more groups, which never communicate.
    """
    timeline = Timeline()
    collectives = USUAL
    if evaluates:
        collectives = (Collective(GATHER, "evaluation", 1, 0.2, 0.8, (0.2, 0.8)), *USUAL)
    if kind == "replicate":
        collectives = tuple(replace(one, operation=REDUCE) for one in USUAL if one.operation == SCATTER)
    elif len(mesh) > 1:
        collectives = (*collectives, Collective(REDUCE, "reduction", 2, 67, 70, (67, 70)))
    ranks = math.prod(mesh)
    for rank in range(ranks):
        for one in [
            _model(device, kind, mesh, idle),
            {"type": "group", "index": 0, "name": "0", "ranks": list(range(ranks)), "backend": backend},
        ]:
            timeline.describe(rank, {**one, "session": 1})
        for index, one in enumerate(collectives):
            call = {"type": "call", "index": index, "operation": one.operation, "use": one.use, "session": 1}
            timeline.describe(rank, {**call, "reducer": 0, "bucket": one.group})
    sent = [0] * ranks
    for first in range(0, steps, _PIECE):  # as they arrive from ranks that run
        for rank in range(ranks):
            rows = []
            for step in range(first, min(steps, first + _PIECE)):
                rows += _step(step * (STEP + late), step, collectives, late, late if rank == 1 else 0.0)
            timeline.extend(Batch(rank, 1, sent[rank], 0, _events(rows, sent[rank])))
            sent[rank] += len(rows)
    return timeline


def _model(device: str, kind: str = "fully_shard", mesh: tuple[int, ...] = (2,), idle: int = 0) -> dict[str, Any]:
    of_mesh = [{"name": f"dim{number}", "size": size} for number, size in enumerate(mesh)]
    names = (*NAMES, *(f"idle.{number}" for number in range(idle)))
    layout = [
        {"bucket": number, "name": name, "bytes": SIZE, "parameters": [number], "device": device}
        | {"sharded_bytes": SIZE // 2, "unsharded_bytes": SIZE, "mesh": of_mesh}
        for number, name in enumerate(names)
    ]
    kept = {"bytes": SIZE, "shape": [SIZE // 4], "numel": SIZE // 4, "dtype": "float32", "device": device}
    parameters = [{"index": number, "name": f"{name}.weight", **kept} for number, name in enumerate(names)]
    made = {"type": "assignment", "kind": kind, "reducer": 0, "generation": 0}
    made["group_ranks"] = list(range(math.prod(mesh)))
    return {**made, "module": "Net", "rebuilt": False, "parameters": parameters, "buckets": layout}


def _step(
    begin: float, step: int, collectives: tuple[Collective, ...], late: float, own: float
) -> list[tuple[float, Kind, dict[str, int]]]:
    of_step = {"step": step}
    rows: list[tuple[float, Kind, dict[str, int]]] = [(begin + 0.9, Kind.FORWARD_BEGIN, of_step)]
    for index, one in enumerate(collectives):
        after, next_one = one.entered > 8, one.entered == 9  # behind the forward of blocks.0; where the others wait
        fields = {"process_group": 0, "parameter": index, "reducer": -1, "bytes": SIZE}
        fields["step"] = step * len(collectives) + index
        entered = begin + one.entered + (own if next_one else late if after else 0)
        ended = begin + one.ended + (late if after else 0)
        rows += [(entered, Kind.COLLECTIVE_ENTERED, fields), (ended, Kind.COLLECTIVE_ENDED, fields)]
        if one.waits is not None:
            first, last = begin + one.waits[0] + (own if next_one else late if after else 0), begin + one.waits[1]
            last += late if after else 0
            rows += [(first, Kind.WAIT_BEGIN, fields), (last, Kind.WAIT_END, fields)]
        if one.use == "reduction":
            of_group = {**of_step, "bucket": one.group}
            rows += [(entered, Kind.BUCKET_LAUNCHED, of_group), (ended, Kind.BUCKET_REDUCED, of_group)]
    for at, kind in (
        (35, Kind.FORWARD_END),
        (39, Kind.BACKWARD_BEGIN),
        (92, Kind.FINALIZE_BEGIN),
        (STEP, Kind.BACKWARD_END),
    ):
        rows.append((begin + late + at, kind, of_step))
    return rows


def _events(rows: list[tuple[float, Kind, dict[str, int]]], first: int) -> np.ndarray:
    facts = [
        {"host_ns": 1_000_000_000 + round(1e6 * at), "kind": kind, "reducer": 0} | fields
        for at, kind, fields in sorted(rows, key=lambda row: row[0])
    ]
    return events_of(*facts, first=first)


def test_a_row_for_each_group() -> None:
    """Times, their exposed parts, counts and bytes of each step; a collective that ends in its call is exposed, too."""
    rows = recorded().parameter_groups()
    assert len(rows) == 2 * 20 * 3
    one = rows[(rows["rank"] == 0) & (rows["step"] == 5)].set_index("module")
    assert one["forward_unshard_ms"].tolist() == [2, 4, 10]
    assert one["forward_unshard_exposed_ms"].tolist() == [2, 4, 4]
    assert one["backward_unshard_ms"].tolist() == [0, 3, 4]
    assert one["reduce_scatter_ms"].tolist() == [1, 5, 6]
    assert one["reduce_scatter_exposed_ms"].tolist() == [1, 5, 6]
    assert one["all_reduce_ms"].tolist() == [0, 0, 0]
    assert one["forward_prefetched"].tolist() == [False, False, True]
    assert one["backward_prefetched"].tolist() == [False, True, False]
    assert one["gathered_bytes"].tolist() == [SIZE, 2 * SIZE, 2 * SIZE]
    assert one["reduced_bytes"].tolist() == [SIZE] * 3
    assert one["sharded_bytes"].tolist() == [SIZE // 2] * 3


def test_exposed_is_what_a_rank_waits() -> None:
    """In steps, parts and summary: waits in forward and backward; what runs meanwhile is overlapped; sums agree."""
    timeline = recorded()
    step = timeline.steps().query("rank == 0 and step == 5").iloc[0]
    waits = 2 + 4 + 4 + 4 + 3 + 6 + 5 + 1
    assert step["exposed_ms"] == pytest.approx(waits)
    assert step["hidden_ms"] == pytest.approx(6)
    assert step["forward_ms"] == pytest.approx(35 - 0.9 - 10)
    assert step["compute_ms"] == pytest.approx(92 - 39 - 19)
    assert step["step_ms"] == pytest.approx(STEP)
    spans = timeline.spans().query("rank == 0 and step == 5").set_index("bucket")
    assert spans["exposed_ms"].tolist() == [1, 5, 6]
    assert spans["hidden_ms"].tolist() == [0, 0, 0]
    for parts in timeline.parts().by_rank.values():
        assert sum(parts.values()) == pytest.approx(STEP / 1e3)
        assert parts["exposed"] == pytest.approx(waits / 1e3)
    assert f"ranks wait {waits:.1f} ms for their collectives" in timeline.summary()


@pytest.mark.parametrize(("backend", "device"), [("mpi", "cpu"), ("nccl", "cuda:0"), ("gloo", "cuda:0")])
def test_what_is_not_known_is_said(backend: str, device: str) -> None:
    """Where nobody tells when a rank waits, exposed times are NaN, and the words say so; nothing is found from them."""
    timeline = recorded(backend=backend, device=device)
    rows = timeline.parameter_groups()
    assert (rows["forward_unshard_ms"] > 0).all()
    unknown = rows if device != "cpu" else rows[rows["forward_prefetched"]]  # the others are exposed while they run
    assert unknown["forward_unshard_exposed_ms"].isna().all()
    assert timeline.steps()["exposed_ms"].isna().all()
    assert "is not known here" in timeline.summary()
    assert "is not known here" in parameter_groups_scene(timeline).summary
    assert [one.kind for one in timeline.findings()] == ["exposed-backward-unshard"] * (device == "cpu")


@dataclass(frozen=True)
class Streamed:
    """A collective on a device, and when the stream that computes waits for it: ms on the device since the step began.
    In the order in which the host comes to the waits; `entered`: in which it enters them."""

    operation: str
    use: str
    group: int
    entered: int
    runs: tuple[float, float]
    waits: tuple[float, float]


STREAMED = (
    Streamed(GATHER, "forward", 0, 0, (1, 3), (1, 3)),
    Streamed(GATHER, "forward", 1, 1, (3, 7), (4, 7)),
    Streamed(GATHER, "forward ahead", 2, 2, (7, 11), (12, 12.1)),
    Streamed(GATHER, "backward", 2, 3, (20, 24), (20, 24)),
    Streamed(GATHER, "backward ahead", 1, 4, (24, 28), (40, 40.1)),
    Streamed(SCATTER, "reduction", 2, 5, (41, 47), (60, 60.1)),
    Streamed(SCATTER, "reduction", 1, 6, (61, 66), (64, 66)),
    Streamed(SCATTER, "reduction", 0, 7, (66, 70), (66, 70)),
)
WAITED = 2 + 3 + 0.1 + 4 + 0.1 + 0.1 + 2 + 4


def streamed(
    *, steps: int = 20, late: float = 0.0, kind: str = "fully_shard", announced: int | None = None
) -> Timeline:
    """The same on devices, whose hosts are far ahead of them.

    Args:
        steps: how many.
        late: ms that rank 1 computes longer in the forward of blocks.0; the other one waits before its backward.
        kind: of the model.
        announced: the group that Net's own prefetches in the forward.
    """
    timeline, model = Timeline(), _model("cuda:0", kind)
    if announced is not None:
        model["buckets"][0]["forward_prefetch"] = [announced]
    for rank in range(2):
        group = {"type": "group", "index": 0, "name": "0", "ranks": [0, 1], "backend": "nccl"}
        calls = [
            {"type": "call", "index": one.entered, "operation": one.operation, "use": one.use, "reducer": 0}
            | {"bucket": one.group}
            for one in STREAMED
        ]
        for described in [model, group, *calls]:
            timeline.describe(rank, {**described, "session": 1})
        events = np.concatenate([_streamed_step(step, late, rank) for step in range(steps)])
        events["sequence"] = np.arange(len(events))
        timeline.extend(Batch(rank, 1, 0, 0, events))
    return timeline


def _streamed_step(step: int, late: float, rank: int) -> np.ndarray:
    whole = STEP + late
    host, device = 5.0 * step, 1_000 + whole * step  # the host takes 5 ms for a step
    rows: list[tuple[float, Kind, dict[str, int]]] = [(host + 0.1, Kind.FORWARD_BEGIN, {"step": step})]
    told: list[tuple[float, Kind, dict[str, int]]] = []
    for number, one in enumerate(STREAMED):
        fields = {"process_group": 0, "parameter": one.entered, "reducer": -1, "bytes": SIZE}
        fields["step"] = step * len(STREAMED) + one.entered
        rows.append((host + 0.2 + 0.5 * one.entered, Kind.COLLECTIVE_ENTERED, fields))
        shift = late if number > 2 or (rank == 1 and number == 2) else 0
        began = late if number > 3 or (rank == 1 and number in (2, 3)) else 0
        ran = began if number > 2 else 0
        first, last = device + one.runs[0] + ran, device + one.runs[1] + (late if number > 2 else 0)
        told.append((0, Kind.COLLECTIVE_ENDED, fields | _on_device(first, last)))
        first, last = device + one.waits[0] + began, device + one.waits[1] + shift
        told.append((host + 0.25 + 0.5 * number, Kind.WAIT_END, fields | _on_device(first, last)))
        if one.use == "reduction":
            rows.append((host + 0.3 + 0.5 * one.entered, Kind.BUCKET_LAUNCHED, {"step": step, "bucket": one.group}))
    for at, kind in (
        (1.6, Kind.FORWARD_END),
        (1.7, Kind.BACKWARD_BEGIN),
        (4.5, Kind.FINALIZE_BEGIN),
        (4.9, Kind.BACKWARD_END),
    ):
        rows.append((host + at, kind, {"step": step}))
    return np.concatenate([_events(rows, 0), _events(told, 0)])


def _on_device(first: float, last: float) -> dict[str, int]:
    return {f"device_{name}_ns": 1_000_000_000 + round(1e6 * at) for name, at in (("begin", first), ("end", last))}


def test_a_device_waits() -> None:
    """Exposed is what the stream that computes waits; the step is the device's, though its host is far ahead."""
    timeline = streamed()
    one = timeline.parameter_groups().query("rank == 0 and step == 5").set_index("module")
    assert one["forward_unshard_ms"].tolist() == [2, 4, 4]
    np.testing.assert_allclose(one["forward_unshard_exposed_ms"], [2, 3, 0.1])
    np.testing.assert_allclose(one["backward_unshard_exposed_ms"], [0, 0.1, 4])
    np.testing.assert_allclose(one["reduce_scatter_exposed_ms"], [4, 2, 0.1])
    step = timeline.steps().query("rank == 0 and step == 5").iloc[0]
    assert step["clock"] == "device"
    assert step["exposed_ms"] == pytest.approx(WAITED)
    assert step["step_ms"] == pytest.approx(STEP)
    assert step["forward_ms"] == pytest.approx(1.5)  # the host's
    spans = timeline.spans().query("rank == 0 and step == 5").set_index("bucket")
    assert spans["device_ms"].tolist() == [4, 5, 6]
    for parts in timeline.parts().by_rank.values():
        assert sum(parts.values()) == pytest.approx(5 / 1e3)  # the host's step, of which it does this itself:
        assert parts["exposed"] == pytest.approx((5 - 1.5 - 2.8) / 1e3)
    again, found = timeline.findings()
    assert (again.kind, again.bucket) == ("exposed-backward-unshard", 2)
    assert again.gain_percent == pytest.approx(4.1, abs=0.01)
    assert "fully_shard(module, reshard_after_forward=False). That takes up to 1.95 KiB more" in again.remedy
    assert found.kind == "exposed-unshard"
    assert found.gain_percent == pytest.approx(3.1, abs=0.01)  # what runs before the first one can't hide it
    assert "set_modules_to_forward_prefetch() of fully_shard's modules" in found.remedy
    (panel,) = parameter_groups_scene(timeline).panels
    computed = {
        tip.split("\n")[0]: round(end - begin, 1)
        for one in panel.marks
        if one.role.startswith("phase")
        for begin, end, tip in zip(one.begin, one.end, one.tips, strict=True)
    }
    assert computed["rank 0: forward of blocks.0"] == pytest.approx(5)
    assert computed["rank 0: backward of blocks.0"] == pytest.approx(19)


def test_a_prefetch_that_misses_the_next_group() -> None:
    """It is named with what it announces and what comes next; one that announces the next group is not."""

    def remedy(announced: int) -> str:
        return next(one.remedy for one in streamed(announced=announced).findings() if one.kind == "exposed-unshard")

    assert remedy(2) == (
        "Net prefetches blocks.1, but blocks.0 comes next: pass that one to the set_modules_to_forward_prefetch() of "
        "Net."
    )
    assert remedy(1).startswith("Start all-gathers earlier")


def test_uses_and_evaluations() -> None:
    """What is gathered for an evaluation is neither counted nor exposed. A reader that has no ranks knows the same
    names, in the same order."""
    plain, evaluated = recorded(), recorded(evaluates=True)
    assert (
        evaluated.parameter_groups()["forward_unshards"].tolist()
        == plain.parameter_groups()["forward_unshards"].tolist()
    )
    np.testing.assert_allclose(evaluated.steps()["exposed_ms"], plain.steps()["exposed_ms"])
    assert "evaluation" in set(evaluated.collectives()["use"])
    assert native.load().USES == USES


def test_a_late_rank_has_a_name() -> None:
    """By rank, group and phase, on the host or by what the device's stream does between waits; nobody is late in a
    healthy run, or in too few steps."""
    found = [one for one in recorded(late=6.0).findings() if one.kind == "late-parameter-group"]
    assert [(one.rank, one.bucket, one.title) for one in found] == [
        (1, 1, "Rank 1 is late in the forward of blocks.0.")
    ]
    assert found[0].gain_percent == pytest.approx(100 * 6 / (STEP + 6), rel=0.01)
    healthy = recorded()
    assert [one.kind for one in healthy.findings()] == ["exposed-unshard", "exposed-backward-unshard"]
    assert healthy.stragglers() == []
    timeline = recorded(steps=3, late=6.0)
    parts = timeline.collectives_in(timeline.views(0))
    assert late_groups([one for _, one in parts], timeline.assignment(0)["buckets"], 1e8) == []
    assert (parts[0][1].kind == REDUCE_SCATTER).sum() == 9
    late = [one for one in streamed(late=6.0).findings() if one.kind == "late-parameter-group"]
    assert [one.title for one in late] == ["Rank 1 is late in the forward of blocks.0."]
    assert late[0].gain_percent == pytest.approx(100 * 6 / (STEP + 6), rel=0.01)
    assert [one for one in streamed().findings() if one.kind == "late-parameter-group"] == []


def test_collectives_that_are_no_longer_kept() -> None:
    """A program that goes on with many other collectives takes their place: the view says so. In a
    long run they have no exposed time; means, charts and the history of all steps leave no room for zeros."""
    steps, others = 8, 20_000
    timeline = recorded(steps=steps)
    first = steps * len(_step(0.0, 0, USUAL, 0.0, 0.0))
    fields = {"process_group": 0, "reducer": -1, "bytes": SIZE}
    rows = [
        (steps * STEP + 1e-3 * one, Kind.COLLECTIVE_ENTERED, {**fields, "step": 1000 + one}) for one in range(others)
    ]
    for rank in range(2):
        timeline.extend(Batch(rank, 1, first, 0, _events(rows, first)))
    assert "no longer kept; train a few more steps" in parameter_groups_scene(timeline).empty
    steps = 2_500  # of 8 collectives: more than a rank's table holds
    timeline = recorded(steps=steps)
    assert timeline.forgotten_collectives() > 0
    found = timeline.steps().query("rank == 0").set_index("step")
    old = found[found.index < 400]  # of which the tables hold some
    assert len(old) > 10
    assert old["exposed_ms"].isna().all()
    assert set(old["clock"]) == {"none"}
    assert found.loc[steps - 1, "exposed_ms"] == pytest.approx(29)
    shown = breakdown(timeline, 0, 10_000)
    assert len(shown.step) > 1_000
    assert (shown.exposed > 0).all()
    assert timeline.history(0).last == steps - 1
    (parts, _) = timeline.parts(last_steps=10_000).by_rank.values()
    assert parts["exposed"] == pytest.approx(29 / 1e3)


def test_the_view() -> None:
    """Lanes by group and rank, exposed parts as thin lines, a sentence with the share and the group that has most."""
    scene = parameter_groups_scene(recorded(late=6.0))
    assert scene.title == "Parameter groups: step 19"
    assert "Exposed communication is " in scene.summary
    assert "for module blocks.1" in scene.summary
    assert "Rank 1 is late in the forward of blocks.0, by 6.0 ms." in scene.summary
    (panel,) = scene.panels
    assert list(panel.y.lanes) == [lane for name in NAMES for lane in (name, "rank 0", "rank 1")]
    assert list(panel.y.headings) == [0, 3, 6]
    assert [one.role for one in panel.marks if one.thin] == ["exposed"]
    words, drawn, table = ParameterGroups().page(scene)["blocks"]
    assert words == {"text": f"Step 19. {scene.summary}"}
    assert [one["role"] for one in drawn["scene"]["panels"][0]["marks"]] == [one.role for one in panel.marks]
    rows = table["table"]["rows"]
    assert len(rows) == 6
    assert rows[3][-3:] == ["in the forward of blocks.0, by 6.0 ms", "1000 B", "500 B"]
    assert rows[0][4:6] == ["–", "–"]  # the root is gathered once
    assert ParameterGroups().page(parameter_groups_scene(Timeline())) == {
        "blocks": [{"text": "No model with fully_shard or replicate has been recorded yet."}]
    }


def test_columns_of_what_there_is() -> None:
    """The table has all-reduces only where there is one, and places of late ranks only if one is late. With very many
    groups only the first rank has lanes, and the sentence says which and why."""
    (head, hybrid), (late, _) = (
        (parameter_groups_scene(one).table.head for one in made)
        for made in ((recorded(), recorded(mesh=(2, 1))), (recorded(late=6.0), recorded(late=6.0)))
    )
    assert head == [
        *("module:", "rank", "all-gather (forward) ms", "of it exposed", "all-gather (backward) ms", "of it exposed"),
        *("reduce-scatter ms", "of it exposed", "whole", "held"),
    ]
    assert hybrid == [*head[:8], "all-reduce ms", "of it exposed", *head[8:]]
    assert late == [*head[:8], "late:", *head[8:]]
    assert "all_reduce_ms" in recorded().parameter_groups()
    assert "The picture shows" not in parameter_groups_scene(recorded()).summary
    scene = parameter_groups_scene(recorded(idle=40))
    assert scene.summary.endswith("The picture shows rank 0 only: 43 groups on 2 ranks would have too many rows.")
    assert {one for one in scene.panels[0].y.lanes if one.startswith("rank")} == {"rank 0"}
