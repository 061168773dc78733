"""Numbers of one name are one number: in every view, the summary and the report of ten recorded runs."""

from __future__ import annotations

import contextlib
import html
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddp_lab
from ddp_lab.analysis.findings import Facts
from ddp_lab.analysis.step_metrics import PHASES
from ddp_lab.assistants.timeline_tools import Read, TimelineTools
from ddp_lab.dashboard.live import Overhead, ViewFacts
from ddp_lab.dashboard.report import page
from ddp_lab.dashboard.views import VIEWS
from ddp_lab.dashboard.views.overlap import parts_table
from ddp_lab.dashboard.views.overview import overview
from ddp_lab.dashboard.views.stragglers import waiting
from ddp_lab.dashboard.views.view import Selection
from ddp_lab.formatting import ms, rate, step_range
from ddp_lab.timeline.timeline import Timeline
from ddp_lab.timeline.what_if import recorded_step, workload
from tests.ranks.conftest import Ranks
from tests.ranks.observing import timeline_of

STEPS, WIDTH = 24, 32
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one bucket": {"bucket_cap_mb": 25},
    "a static graph": {"static_graph": True},
    "unused parameters are searched": {"find_unused_parameters": True},
    "a late layer": {},
    "late at times": {},
    "gradients accumulate": {},
}


def _train(rank: int, size: int, kind: str) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    net, watch = nn.Sequential(*layers), contextlib.nullcontext
    if kind in ("fully_shard", "replicate"):
        for layer in layers:
            fully_shard(layer) if kind == "fully_shard" else replicate(layer)
        model, watch = (fully_shard(net) if kind == "fully_shard" else replicate(net)), ddp_lab.observe
    elif kind == "torch's class":
        model, watch = TorchDDP(net, bucket_cap_mb=0.01), ddp_lab.observe
    else:
        model = ddp_lab.DistributedDataParallel(net, **{"bucket_cap_mb": 0.01, **OURS[kind]})
    optimizer, times = torch.optim.SGD(model.parameters(), lr=0.01), []

    def wait(*_: Any) -> None:  # for a share of what a step takes here
        if rank == 1 and (kind == "a late layer" or len(times) % 3 == 0) and len(times) > 3:
            time.sleep(0.5 * float(np.median(times)))

    if kind in ("a late layer", "late at times"):
        layers[2].register_full_backward_pre_hook(wait)
    with watch(model) if watch is ddp_lab.observe else watch():
        for _ in range(STEPS):
            began = time.perf_counter()
            if kind == "gradients accumulate":
                with model.no_sync():
                    model(torch.randn(8, WIDTH)).square().mean().backward()
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)


def _record(rank: int, size: int, kind: str) -> tuple[np.ndarray, list[dict[str, Any]]]:
    start, known = ddp_lab.recording.statistics().recorded, ddp_lab.recording.descriptions(0)[1]
    _train(rank, size, kind)
    return ddp_lab.recording.drain(start)[0], ddp_lab.recording.descriptions(known)[0]


def _text(timeline: Timeline) -> str:
    """The report's text, with a line between what stands apart."""
    return re.sub(r"[|\s]*\|[|\s]*", "|", html.unescape(re.sub(r"<[^>]+>", "|", page(timeline))))


def _rows(timeline: Timeline, heading: str) -> list[list[str]]:
    """The cells of one of the report's tables."""
    of_table = page(timeline).partition(f">{heading}")[2].partition("<tbody>")[2].partition("</tbody>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in of_table.splitlines() if "<td" in line]


def _sentences(timeline: Timeline, facts: Facts) -> Iterator[tuple[str, str]]:
    """Where, and what stands there, in words."""
    yield "summary", timeline.summary()
    yield "overview", str(overview(timeline, facts, 0)["text"])
    yield "report", _text(timeline)
    yield "parameter groups", _scene("parameter_groups", timeline).summary
    yield "assistant", TimelineTools(lambda: Read(timeline, ())).timeline_summary().text
    yield "findings", " ".join(map(str, timeline.findings()))
    slow = ViewFacts(timeline)
    slow.look("page", ["overview", "findings", "overlap", "stragglers", "buckets"], None)
    for name, made in slow.update(force=True).items():
        yield f"tab {name}", str(made.get("text", ""))
        yield from ((f"tab {name}", one["text"]) for one in made.get("blocks", ()) if "text" in one)


def _scene(view: str, timeline: Timeline) -> Any:
    return VIEWS[view].scene(VIEWS[view].facts(timeline, Selection()))


SENTENCES = {  # in any of the texts: name of the number -> how it is told
    "step": [
        r"([\d.]+ [mµ]?s) per step \(median\)",
        r"A step takes ([\d.]+ [mµ]?s) \(median",
        r"of ([\d.]+ [mµ]?s) \(median of",
        r"\|step \(median\)\|([\d.]+ [mµ]?s)\|",
    ],
    "steps": [
        r"ranks?, (steps \d+–\d+):",
        r"\(median of (steps \d+–\d+)\)",
        r"numbers from (steps \d+–\d+)",
        r"in \d+ steps \((steps \d+–\d+)\)",
        r"% of the step; (steps \d+–\d+)\)",
        r"Analysed: \d+ steps \((steps \d+–\d+)\)",
    ],
    "forward": [r"of which ([\d.]+ [mµ]?s) forward", r"\|forward\|([\d.]+ [mµ]?s)\|"],
    "backward computation": [r"([\d.]+ [mµ]?s) backward computation", r"\|backward computation\|([\d.]+ [mµ]?s)\|"],
    "exposed communication": [
        r"([\d.]+ [mµ]?s) exposed communication",
        r"\|exposed communication\|([\d.]+ [mµ]?s)\|",
        r"ranks wait ([\d.]+ [mµ]?s) for their collectives",
        r"% of a step, ([\d.]+ [mµ]?s) of",
    ],
    "exposed share": [r"(\d+) % of it is exposed", r"Exposed communication is (\d+) % of a step"],
    "overlapped share": [r"(\d+) % of the communication overlapped with", r"\|overlapped communication\|(\d+) %"],
    "gradients": [r"\(([\d.]+ \w+)\) per step,", r"\|gradients per step\|([\d.]+ \w+)"],
    "last rank": [r"(Rank \d+ was last most often: in \d+ % of \d+ steps; [^(]*\(median\))"],
    "late by": [r"(by [\d.]+ [mµ]?s in \d+ % of the steps)"],
    "largest gain": [r"Main finding, about (\d+) %"],
}


@pytest.mark.parametrize("kind", [*OURS, "torch's class", "fully_shard", "replicate"])
def test_numbers_of_one_name_are_equal(ranks: Ranks, kind: str) -> None:
    """Each number has one value wherever it is told: in summary, report, views, overhead line, what if, assistants."""
    size = 3 if kind == "one bucket" else 2
    timeline = timeline_of(ranks(size, _record, kind))
    facts = timeline.analysis_input()
    assert facts is not None
    typical = facts.typical
    assert typical is not None
    said: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for where, text in _sentences(timeline, facts):
        for name, patterns in SENTENCES.items():
            for pattern in patterns:
                for number, found in enumerate(re.findall(pattern, text)):
                    said[name][f"{where} {pattern} {number}"] = found
    shown = overview(timeline, facts, 0)
    assert sum(shown["parts"]) == pytest.approx(shown["total"], abs=1e-3)
    of_parts = dict(zip(PHASES, shown["parts"], strict=True))
    said["step"] |= {
        "total of the overview": ms(shown["total"]),
        "sum of its bar": ms(sum(map(float, _scene("overview", timeline).table.rows[0][2:]))),
        "findings": ms(facts.step_ns / 1e6),
        "overhead": ms(Overhead(timeline, None).read()["step"]),
        "assistant": ms(TimelineTools(lambda: Read(timeline, ())).timeline_summary().facts.step_ms),
    }
    said["steps"]["overview"] = step_range(range(shown["first"], shown["last"] + 1))
    said["forward"]["overview"] = ms(of_parts["forward"])
    said["backward computation"]["overview"] = ms(of_parts["alone"] + of_parts["hidden"])
    said["exposed communication"]["overview"] = ms(of_parts["exposed"])
    said["exposed share"]["overview"] = f"{100 * of_parts['exposed'] / shown['total']:.0f}"
    if kind not in ("fully_shard", "replicate"):
        recorded = recorded_step(timeline, workload(timeline))
        said["step"]["what if"] = ms(recorded.step_ns / 1e6)
        said["steps"]["what if"] = step_range(recorded.steps.tolist())
        _compare_buckets(timeline, said)
    _compare_ranks(timeline, shown)
    _compare_parts(timeline, said)
    assert {name: found for name, found in said.items() if len(set(found.values())) > 1} == {}
    assert len(said["step"]) > 8
    assert min(len(said[name]) for name in ("steps", "forward", "exposed communication", "exposed share")) > 1


def _compare_ranks(timeline: Timeline, shown: dict[str, Any]) -> None:
    """The overview's bar of each rank, and the report's table of ranks."""
    for row, (rank, parts) in zip(_rows(timeline, "Ranks (medians)"), shown["ranks"], strict=True):
        of = dict(zip(PHASES, parts, strict=True))
        bar = [sum(parts), of["forward"], of["alone"] + of["hidden"], of["hidden"], of["exposed"]]
        assert row[0] == str(rank)
        np.testing.assert_allclose([float(value) for value in row[2:7]], bar, atol=0.006)  # two digits


def _compare_buckets(timeline: Timeline, said: dict[str, dict[str, str]]) -> None:
    """The tab Gradient sync, its table in the report, the report's table of buckets, and the summary."""
    table = {row[0]: row for row in _rows(timeline, "Buckets (medians)")}
    scene = _scene("sync", timeline)
    for row, (number, late, took, speed) in zip(
        _rows(timeline, "Gradient synchronisation"), scene.table.rows, strict=True
    ):
        of_bucket = table[str(number)]
        said[f"bucket {number} waits"] = {"sync": f"{late:.2f}", "figure": row[1], "table": of_bucket[4]}
        said[f"bucket {number} takes"] = {"sync": f"{took:.2f}", "figure": row[2], "table": of_bucket[5]}
        said[f"bandwidth of bucket {number}"] = {"sync": rate(speed), "table": of_bucket[6]}
    waits = waiting(timeline)
    for row, cells in zip(_rows(timeline, "Waiting for stragglers"), waits.cells, strict=True):
        said[f"waits for rank {row[0]}"] = {"figure": str(row[1:-1]), "tab": str([f"{one:.2f}" for one in cells])}
    found = re.search(r"Bucket (\d+) .*exposed communication, ([\d.]+ \w+);", timeline.summary())
    if found:
        exposed = float(table[found[1]][-2])
        assert float(found[2].split()[0]) == pytest.approx(
            exposed * (1e3 if "µs" in found[2] else 1), rel=0.1, abs=0.05
        )


def _compare_parts(timeline: Timeline, said: dict[str, dict[str, str]]) -> None:
    """The table of parts under the tab Overlap, that of the report, and the summary's sentence."""
    parts = timeline.parts()
    _, rows = parts_table(parts)
    shown = {row[0]: row for row in _rows(timeline, "Parts of a step")}
    summary = next((line for line in timeline.summary().splitlines() if line.startswith("Besides")), "")
    for part, own, share, *_ in rows:
        told = {"tab": f"{own:.2f} {share:.2f}", "report": " ".join(shown[html.escape(part)][1:3])}
        said[f"part {part}"] = told
        if found := re.search(rf"{re.escape(part)} ([\d.]+ [mµ]?s) \((\d+) %\)", summary):
            assert found[1] == ms(own)
            assert found[2] == f"{share:.0f}"
    assert not rows or sum(row[2] for row in rows if not row[0].startswith(" ")) == pytest.approx(100.0)
