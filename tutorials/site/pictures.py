"""The pictures and worked examples of the guides, made while the site is built: nothing of them is stored.

A page names one with `<!-- picture: NAME -->` (SVG on a white sheet, which reads on light and dark pages) or with
`<!-- printed: NAME -->` (text). They come from the recordings of lesson 10, and where those hold nothing of the kind
from numbers that are computed here, which the page says. No cluster, browser or network is needed.
"""

import functools
import re
from pathlib import Path

import numpy as np

import ddp_lab
from ddp_lab.analysis.collectives import CollectiveStep, schedule
from ddp_lab.control.collectives import ShownCollective
from ddp_lab.control.records import BucketStage, StepState
from ddp_lab.dashboard.controls import stepping
from ddp_lab.dashboard.controls.what_if import WhatIfStage
from ddp_lab.dashboard.paint import scene_svg
from ddp_lab.dashboard.scene import Spans
from ddp_lab.dashboard.views import VIEWS
from ddp_lab.dashboard.views.collectives import collective_svg
from ddp_lab.dashboard.views.fault_injection import faults_svg
from ddp_lab.dashboard.views.timeline import find_step, timeline_scene
from ddp_lab.dashboard.views.what_if import what_if_scene
from ddp_lab.protocol.events import DTYPE, Batch, Kind

_RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
_ORIGIN_NS = 10**12


@functools.cache
def _run(number):
    """A recording of lesson 10: 0 is in order, 1 has a slow layer on rank 2, 2 one bucket, 3 a late rank 1."""
    return ddp_lab.Timeline.load(_RECORDINGS / f"run-{number}.npz")


def _view(name, run):
    return VIEWS[name].picture(_run(run))


# -- how to read the timeline

# Two ranks and four buckets. When each bucket's gradients come, in ms since the backward began, and where its
# all-reduce ends: bucket 1 is ready before bucket 0, and rank 1 is late in bucket 2.
_GRADIENTS = (((2, 12), (4, 8), (14, 20), (22, 30)), ((3, 13), (5, 9), (14, 30), (32, 38)))
_REDUCED = (17, 21, 36, 46)
_READ = ("phase-backward", "filling", "queued", "waiting", "reducing", "exposed", "phase-finalize")


def _described():
    """The assignment of a made-up model with two parameters in each bucket."""
    place = {"dtype": "float32", "device": "cpu"}
    sizes = {"shape": [512, 512], "numel": 1 << 18, "bytes": 1 << 20}
    buckets = range(len(_GRADIENTS[0]))
    return {
        "type": "assignment",
        "reducer": 0,
        "generation": 0,
        "first_step": 0,
        "process_group": 0,
        "group_ranks": list(range(len(_GRADIENTS))),
        "backend": "shm",
        "module": "Net",
        "parameters": [{"index": one, "name": f"layer{one}.weight"} | sizes | place for one in range(2 * len(buckets))],
        "buckets": [{"bucket": one, "bytes": 2 << 20, "parameters": [2 * one, 2 * one + 1]} | place for one in buckets],
        "rebuilt": True,
        "session": 1,
    }


def _made_up():
    """One step as two ranks would have recorded it."""
    timeline = ddp_lab.Timeline()
    for rank, gradients in enumerate(_GRADIENTS):
        facts, launched = [(0, Kind.BACKWARD_BEGIN, -1, -1)], 0
        for bucket, (first, ready) in enumerate(gradients):
            launched = max(launched, ready)
            facts += [(first, Kind.GRAD_READY, bucket, 2 * bucket), (ready, Kind.GRAD_READY, bucket, 2 * bucket + 1)]
            facts += [(ready, Kind.BUCKET_READY, bucket, -1), (launched, Kind.BUCKET_LAUNCHED, bucket, -1)]
            facts.append((_REDUCED[bucket], Kind.BUCKET_REDUCED, bucket, -1))
        computed = max(ready for _, ready in gradients) + 1
        facts += [(computed, Kind.FINALIZE_BEGIN, -1, -1), (_REDUCED[-1] + 1, Kind.BACKWARD_END, -1, -1)]
        events = np.zeros(len(facts), DTYPE)
        for sequence, (ms, kind, bucket, parameter) in enumerate(sorted(facts)):
            at = _ORIGIN_NS + round(ms * 1e6)
            events[sequence]["sequence"], events[sequence]["host_ns"] = sequence, at
            events[sequence]["kind"], events[sequence]["bytes"] = kind, (2 << 20) if bucket >= 0 else 0
            events[sequence]["bucket"], events[sequence]["parameter"] = bucket, parameter
        timeline.describe(rank, _described())
        timeline.extend(Batch(rank, 1, 0, 0, events))
    return timeline


def annotated():
    """The made-up step with a number on one bar of each kind."""
    frame, assignment = find_step(_made_up(), None, None)
    scene = timeline_scene(frame, assignment["module"])
    places = []
    for role in _READ:
        of = bars(scene, role)
        longest = int(np.argmax(of.end - of.begin))
        places.append((int(of.lane[longest]), float(of.begin[longest] + of.end[longest]) / 2))
    return marked(scene, places)


def late_rank():
    """Ranks 0 and 2 of the run with a slow layer: 1 rank 2 launches late, 2 rank 0 waits for it, 3 that is exposed."""
    frame, assignment = find_step(_run(1), None, None)
    scene = timeline_scene(frame, assignment["module"], rows=(0, 2))
    first, second = (lane + 1 for lane in scene.panels[0].y.headings)  # of bucket 0 on each
    places = []
    for role, lane in (("reducing", second + 3), ("waiting", first + 3), ("exposed", first + 6)):
        of = bars(scene, role)
        [bar] = np.flatnonzero(of.lane == lane)
        places.append((lane, float(of.begin[bar] + of.end[bar]) / 2))
    return marked(scene, places)


def bars(scene, role):
    """The bars of a kind in a timeline."""
    [found] = [mark for mark in scene.panels[0].marks if isinstance(mark, Spans) and mark.role == role]
    return found


def marked(scene, places):
    """A timeline's picture with numbers 1, 2, ... at places: the lane and the time in ms.

    Raises:
        ValueError: there are so many lanes that they are not as high as they could be.
    """
    [panel] = scene.panels
    # In pixels, of so few lanes: a rank's own is as high as a heading, a bucket's 16; a gap is above each rank.
    gap, own, line = scene_svg._GAP, scene_svg._HEADING, 16
    if len(panel.y.lanes) > 36:
        raise ValueError("the lanes of so many buckets are thinner")
    heights = [own if lane in panel.y.headings else line for lane in range(len(panel.y.lanes))]
    bottoms = np.cumsum([height + gap if height == own else height for height in heights]) - gap
    left, right = scene_svg._LANES_LEFT, scene_svg.WIDTH - scene_svg._RIGHT
    marks = []
    for number, (lane, middle) in enumerate(places, 1):
        share = (middle - panel.x.low) / (panel.x.top - panel.x.low)
        x, y = left + share * (right - left), bottoms[lane] - heights[lane] / 2
        marks.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='8' style='fill:#1f2328;stroke:#fff'/>")
        marks.append(scene_svg.text(x, y + 4, str(number), "bold", "middle", "#fff"))
    whole, end = scene_svg.framed(scene), "</svg></svg>"
    if not whole.endswith(end):
        raise ValueError("a framed picture ends in another way than it did")
    return whole.removesuffix(end) + "".join(marks) + end


# -- what the recordings do not hold


def what_if():
    """One bucket that is too big, beside the prediction for a smaller limit."""
    caps = WhatIfStage(_run(2)).snapshot()["limits"]["caps"]
    stage = WhatIfStage(_run(2))
    stage.ask({"cap": int(np.argmin([abs(cap - 0.4) for cap in caps]))})
    return scene_svg.framed(what_if_scene(stage.snapshot()))


def gradients():
    """Norms of four ranks that descend a quadratic with noisy gradients; in step 70 rank 2 has a NaN."""
    timeline = ddp_lab.Timeline.load(_RECORDINGS / "run-0.npz")
    random, ranks, buckets = np.random.default_rng(0), 4, 4
    weights = random.normal(size=(buckets, 200))
    for step in range(0, 121, 5):
        own = weights + 0.3 * random.normal(size=(ranks, buckets, 200))
        average = own.mean(axis=0)
        weights = weights - 0.1 * average
        before, after = np.linalg.norm(own, axis=2).tolist(), np.linalg.norm(average, axis=1).tolist()
        bad = None
        if step == 70:
            before[2][1] = after[1] = None
            bad = {"kind": "NaN", "rank": 2, "parameter": "layer3.weight"}
        about = {"type": "gradients", "reducer": 0, "step": step, "generation": 0, "session": 0}
        timeline.describe(
            0, about | {"ranks": [*range(ranks)], "before": before, "after": after, "nonfinite": bad, "seconds": 0.002}
        )
    return VIEWS["gradients"].picture(timeline)


def groups():
    """Operations of four ranks on a mesh of two dimensions; ranks 2 and 3 are late on dimension dp."""
    timeline, ms = ddp_lab.Timeline(), 1e6
    meshes = {"dp": ((0, 2), (1, 3)), "tp": ((0, 1), (2, 3))}
    operations = {"dp": ("reduce_scatter_tensor_coalesced_", 8 << 20), "tp": ("allreduce_", 1 << 20)}
    rows = {rank: [] for rank in range(4)}
    for index, (name, pairs) in enumerate(meshes.items()):
        for rank in range(4):
            ranks = next(pair for pair in pairs if rank in pair)
            group = {"type": "group", "index": index, "name": f"{name}{ranks[0]}", "ranks": list(ranks), "session": 1}
            timeline.describe(rank, group | {"mesh_dimension": name, "backend": "gloo"})
            call = {"type": "call", "index": index, "operation": operations[name][0], "dtype": "Float", "session": 1}
            timeline.describe(rank, call | {"reduction": "sum", "file": "train.py", "line": 40 + index})
            for number in range(3):
                late = (4 if name == "dp" else 0.5) * (rank == ranks[1])
                begin = 14 * number + (0 if name == "tp" else 7) + late
                end = 14 * number + (2.5 if name == "tp" else 13.5)
                rows[rank] += [
                    (begin, Kind.COLLECTIVE_ENTERED, index, number),
                    (end, Kind.COLLECTIVE_ENDED, index, number),
                ]
    for rank, facts in rows.items():
        events = np.zeros(len(facts), DTYPE)
        events["reducer"] = events["bucket"] = -1
        for sequence, (at, kind, group, number) in enumerate(sorted(facts)):
            events[sequence]["sequence"], events[sequence]["host_ns"] = sequence, _ORIGIN_NS + round(at * ms)
            events[sequence]["kind"], events[sequence]["step"] = kind, number
            events[sequence]["process_group"] = events[sequence]["parameter"] = group
            events[sequence]["bytes"] = [*operations.values()][group][1]
        timeline.extend(Batch(rank, 1, 0, 0, events))
    return VIEWS["groups"].picture(timeline)


def parameter_groups():
    """A step of two ranks with three parameter groups; rank 1 is late in the forward of layers.0."""
    timeline, ms = ddp_lab.Timeline(), 1e6
    names, sizes = ("Net", "layers.0", "layers.1"), (0.3e6, 2e6, 2e6)
    layout = [
        {"bucket": number, "name": name, "bytes": int(size), "parameters": [number], "device": "cpu"}
        | {"sharded_bytes": int(size / 2), "unsharded_bytes": int(size)}
        for number, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]
    parameters = [
        {"index": number, "name": f"{name}.weight", "bytes": 4, "dtype": "float32"} for number, name in enumerate(names)
    ]
    model = {"type": "assignment", "kind": "fully_shard", "reducer": 0, "generation": 0, "group_ranks": [0, 1]}
    model |= {"module": "Net", "rebuilt": False, "parameters": parameters, "buckets": layout, "session": 1}
    # Operation, what for, parameter group; what the ranks compute before it; how long it takes once both are there.
    calls = [("_allgather_base_", "forward", group) for group in range(3)]
    calls += [("_allgather_base_", "backward", 2), ("_allgather_base_", "backward ahead", 1)]
    calls += [("_reduce_scatter_base_", "reduction", group) for group in (2, 1, 0)]
    computed, took = (1, 1, 8, 9, 0.2, 12, 11, 2), (1, 3, 3, 3, 3, 4, 4, 1)
    facts = {rank: [] for rank in range(2)}
    at, number = dict.fromkeys(range(2), 0.0), 0
    for step in range(10):
        for rank in range(2):
            facts[rank].append((at[rank] + 0.2, Kind.FORWARD_BEGIN, {"step": step}))
        for index, (before, lasts) in enumerate(zip(computed, took, strict=True)):
            entered = {rank: at[rank] + before + 5 * (rank == 1 and index == 2) for rank in range(2)}
            end = max(entered.values()) + lasts
            for rank in range(2):
                if index == 3:
                    facts[rank].append((entered[rank] - 1, Kind.FORWARD_END, {"step": step}))
                    facts[rank].append((entered[rank] - 0.5, Kind.BACKWARD_BEGIN, {"step": step}))
                one = {"reducer": -1, "process_group": 0, "parameter": index, "step": number}
                one["bytes"] = sizes[calls[index][2]]
                facts[rank].append((entered[rank], Kind.COLLECTIVE_ENTERED, one))
                facts[rank].append((entered[rank] + 0.05, Kind.WAIT_BEGIN, one))
                facts[rank] += [(end, Kind.COLLECTIVE_ENDED, one), (end + 0.01, Kind.WAIT_END, one)]
                if index > 4:
                    of_group = {"step": step, "bucket": calls[index][2]}
                    facts[rank].append((entered[rank], Kind.BUCKET_LAUNCHED, of_group))
                    facts[rank].append((end, Kind.BUCKET_REDUCED, of_group))
                at[rank] = end + 0.02
            number += 1
        for rank in range(2):
            facts[rank] += [(at[rank], Kind.FINALIZE_BEGIN, {"step": step})]
            facts[rank] += [(at[rank] + 0.1, Kind.BACKWARD_END, {"step": step})]
            at[rank] += 4
    group = {"type": "group", "index": 0, "name": "0", "ranks": [0, 1], "backend": "gloo", "session": 1}
    for rank, rows in facts.items():
        timeline.describe(rank, model)
        timeline.describe(rank, group)
        for index, (operation, use, bucket) in enumerate(calls):
            call = {"type": "call", "index": index, "operation": operation, "use": use, "session": 1}
            timeline.describe(rank, call | {"reducer": 0, "bucket": bucket, "module": names[bucket]})
        events = np.zeros(len(rows), DTYPE)
        events["bucket"] = events["parameter"] = -1
        for sequence, (when, kind, fields) in enumerate(sorted(rows, key=lambda row: row[0])):
            events[sequence]["sequence"], events[sequence]["host_ns"] = sequence, _ORIGIN_NS + round(when * ms)
            events[sequence]["kind"] = kind
            for name, value in fields.items():
                events[sequence][name] = value
        timeline.extend(Batch(rank, 1, 0, 0, events))
    return timeline


def step_through():
    """Rank 1 pauses when bucket 2 is ready, and rank 0 waits for it."""
    states = {
        0: ("reduced", "reduced", "launched", "launched"),
        1: ("reduced", "reduced", "ready", "pending"),
    }
    made = {}
    for rank, of_rank in states.items():
        pauses = "ready" in of_rank
        stages = tuple(
            BucketStage(state, 0 if state == "pending" else 2, 2, ("layer6.weight",) if state == "pending" else ())
            for state in of_rank
        )
        point, bucket = ("bucket_ready", 2) if pauses else (None, None)
        made[rank] = StepState(rank, 12, 1, point, None, bucket, 0, True, not pauses, pauses, "", stages)
    return VIEWS["step"].svg(stepping.machine(made, stepping.standings(made), lambda state: 0.0))


def faults():
    """A fault that has ended, and one that happens."""
    slow, link = ddp_lab.faults.SlowLayer(1, "layer3.weight", 0.05), ddp_lab.faults.SlowLink(0, 0.005)
    timeline = ddp_lab.Timeline()
    for rank, marks in {1: ((0, slow.text()), (14.2, f"end of {slow.text()}")), 0: ((21.5, link.text()),)}.items():
        events = np.zeros(len(marks), DTYPE)
        for index, (seconds, name) in enumerate(marks):
            timeline.describe(rank, {"type": "mark", "index": index, "name": name, "session": 1})
            events[index]["sequence"], events[index]["kind"], events[index]["parameter"] = index, Kind.MARK, index
            events[index]["host_ns"] = _ORIGIN_NS + round(seconds * 1e9)
        timeline.extend(Batch(rank, 1, 0, 0, events))
    return faults_svg(timeline, [{"rank": 0, "text": link.text()}])


def collective(ranks=4, part=16_384, latency_ms=0.05, mb_per_second=1000):
    """A ring all-reduce: who holds what follows from the algorithm, the times from a link of these figures."""
    holds = [[{rank} for _ in range(ranks)] for rank in range(ranks)]

    def frozen():
        return tuple(tuple(tuple(sorted(one)) for one in parts) for parts in holds)

    begin, steps = frozen(), []
    for step in schedule("all_reduce", "ring", ranks):
        arriving = [(one, [set(holds[one.source][part]) for part in one.parts]) for one in step]
        for one, parts in arriving:
            for place, held in zip(one.places, parts, strict=True):
                holds[one.target][place] = holds[one.target][place] | held if one.reduces else held
        sizes = tuple(part * len(one.parts) for one in step)
        steps.append(CollectiveStep(tuple(step), sizes, frozen(), latency_ms + max(sizes) / mb_per_second / 1e3))
    return collective_svg(ShownCollective("all_reduce", "ring", ranks, ranks * part, begin, tuple(steps)))


PICTURES = {
    "annotated": annotated,
    "overview": functools.partial(_view, "overview", 1),
    "timeline": functools.partial(_view, "timeline", 1),
    "sync": functools.partial(_view, "sync", 1),
    "overlap": functools.partial(_view, "overlap", 2),
    "stragglers": functools.partial(_view, "stragglers", 1),
    "buckets": functools.partial(_view, "buckets", 5),
    "findings": functools.partial(_view, "findings", 5),
    "step": step_through,
    "faults": faults,
    "what_if": what_if,
    "gradients": gradients,
    "groups": groups,
    "parameter_groups": lambda: VIEWS["parameter_groups"].picture(parameter_groups()),
    "collective": collective,
}


# -- what the worked example prints


def _what_if():
    told = {"as recorded": {}, "without rank 2's delay": {"without_rank": 2}}
    told |= {f"bucket_cap_mb={cap}": {"bucket_cap_mb": cap} for cap in (0.1, 0.5, 2)}
    return "\n".join(f"{name:22} {_run(1).simulate(**what).step_ms:6.1f} ms" for name, what in told.items())


PRINTED = {
    "summary": lambda: _run(1).summary(),
    "stragglers": lambda: "\n".join(map(str, _run(1).stragglers())),
    "findings": lambda: "\n".join(map(str, _run(1).findings())),
    "what_if": _what_if,
    "compare": lambda: str(ddp_lab.compare(_RECORDINGS / "run-1.npz", _RECORDINGS / "run-0.npz")),
}


# -- on a page

_PLACE = re.compile(r"^<!-- (picture|printed): (\w+) -->$", re.MULTILINE)


def filled(page):
    """A page's text with its pictures and printed texts in the places that name them.

    Raises:
        KeyError: there is none of a name.
    """
    return _PLACE.sub(lambda found: _picture(found[2]) if found[1] == "picture" else _printed(found[2]), page)


def _picture(name):
    return f'```{{raw}} html\n<div class="picture">{PICTURES[name]()}</div>\n```'


def _printed(name):
    return f"```text\n{PRINTED[name]()}\n```"
