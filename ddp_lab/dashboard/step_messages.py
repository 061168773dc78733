"""Messages from the dashboard to the browser: one JSON header and one binary buffer for any number of steps.

The buffer is float32 and holds, step after step, the blocks of `BLOCKS`, which `bundle` hands to `store.js`. It holds
all numbers of a step: the browser only draws them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.step_metrics import EDGES, PHASES, bus_factor, mean
from .views.step_frames import StepFrame

__all__ = ["BLOCKS", "encode_steps"]

# Name and shape of each block, in order: R ranks, B buckets, D 1 if the device timed collectives, else 0. Times are in
# ms since the step's origin, NaN if the event has not happened.
BLOCKS = (
    ("bounds", "R3"),  # backward begin, finalize begin, backward end
    ("outside", "R3"),  # forward begin, forward end, end of the previous step
    ("extent", "R2"),  # first event of a bucket, last event of all
    ("busy", "R2"),  # ms of overlapped and of exposed communication
    ("phases", f"{len(PHASES)}"),  # ms of each, means over the ranks; NaN: the step is not complete on every rank
    ("edges", f"RB{len(EDGES)}"),  # where filling, queued, waiting, reducing and exposed begin and end
    ("hidden", "RB"),
    ("exposed", "RB"),
    ("lastRank", "B"),  # -1: unknown
    ("late", "B"),  # ms that the first rank waited for the last
    ("alone", "B"),  # ms that all others waited for the last rank
    ("allReduce", "B"),
    ("bandwidth", "B"),  # GB/s
    ("bus", "B"),
    ("bytes", "B"),
    ("meanHidden", "B"),  # over the ranks
    ("meanExposed", "B"),
    ("device", "DRB2"),
)


def encode_steps(frames: Iterable[StepFrame]) -> tuple[dict[str, Any], bytes]:
    """Returns the header and the buffer of a message of type ``steps``."""
    headers: list[dict[str, Any]] = []
    blocks: list[npt.NDArray[np.float32]] = []
    for frame in frames:
        header, arrays = _encoded(frame)
        headers.append(header)
        blocks += [arrays[name].astype(np.float32).ravel() for name, _ in BLOCKS if name in arrays]
    buffer = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    return {"type": "steps", "steps": headers}, buffer.tobytes()


def _encoded(frame: StepFrame) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Returns the header of one step, and its blocks by name."""
    sync, overlap, ended = frame.sync(), frame.overlap(), frame.complete and not frame.abandoned
    phases = frame.breakdown(overlap)
    arrays: dict[str, npt.NDArray[Any]] = {
        "bounds": frame.milliseconds(frame.bounds_ns),
        "outside": frame.milliseconds(frame.outside_ns),
        "extent": frame.extent_ms(),
        "busy": np.stack([overlap.rank_hidden_ms, overlap.rank_exposed_ms], axis=-1),
        "phases": np.stack([getattr(phases, name) if ended else [np.nan] for name in PHASES]),
        "edges": frame.milliseconds(frame.edges_ns()),
        "hidden": overlap.hidden_ms,
        "exposed": overlap.exposed_ms,
        "lastRank": frame.last_rank(sync),
        "late": sync.late_ms,
        "alone": sync.alone_ms,
        "allReduce": sync.all_reduce_ms,
        "bandwidth": sync.bandwidth_gb_s,
        "bus": sync.bandwidth_gb_s * bus_factor(len(frame.ranks)),
        "bytes": frame.bucket_bytes,
        "meanHidden": mean(overlap.hidden_ms.T),
        "meanExposed": mean(overlap.exposed_ms.T),
    }
    if frame.device_ns.any():
        arrays["device"] = frame.milliseconds(frame.device_ns)
    header = {
        "reducer": frame.reducer,
        "step": frame.step,
        "generation": frame.generation,
        "ranks": frame.ranks,
        "buckets": frame.shape[1],
        "began": frame.origin_ns / 1e9,
        "complete": frame.complete,
        "abandoned": frame.abandoned,
        "device": "device" in arrays,
        "whole": bool(np.isfinite(phases.measured[0])),
        "hiddenShare": None if np.isnan(overlap.hidden_share) else overlap.hidden_share,
    }
    return header, arrays
