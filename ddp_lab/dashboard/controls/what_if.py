"""The what-if sliders: another world size, link or bucket size limit, or no straggler, predicted by the simulator.

[Note: a slider's answer]
The browser sends every position of a slider; of those that arrive during a computation only the last one counts. What
depends only on the recording (the workload, the link, the sliders' ranges) is computed again after new steps, at most
every other second and only while the view is on a page. So an answer costs one simulation: some milliseconds.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...analysis.step_parts import SPANS
from ...control.ab_trials import LiveTrialRunner, TrainingEnded
from ...control.tuning import Session
from ...errors import DdpLabError
from ...formatting import step_range
from ...simulation.calibration import anchored
from ...simulation.link_model import CommModel
from ...simulation.settings import Setting, grid
from ...simulation.simulator import Configuration, Prediction, simulate
from ...simulation.workload import Workload
from ...timeline.what_if import RecordedStep, fit_link, recorded_step
from ..step_feed import encode_steps
from ..views import StepFrame, what_if_blocks

if TYPE_CHECKING:
    from ...control.training import TrainingControl
    from ...simulation.candidate_selection import FinalTest
    from ...timeline.timeline import Timeline

__all__ = ["NOTHING", "WhatIfStage", "frame_of", "parts_ms"]

NOTHING = "What if: train some steps first. The sliders then predict them with other buckets, links and world sizes."
_NOTHING_RECORDED = "What if: the recording has no two consecutive steps, so there is nothing to predict from."
_MEBIBYTE = 1024 * 1024
_ORIGIN_NS = 10**9  # of a predicted step, because 0 means "has not happened"
_AGAIN_SECONDS = 2.0
_WORLDS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FACTORS = tuple(2.0 ** (power / 2) for power in range(-12, 13))
_NO_LATENCY_NS = 10_000.0  # the middle of the slider if no latency was found
_ROUNDS, _PATIENCE_SECONDS, _KEPT = 3, 10.0, 8  # of a trial
_NOBODY = "There are no ranks to run it on. Predictions need a running cluster in this notebook."
_IDLE = "No model is training. Start the training cell with %%distributed --no-wait, then press the button again."
_Asked = dict[str, Any]


@dataclass(frozen=True)
class _Known:
    """The facts of the recording.

    Attributes:
        reducer: the model.
        workload: what its ranks compute.
        link: the communication model of an all-reduce.
        measured: whether `link` was measured separately.
        ranks: the model's ranks.
        recorded: the time breakdown of the recorded steps, on the rank whose computation ends last, as in a
            simulation.
        caps: the size limits that the slider offers, ascending.
        straggler: the rank whose own computation takes longest.
        behind_ms: by how much it exceeds the median of the ranks.
    """

    reducer: int
    workload: Workload
    link: CommModel
    measured: bool
    ranks: list[int]
    recorded: RecordedStep
    caps: list[float]
    straggler: int
    behind_ms: float

    @property
    def recorded_caps(self) -> list[float]:
        return [cap / _MEBIBYTE for cap in self.workload.caps]

    def cap(self, asked: _Asked) -> float | None:
        """The cap that is asked for, None: as recorded. The sliders may still have the range of another model."""
        return None if asked.get("cap") is None else self.caps[min(int(asked["cap"]), len(self.caps) - 1)]


class Trial:
    """Runs a prediction ("Run it"), on a thread of its own.

    The current setting and the predicted one alternate, some steps each, so that both run under the same conditions;
    then the current setting is restored.

    Args:
        training: controls the ranks that train; None if there are none.
        changed: called on that thread when there is something new to show.
    """

    def __init__(self, training: TrainingControl | None, changed: Callable[[], None]) -> None:
        self._training, self._changed = training, changed
        self._lock = threading.Lock()
        self._state, self._text = "idle", ""
        self._scores: list[dict[str, Any]] = []
        self._thread: threading.Thread | None = None

    def told(self) -> dict[str, Any]:
        """The state for the browser: ``state`` ("idle", "running" or "failed"), ``text``, ``scores``, ``why``."""
        with self._lock:
            why = _NOBODY if self._training is None else ""
            return {"state": self._state, "text": self._text, "scores": list(self._scores), "why": why}

    def start(self, reducer: int, cap_mb: float, *, predicted_ms: float, present_ms: float) -> None:
        """Starts a trial, unless one is running; returns at once.

        Args:
            reducer: the model's number on the timeline.
            cap_mb: the bucket size limit to try.
            predicted_ms: its predicted step time.
            present_ms: the predicted step time of the current setting.
        """
        if self._training is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._tell("running", "waiting for the ranks …")
        arguments = (self._training, reducer, Setting((cap_mb,)), predicted_ms, present_ms)
        self._thread = threading.Thread(target=self._run, args=arguments, name="ddp_lab what-if", daemon=True)
        self._thread.start()

    def _run(
        self, training: TrainingControl, reducer: int, setting: Setting, predicted_ms: float, present_ms: float
    ) -> None:
        try:
            turns = LiveTrialRunner(training, reducer, None, _PATIENCE_SECONDS)
            if not turns.training:
                self._tell("failed", _IDLE)
                return
            self._tell("running", f"{setting} against {turns.users}: round 1 of {_ROUNDS} …")
            session = Session(turns, None, seconds=float("inf"), tell=partial(self._tell, "running"))
            compared = session.compare(setting, _ROUNDS)
        except TrainingEnded as ended:
            self._tell("failed", f"{ended} The model keeps its current setting.")
        except DdpLabError as error:
            self._tell("failed", str(error))
        except BaseException as error:  # noqa: BLE001 - the thread's top: shown in the view
            self._tell("failed", f"{type(error).__name__}: {error}")
        else:
            self._score(setting, compared, predicted_ms, present_ms)

    def _score(self, setting: Setting, compared: FinalTest, predicted_ms: float, present_ms: float) -> None:
        measured = compared.winner_ms
        with self._lock:
            score = {
                "setting": str(setting),
                "predicted": predicted_ms,
                "measured": measured,
                "error": 100 * (predicted_ms / measured - 1),
                "gainPredicted": 100 * (1 - predicted_ms / present_ms),
                "gainMeasured": compared.gain.percent,
            }
            self._scores = [*self._scores, score][-_KEPT:]
        self._tell("idle", "")

    def _tell(self, state: str, text: str) -> None:
        with self._lock:
            self._state, self._text = state, text
        self._changed()


class WhatIfStage:
    """The state of the what-if view.

    Args:
        timeline: the source of the steps.
        link: returns the measured `CommModel`, or None to fit one to the recorded all-reduces.
        training: controls the ranks for "Run it"; None if there are none.
        changed: called on another thread when there is something new to show.
    """

    def __init__(
        self,
        timeline: Timeline,
        link: Callable[[], CommModel | None] | None = None,
        training: TrainingControl | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeline, self._link = timeline, link or (lambda: None)
        self._asked: _Asked = {}
        self._looks: dict[str, int | None] = {}
        self._known: _Known | None = None
        self._known_at, self._version, self._shown = -math.inf, -1, -1
        self._nothing = _NOTHING_RECORDED if timeline.recorded else NOTHING
        self._why = self._nothing
        self._answer: dict[str, Any] = {"state": "empty", "text": self._nothing}
        self.trial = Trial(training, changed)

    # ---- for the dashboard's thread ---------------------------------------------------------------------

    def look(self, page: str, views: Sequence[str], reducer: int | None) -> None:
        """Notes which page shows the sliders, and for which model."""
        self._looks.pop(page, None)
        if "what_if" in views:
            self._looks[page] = reducer
            self._known_at = -math.inf

    def ask(self, asked: _Asked) -> None:
        """Takes the sliders' positions: ``world``, ``bandwidth``, ``latency`` and ``cap`` (indices), ``without``."""
        self._asked = dict(asked)
        self._shown = -1

    def run(self, asked: _Asked) -> None:
        """Has the ranks train with the sliders' bucket size limit."""
        known = self._known
        cap = known.cap(asked) if known is not None else None
        if known is None or cap is None:
            return
        predicted = simulate(known.workload, Configuration(cap), known.link).step_ns / 1e6
        present = simulate(known.workload, Configuration(known.recorded_caps or None), known.link).step_ns / 1e6
        self.trial.start(known.reducer, cap, predicted_ms=predicted, present_ms=present)

    def shown(self) -> dict[str, dict[str, Any]]:
        """The state to show."""
        if self._looks and self._refresh():
            self._shown = -1
        if self._shown != self._version and self._looks:
            self._shown = self._version
            self._answer = self._predict()
        return {"what_if": self._answer, "trial": self.trial.told()}

    def snapshot(self) -> dict[str, Any]:
        """The current answer for a picture, computed if there is none yet."""
        if self._answer["state"] == "empty":
            self._refresh()
            self._answer = self._predict()
        return self._answer

    # ---- facts of the recording -------------------------------------------------------------------------

    def _refresh(self) -> bool:
        """Reads the recording again if it has grown; returns whether it did."""
        now, version = time.monotonic(), self._timeline.version
        if version == self._version or now - self._known_at < _AGAIN_SECONDS:
            return False
        self._known_at, self._version = now, version
        wanted = [reducer for reducer in self._looks.values() if reducer is not None]
        try:
            self._known = _learn(self._timeline, self._link(), wanted[-1] if wanted else None)
        except ValueError as error:
            self._known = None
            self._why = f"What if: {error}." if self._timeline.reducers() else self._nothing
        return True

    # ---- answers ----------------------------------------------------------------------------------------

    def _predict(self) -> dict[str, Any]:
        known = self._known
        if known is None:
            return {"state": "empty", "text": self._why}
        asked = self._asked
        link = _link_of(known, asked)
        others = asked.get("without") and known.workload.ranks > 1
        workload = known.workload.without(known.straggler) if others else known.workload
        tried = known.cap(asked)
        cap = (known.recorded_caps or None) if tried is None else tried
        world = _WORLDS[int(asked["world"])] if asked.get("world") is not None else None
        predicted = simulate(workload, Configuration(cap, world_size=world), link)
        same = simulate(known.workload, Configuration(known.recorded_caps or None), known.link)
        header, body = encode_steps([frame_of(workload, predicted, known.ranks, known.reducer)])
        answer = {
            "state": "ready",
            "number": asked.get("number", 0),
            "reducer": known.reducer,
            "limits": _limits(known),
            "recorded": parts_ms(known.recorded),
            "about": _about(known.recorded),
            "same": parts_ms(same),
            "predicted": parts_ms(predicted),
            "cap": cap,
            "world": world or known.workload.world_size,
            "gbit": 8 * link.bandwidth_gb_s if math.isfinite(link.bandwidth_gb_s) else None,
            "header": header,
            "body": body,
        }
        return {**answer, "blocks": what_if_blocks(answer)}


def _learn(timeline: Timeline, measured: CommModel | None, reducer: int | None) -> _Known:
    """Reads the facts of the recording.

    Raises:
        ValueError: too little has been recorded.
    """
    workload = timeline.workload(reducer)
    info = timeline.model(reducer)
    assert info is not None
    caps = sorted({one.caps_mb[0] for one in grid(workload) if len(one.caps_mb) == 1})
    own = workload.forward_ns + workload.computed_ns + workload.other_ns
    if info.ranks and workload.world_size < 2:
        raise ValueError("the model trains on a single rank, so there is no communication to predict")
    workload, link = anchored(workload, measured or fit_link(timeline, info.reducer))
    return _Known(
        reducer=info.reducer,
        workload=workload,
        link=link,
        measured=measured is not None,
        ranks=list(timeline.assignment(info.reducer)["group_ranks"]),
        recorded=recorded_step(timeline, workload, info.reducer),
        caps=caps,
        straggler=int(own.argmax()),
        behind_ms=float(own.max() - np.median(own)) / 1e6,
    )


def _about(recorded: RecordedStep) -> str:
    """Describes the recorded and the simulated rows."""
    return (
        f"The recorded phases are those of rank {recorded.rank}, which computes longest (medians of "
        f"{step_range(recorded.steps.tolist())}). The simulated phases are those of the slowest simulated rank."
    )


def _link_of(known: _Known, asked: _Asked) -> CommModel:
    link = known.link
    if asked.get("bandwidth") is not None:
        link = replace(link, ns_per_byte=link.ns_per_byte / _FACTORS[int(asked["bandwidth"])])
    if asked.get("latency") is not None:
        factor = _FACTORS[int(asked["latency"])]
        latency = link.latency_ns * factor if link.latency_ns else _NO_LATENCY_NS * factor
        link = replace(link, latency_ns=latency)
    return link


def _limits(known: _Known) -> dict[str, Any]:
    """The sliders' ranges, and the recorded values, where they start."""
    link = known.link
    gbit = 8 * link.bandwidth_gb_s if math.isfinite(link.bandwidth_gb_s) else None
    return {
        "worlds": list(_WORLDS),
        "recordedWorld": known.workload.world_size,
        "gbit": None if gbit is None else [gbit * factor for factor in _FACTORS],
        "recordedGbit": gbit,
        "latencyUs": [(link.latency_ns or _NO_LATENCY_NS) * factor / 1e3 for factor in _FACTORS],
        "recordedLatencyUs": link.latency_ns / 1e3,
        "caps": known.caps,
        "recordedCaps": known.recorded_caps,
        "straggler": known.ranks[known.straggler],
        "behindMs": known.behind_ms,
        "ranks": len(known.ranks),
        "measured": known.measured,
    }


def frame_of(workload: Workload, predicted: Prediction, ranks: Sequence[int], reducer: int) -> StepFrame:
    """Returns the prediction as a complete step.

    Args:
        workload: the simulated workload.
        predicted: the prediction, with the times of every bucket.
        ranks: the rank of each row.
        reducer: number of the model.
    """
    first = [predicted.gradients_ns[:, list(members)].min(axis=1) for members in predicted.buckets]
    reduced = np.broadcast_to(predicted.reduced_ns, predicted.ready_ns.shape)
    begin = predicted.begin_ns
    return StepFrame(
        reducer,
        step=0,
        generation=0,
        ranks=list(ranks),
        bucket_bytes=predicted.bytes.astype(np.int64),
        bounds_ns=_ns(begin, predicted.computed_ns, predicted.end_ns),
        outside_ns=_ns(begin - workload.forward_ns, begin, np.zeros(len(begin))),
        spans_ns=np.zeros((len(begin), len(SPANS)), np.int64),
        times_ns=_ns(np.stack(first, axis=1), predicted.ready_ns, predicted.launched_ns, reduced),
        device_ns=np.zeros((*predicted.ready_ns.shape, 2), np.int64),
    )


def _ns(*columns: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Times side by side, as in a frame."""
    return np.asarray(np.rint(np.stack(columns, axis=-1)), np.int64) + _ORIGIN_NS


def parts_ms(predicted: Prediction | RecordedStep) -> dict[str, float]:
    """Milliseconds by phase (`PHASES` of palette.py), and their sum as ``step``."""
    parts = {
        "other": predicted.other_ns,
        "forward": predicted.forward_ns,
        "alone": predicted.compute_ns - predicted.hidden_ns,
        "hidden": predicted.hidden_ns,
        "exposed": predicted.exposed_ns,
    }
    return {name: float(value) / 1e6 for name, value in parts.items()} | {"step": predicted.step_ns / 1e6}
