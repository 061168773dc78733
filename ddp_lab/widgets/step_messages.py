"""What the dashboard sends to the browser: one JSON header and one binary buffer for any number of steps.

The buffer is float32 and holds, step after step, the blocks named in `BLOCKS`; `decode.js` reads the same list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..views.gradient_sync import gradient_sync
from ..views.step_store import StepFrame

__all__ = ["BLOCKS", "encode_steps"]

# name and shape of each block, in order; R ranks, B buckets. Times are ms from the step's origin, NaN: not arrived.
BLOCKS = (
    ("bounds", "R3"),
    ("outside", "R3"),
    ("busy", "R2"),
    ("times", "RB4"),
    ("wait", "RB"),
    ("hidden", "RB"),
    ("exposed", "RB"),
    ("lastLaunched", "B"),
    ("lastRank", "B"),
    ("allReduce", "B"),
    ("bandwidth", "B"),
    ("bytes", "B"),
)
_DEVICE = ("device", "RB2")


def encode_steps(frames: Iterable[StepFrame]) -> tuple[dict[str, Any], bytes]:
    """Returns the header and the buffer of a message of type ``steps``."""
    headers: list[dict[str, Any]] = []
    blocks: list[npt.NDArray[np.float32]] = []
    for frame in frames:
        sync = gradient_sync(frame)
        with_device = bool(frame.device_ns.any())
        headers.append(
            {
                "reducer": frame.reducer,
                "step": frame.step,
                "generation": frame.generation,
                "ranks": frame.ranks,
                "buckets": frame.shape[1],
                "began": frame.origin_ns / 1e9,
                "complete": frame.complete,
                "abandoned": frame.abandoned,
                "device": with_device,
                "hidden": None if np.isnan(sync.hidden_fraction) else sync.hidden_fraction,
            }
        )
        arrays = (
            frame.milliseconds(frame.bounds_ns),
            frame.milliseconds(frame.outside_ns),
            np.stack([sync.rank_hidden_ms, sync.rank_exposed_ms], axis=-1),
            frame.milliseconds(frame.times_ns),
            sync.wait_ms,
            sync.hidden_ms,
            sync.exposed_ms,
            sync.last_launched_ms,
            sync.last_rank,
            sync.all_reduce_ms,
            sync.bandwidth_gb_s,
            frame.bucket_bytes,
        )
        blocks.extend(_flat(array) for array in arrays)
        if with_device:
            blocks.append(_flat(frame.milliseconds(frame.device_ns)))
    buffer = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    return {"type": "steps", "steps": headers}, buffer.tobytes()


def _flat(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Returns the values in row order as float32."""
    return array.astype(np.float32).ravel()
