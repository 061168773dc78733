"""A predicted step as the frame of a recorded one, so that the browser draws it with the same code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..simulation.simulator import Prediction
from ..simulation.workload import Workload
from ..timeline.workloads import RecordedStep
from .step_frames import (
    BEGIN,
    END,
    FINALIZE,
    FIRST_READY,
    FORWARD_BEGIN,
    FORWARD_END,
    LAUNCHED,
    PREVIOUS_END,
    READY,
    REDUCED,
    StepFrame,
)

__all__ = ["frame_of", "parts_ms"]

_ORIGIN_NS = 10**9  # 0 means "has not happened"


def frame_of(workload: Workload, predicted: Prediction, ranks: Sequence[int], reducer: int) -> StepFrame:
    """Returns the prediction as a complete step.

    Args:
        workload: what was replayed.
        predicted: with the times of every bucket.
        ranks: the rank of each row.
        reducer: number of the model.
    """
    made = StepFrame.empty(reducer, 0, 0, list(ranks), predicted.bytes.astype(np.int64))
    made.bounds_ns[:, BEGIN] = _ns(predicted.begin_ns)
    made.bounds_ns[:, FINALIZE] = _ns(predicted.computed_ns)
    made.bounds_ns[:, END] = _ns(predicted.end_ns)
    made.outside_ns[:, FORWARD_BEGIN] = _ns(predicted.begin_ns - workload.forward_ns)
    made.outside_ns[:, FORWARD_END] = made.bounds_ns[:, BEGIN]
    made.outside_ns[:, PREVIOUS_END] = _ns(np.zeros(len(predicted.begin_ns)))
    first = [predicted.gradients_ns[:, list(members)].min(axis=1) for members in predicted.buckets]
    made.times_ns[:, :, FIRST_READY] = _ns(np.stack(first, axis=1))
    made.times_ns[:, :, READY] = _ns(predicted.ready_ns)
    made.times_ns[:, :, LAUNCHED] = _ns(predicted.launched_ns)
    made.times_ns[:, :, REDUCED] = _ns(np.broadcast_to(predicted.reduced_ns, predicted.ready_ns.shape))
    return made


def _ns(times: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.asarray(np.rint(times), np.int64) + _ORIGIN_NS


def parts_ms(predicted: Prediction | RecordedStep) -> dict[str, float]:
    """Milliseconds by phase (`PHASES` of theme.py), and their sum as ``step``."""
    parts = {
        "other": predicted.other_ns,
        "forward": predicted.forward_ns,
        "alone": predicted.compute_ns - predicted.hidden_ns,
        "hidden": predicted.hidden_ns,
        "exposed": predicted.exposed_ns,
    }
    return {name: float(value) / 1e6 for name, value in parts.items()} | {"step": predicted.step_ns / 1e6}
