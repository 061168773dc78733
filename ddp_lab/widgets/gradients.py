"""What the gradients view shows: watched norms, noise, where NaN came from, drift of replicas; and its controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..client.timeline import Timeline
from ..insight.gradient_noise import noise_scale, signal_and_noise

if TYPE_CHECKING:
    from ..client.looking import Looking

__all__ = ["WatchControl", "gradient_facts"]

_STEPS = 200
_NOISE_STEPS = 20  # over which the noise scale is averaged
_MOST_NUMBERS = 8_000  # of single buckets, in one message
_CHECKS = 20
_CHECK_SECONDS = 3.0


def gradient_facts(timeline: Timeline, reducer: int) -> dict[str, Any]:
    """Returns what is known of a model's gradients and replicas.

    Returns:
        ``steps``: of each of the newest 200 watched steps ``step``, ``before`` (norm by rank, None: none), ``after``,
        ``noise`` (scale over the last 20 watched steps, in batches of a rank; None if hidden), ``bad`` (None, or
        ``kind``, ``parameter``, ``rank``) and ``ms`` (cost); ``ranks``; ``buckets``: of as many of the newest as fit,
        ``step`` -> ``before`` [ranks][buckets] and ``after`` [buckets]; ``noise_scale``; ``drift``: the newest checks.
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
    """Norm of all buckets together, for each rank; NaN where one is unknown or not finite."""
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


class WatchControl:
    """Turns watches on and off, and has replicas compared. One thread at a time."""

    active = False  # nothing of it needs to be looked at often

    def __init__(self, live: Looking) -> None:
        self._live = live
        self.shown: dict[str, Any] = {"gradients": 0, "drift": 0, "pending": 0, "said": "", "error": ""}
        """What the browser shows: every how many steps (0: not), requests not yet begun, ``said``, ``error``."""

    def obey(self, command: dict[str, Any]) -> None:
        """Carries out ``{"do": "gradients" | "drift", "every": n} | {"do": "check"}``, with ``reducer``.

        Raises:
            ClusterError, ValueError: a rank refuses it, or does not answer.
        """
        reducer, do = command.get("reducer"), command["do"]
        if do == "check":
            found = self._live.check_drift(reducer, timeout=_CHECK_SECONDS)
            self._say("All ranks hold the same model." if found.ok else "")
        else:
            every = int(command["every"])
            set_ = self._live.watch_gradients if do == "gradients" else self._live.watch_drift
            set_(every, reducer)
            when = f"every {every} steps" if every > 1 else "every step"
            what = "Gradients are watched" if do == "gradients" else "Replicas are compared"
            self._say(
                f"{what} {when}, from the next steps on." if every else f"{what} no more, from the next steps on."
            )
        self.look(reducer)

    def look(self, reducer: int | None) -> None:
        """Asks what is watched.

        Raises:
            ClusterError: a rank does not answer, or there is no such model.
        """
        self.shown = {**self.shown, **self._live.looks(reducer)}

    def fail(self, error: str) -> None:
        """Shows what went wrong, until the next request."""
        self.shown = {**self.shown, "error": error, "said": ""}

    def forget(self) -> None:
        """Nobody can be asked."""
        self.shown = {"gradients": 0, "drift": 0, "pending": 0, "said": "", "error": self.shown["error"]}

    def _say(self, text: str) -> None:
        self.shown = {**self.shown, "said": text, "error": ""}
