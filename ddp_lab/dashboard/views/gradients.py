"""Gradient monitoring: norms, noise scale, the origin of NaN, drift of replicas; in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...timeline.tables.gradients import noise_scale, signal_and_noise
from ...timeline.timeline import Timeline

__all__ = ["gradient_facts", "gradients_words"]

_STEPS = 200
_NOISE_STEPS = 20  # over which the noise scale is averaged
_MOST_NUMBERS = 8_000  # of single buckets, in one message
_CHECKS = 20


def gradient_facts(timeline: Timeline, reducer: int) -> dict[str, Any]:
    """Returns the monitoring results of a model's gradients and replicas.

    Returns:
        ``steps``: for each of the newest 200 monitored steps ``step``, ``before`` (norm by rank, None: none),
        ``after``, ``noise`` (scale over the last 20 monitored steps, in batches of a rank; None if not measurable),
        ``bad`` (None, or ``kind``, ``parameter``, ``rank``) and ``ms`` (cost); ``ranks``; ``buckets``: for as many of
        the newest steps as fit, ``step`` -> ``before`` [ranks][buckets] and ``after`` [buckets]; ``noise_scale``;
        ``drift``: the newest checks.
    """
    described = timeline.watched_gradients(reducer, _STEPS)
    ranks = described[-1]["ranks"] if described else []
    described = [one for one in described if one["ranks"] == ranks]
    totals = np.array([_total(one["before"]) for one in described]).reshape(len(described), len(ranks))
    after = np.array([_total([one["after"]])[0] for one in described])
    signal, noise = signal_and_noise(totals, after)
    steps = []
    for index, one in enumerate(described):
        recent = slice(max(0, index + 1 - _NOISE_STEPS), index + 1)
        steps.append(
            {
                "step": one["step"],
                "before": [_known(value) for value in totals[index]],
                "after": _known(after[index]),
                "noise": _known(noise_scale(signal[recent], noise[recent])),
                "bad": one["nonfinite"],
                "ms": 1e3 * one["seconds"],
            }
        )
    return {
        "ranks": ranks,
        "steps": steps,
        "buckets": _buckets(described),
        "noise_scale": _known(timeline.noise_scale(reducer)) if described else None,
        "drift": [
            {"step": one.step, "ok": one.ok, "first": one.first, "groups": one.groups, "differing": one.differing}
            | {"ms": one.cost_ms, "bytes": one.bytes, "error": one.error}
            for one in timeline.drift_records(reducer, _CHECKS)
        ],
    }


def _total(by_bucket: Any) -> npt.NDArray[np.float64]:
    """Norm of all buckets together, for each rank; NaN if a bucket's norm is unknown or not finite."""
    return np.asarray(np.sqrt((np.array(by_bucket, float) ** 2).sum(axis=1)))


def _known(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _buckets(described: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest steps' buckets, as many as fit."""
    found: dict[str, Any] = {}
    numbers = 0
    for one in reversed(described):
        numbers += (len(one["ranks"]) + 1) * len(one["after"])
        if found and numbers > _MOST_NUMBERS:
            break
        found[str(one["step"])] = {"before": one["before"], "after": one["after"]}
    return found


def gradients_words(facts: Mapping[str, Any]) -> str:
    """Returns the monitoring results in one or two sentences."""
    steps = facts["steps"]
    words = []
    if steps:
        words.append(f"{len(steps)} monitored steps, {steps[0]['step']} to {steps[-1]['step']}.")
        if facts["noise_scale"] is not None:
            words.append(f"Noise scale {facts['noise_scale']:.3g} batches of a rank.")
    for one in [one for one in steps if one["bad"]][-1:]:
        bad = one["bad"]
        where = f"first in {bad['parameter']} on rank {bad['rank']}" if bad["parameter"] else "in the average alone"
        words.append(f"{bad['kind']} in step {one['step']}: {where}.")
    for check in facts["drift"][-1:]:
        found = "equal" if check["ok"] else f"differ, first in {check['first']}" if check["first"] else check["error"]
        words.append(f"Replicas before step {check['step']}: {found}.")
    return " ".join(words)
