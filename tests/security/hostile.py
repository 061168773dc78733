"""Bytes and files that somebody made to break who reads them: strategies for Hypothesis, from valid ones."""

from __future__ import annotations

import copy
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ddp_lab.dashboard.views.gradients import gradient_facts
from ddp_lab.protocol.events import DTYPE
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training

VALUES = st.sampled_from(
    [None, True, -1, 0, 2**31, 2**53, 2**63, -(2**63), 1e308, float("nan"), "", "<b>", [], {}, [[1]], {"rank": []}]
)


# What ranks that are watched describe: norms of gradients, a comparison of replicas, averaged gradients.
WATCHED: list[dict[str, Any]] = [
    {
        **{"type": "gradients", "reducer": 0, "step": 1, "generation": 0, "ranks": [0, 1], "after": [1.0, None, 2.0]},
        **{"before": [[1.0, 2.0, None], [1.5, 2.5, 3.5]], "seconds": 0.001},
        "nonfinite": {"kind": "NaN", "rank": 1, "parameter": "layers.0.weight"},
    },
    {
        **{"type": "drift", "reducer": 0, "step": 1, "ok": False, "first": "layers.0.weight", "groups": [[0], [1]]},
        **{"differing": 1, "tensors": 12, "bytes": 1024, "seconds": 0.001},
    },
    {"type": "inspection", "reducer": 0, "step": 1, "buckets": [{"bucket": 0, "norm": 1.0, "checksum": "00ff"}]},
]


def recorded(steps: int = 4) -> Timeline:
    """Some steps of two ranks."""
    timeline = Training(2, 3, forward_ms=1.0).trained(steps)
    return timeline


def answers(timeline: Timeline, folder: Path) -> None:
    """Asks a timeline all that can be asked of it, and writes its report to a folder."""
    for name in ("spans", "steps", "all_reduces", "gradients", "drift", "summary", "findings", "stragglers", "marks"):
        getattr(timeline, name)()
    for model in timeline.reducers():
        timeline.inspections(model.reducer)
        gradient_facts(timeline, model.reducer)
    timeline.report(folder / "report.html")


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything within a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*before, key)
        yield from places(one, (*before, key))


@st.composite
def changed_json(draw: st.DrawFn, valid: Any) -> Any:
    """A JSON value in which one or two things are missing or others."""
    made = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 2))):
        way = draw(st.sampled_from(list(places(made)) or [()]))
        if not way:
            return draw(VALUES)
        inside = made
        for key in way[:-1]:
            inside = inside[key]
        if draw(st.booleans()):
            inside[way[-1]] = copy.deepcopy(draw(VALUES))  # else a list could come to hold itself
        else:
            del inside[way[-1]]
    return made


@st.composite
def changed_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes some of which are others, or missing at the end."""
    made = bytearray(valid)
    for _ in range(draw(st.integers(0, 6))):
        made[draw(st.integers(0, len(made) - 1))] = draw(st.integers(0, 255))
    return bytes(made[: draw(st.one_of(st.just(len(made)), st.integers(0, len(made))))])


@st.composite
def damaged_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes of which stretches are others, nought, missing, there twice, moved, or followed by nothing."""
    made = valid
    for _ in range(draw(st.integers(1, 3))):
        at, size = draw(st.integers(0, len(made))), draw(st.sampled_from([1, 4, 20, 200, 4096]))
        before, part, after = made[:at], made[at : at + size], made[at + size :]
        there, mask = draw(st.integers(0, len(before + after))), draw(st.integers(1, 255))
        ways = {
            "others": before + bytes(one ^ mask for one in part) + after,
            "nought": before + bytes(len(part)) + after,
            "missing": before + after,
            "twice": before + part + part + after,
            "cut": before,
            "moved": (before + after)[:there] + part + (before + after)[there:],
        }
        made = ways[draw(st.sampled_from(sorted(ways)))]
    return made


@st.composite
def changed_events(draw: st.DrawFn, valid: np.ndarray) -> np.ndarray:
    """Events some of whose fields are others."""
    made = valid.copy()
    for _ in range(draw(st.integers(1, 4))):
        field = draw(st.sampled_from(DTYPE.names))
        info = np.iinfo(DTYPE[field])
        one_of = st.sampled_from([info.min, info.max, 0, 1, info.max // 2])
        made[field][draw(st.integers(0, len(made) - 1))] = draw(one_of | st.integers(int(info.min), int(info.max)))
    return made


@st.composite
def changed_arrays(draw: st.DrawFn, valid: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a saved timeline, one of which is another."""
    made = dict(valid)
    what = draw(st.sampled_from(["about", "events", "shape", "missing", "type"]))
    name = draw(st.sampled_from(sorted(made)))
    if what == "about":
        made["about"] = np.array(json.dumps(draw(changed_json(json.loads(str(valid["about"]))))))
    elif what == "events":
        made["events"] = draw(changed_events(valid["events"]))
    elif what == "missing":
        del made[name]
    elif what == "shape":
        made[name] = made[name].ravel()[: draw(st.integers(0, 2))]
    else:
        made[name] = np.zeros(draw(st.integers(0, 3)), draw(st.sampled_from(["f8", "i4", "U3", "u1"])))
    return made


def npz(arrays: dict[str, Any], **options: Any) -> bytes:
    """An ``.npz`` file; values that are bytes are written as they are."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", **options) as packed:
        for name, array in arrays.items():
            body = io.BytesIO()
            if isinstance(array, bytes):
                body.write(array)
            else:
                np.save(body, array)
            packed.writestr(f"{name}.npy", body.getvalue())
    return made.getvalue()
