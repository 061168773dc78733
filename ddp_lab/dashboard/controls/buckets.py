"""Changes of buckets and comm hook from the dashboard while training runs, and their effect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...analysis.comparison import before_after
from ...errors import DdpLabError
from ...formatting import counted, enumeration
from ...timeline.changes import BucketChange, last_change
from ..paint.scene_json import blocks_json
from ..scene import Axis, Dots, Panel, Scene, Spans, Table
from .control import Control

if TYPE_CHECKING:
    from ...control.training import TrainingControl
    from ...timeline.timeline import Timeline

__all__ = ["BucketControl", "Comparing", "change_back", "compared", "compared_page", "described"]

_SIDES = ("before", "after")
_SHARE, _LEAST_SECONDS = 50, 2.0  # see [Note: at most a fiftieth] in live.py
_TIMEOUT = 30.0
_HOOKS = {
    "fp16": "fp16",
    "bf16": "bf16",
    "powersgd": "powersgd",
}  # part of a hook's own name -> the name that requests it
_SAME_BUCKETS = "Buckets and hook are the same before and after the change, so it has no effect on the step time."
_ASKED = "Requested. The ranks apply the change between two steps; the model must train two steps within {:.0f} s …"


class BucketControl(Control):
    """Requests one change at a time, each on a thread of its own, because it waits for the model to train.

    Shows ``state`` ("idle", "asked", "applied" or "failed"), ``text``, ``reducer``.
    """

    def __init__(self, training: TrainingControl, timeline: Timeline, changed: Callable[[], None]) -> None:
        """`changed()` is called on that thread when there is something new to show."""
        super().__init__(training)
        self._timeline = timeline
        self._changed = changed
        self._thread: threading.Thread | None = None
        self.shown = {"state": "idle", "text": ""}

    def obey(self, command: dict[str, Any]) -> None:
        """Runs ``{"change": {...}, "reducer": ...}``, or ``{"back": True, "reducer": ...}``; returns at once."""
        reducer = command.get("reducer")
        if self._thread is not None and self._thread.is_alive():
            self.shown = {**self.shown, "text": "The previous change is still in progress. Wait for it to finish."}
            return
        if command.get("back"):
            found = last_change(self._timeline, int(command["reducer"]))
            change = change_back(found.before, found.after)
        else:
            change = {name: value for name, value in command["change"].items() if value is not None}
            if None in change.get("bucket_cap_mb_list", ()):
                raise ValueError("bucket size limits must be numbers in MiB, for example: 1, 5, 25")
        self.shown = {"state": "asked", "text": _ASKED.format(_TIMEOUT), "reducer": reducer}
        self._thread = threading.Thread(target=self._apply, args=(reducer, change), name="ddp_lab change", daemon=True)
        self._thread.start()

    def _apply(self, reducer: int | None, change: dict[str, Any]) -> None:
        try:
            done = self._training.reconfigure(reducer, timeout=_TIMEOUT, **change)
        except (DdpLabError, ValueError, TypeError) as error:
            self.shown = {"state": "failed", "text": str(error), "reducer": reducer}
        else:
            buckets = len(self._timeline.assignment(done.reducer, done.generation)["buckets"])
            what = ", ".join(f"{name}={_short(value)}" for name, value in done.change.items())
            text = f"Changed at step {done.step}: {what}. {_now(buckets)}."
            self.shown = {"state": "applied", "text": text, "reducer": done.reducer}
        self._changed()

    def fail(self, error: str) -> None:
        """Shows an error until the next request."""
        self.shown = {"state": "failed", "text": error, "reducer": self.shown.get("reducer")}

    def forget(self) -> None:
        """Keeps what is shown, although there are no ranks to query."""


class Comparing:
    """The steps before and after the newest change of a model's buckets on a timeline; updated regularly."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._next = 0.0
        self._done: object = None

    def update(self, reducer: int | None) -> dict[str, Any] | None:
        """Returns the comparison if there is a newer one, else None."""
        known = [one for one in self._timeline.reducers() if reducer in (None, one.reducer) and one.generations]
        key = (self._timeline.version, reducer)
        if not known or key == self._done or time.monotonic() < self._next:
            return None
        begin = time.thread_time()
        found = compared_page(compared(self._timeline, known[-1].reducer))
        self._done = key
        self._next = time.monotonic() + max(_LEAST_SECONDS, _SHARE * (time.thread_time() - begin))
        return found


def compared(timeline: Timeline, reducer: int) -> dict[str, Any]:
    """Returns the steps before and after the last change of a model's buckets or hook.

    Returns:
        ``reducer``; ``text``: the verdict, or why there is none (empty: nothing was changed); ``sides``: for each
        ``step`` (the first that counts), `described`, ``ms`` (of single steps); with a verdict also ``percent``,
        ``low``, ``high``, ``verdict``, ``medians``.
    """
    try:
        change = last_change(timeline, reducer)
    except ValueError:
        return {"reducer": reducer, "text": "", "sides": []}
    made: dict[str, Any] = {"reducer": reducer, "sides": _sides(change)}
    if change.keeps_buckets:
        return {**made, "text": _SAME_BUCKETS}
    try:
        found = before_after(*change.times)
    except ValueError as error:
        return {**made, "text": f"{error}."}
    percents = {"percent": found.percent, "low": found.low_percent, "high": found.high_percent}
    medians = [found.before_ms, found.after_ms]
    steps = enumeration([str(len(side["ms"])) for side in made["sides"]])
    text = (
        f"A step takes {medians[0]:.2f} ms before, {medians[1]:.2f} ms after: {found.percent:+.1f} % (99 %: "
        f"{found.low_percent:+.1f} % to {found.high_percent:+.1f} %), {found.verdict}. Medians of {steps} steps."
    ).replace("-", "−")
    return {**made, "text": text, "verdict": found.verdict, "medians": medians, **percents}


def compared_page(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what a page shows of `compared`: ``reducer``, ``text`` and ``blocks``; empty if nothing was changed."""
    sides = found["sides"]
    if not sides:
        return {"reducer": found["reducer"], "text": found["text"], "blocks": []}
    rows = [
        [name, side["buckets"], side["caps"], side["hook"], side["step"], len(side["ms"]), _median(side["ms"])]
        for name, side in zip(_SIDES, sides, strict=True)
    ]
    head = ["", "buckets", "size limits", "comm hook", "from step", "steps", "median ms"]
    tips = [
        "\n".join([f"{row[0]} the change", *(f"{a}\t{b}" for a, b in zip(head[1:], row[1:], strict=True))])
        for row in rows
    ]
    lanes = [f"{row[0]} ({counted(side['buckets'], 'bucket')})" for row, side in zip(rows, sides, strict=True)]
    of_all = [value for side in sides for value in side["ms"]]
    top = 1.08 * float(np.quantile(of_all, 0.97)) if of_all else 1.0
    # The two sides differ in shape as well as in colour.
    dots = [
        Dots("", f"rank{lane}", lane, np.array(side["ms"]), np.full(len(side["ms"]), lane), spread=True)
        for lane, side in enumerate(sides)
    ]
    medians = np.array([_median(side["ms"]) for side in sides])
    known = np.flatnonzero(np.isfinite(medians))
    scene = Scene(
        f"{found['text']} Dots are steps, bars their medians.",
        (
            Panel(
                Axis("ms from step to step; upper dots are later steps", top=top),
                Axis("", lanes, tips=tips),
                (*dots, Spans("", "line", known, medians[known], medians[known])),
            ),
        ),
    )
    table = Table(head, [[*row[:-1], f"{row[-1]:.2f}"] for row in rows], "Before and after the change", folded=True)
    return {"reducer": found["reducer"], "text": found["text"], "blocks": blocks_json([scene, table])}


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else float("nan")


def _sides(change: BucketChange) -> list[dict[str, Any]]:
    made = []
    for assignment, steps, ms in zip((change.before, change.after), change.steps, change.times, strict=True):
        first = int(steps[0]) if len(steps) else assignment["first_step"]
        made.append({"step": first, "ms": [round(float(one), 3) for one in ms], **described(assignment)})
    return made


def described(assignment: dict[str, Any]) -> dict[str, Any]:
    """A short description of a bucket layout: ``buckets``, ``caps``, ``hook``."""
    options = assignment.get("options") or {}
    caps = _caps(options)
    text = f"{', '.join(_number(cap) for cap in caps)} MiB" if caps else "?"
    return {"buckets": len(assignment["buckets"]), "caps": text, "hook": options.get("comm_hook") or "none"}


def _caps(options: dict[str, Any]) -> list[float]:
    """The size limits in MiB in launch order, without repetitions at the end."""
    caps = list(options.get("bucket_cap_mb_list") or [])
    while len(caps) > 1 and caps[-1] == caps[-2]:
        caps.pop()
    return caps


def change_back(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns the change that undoes the last one: size limits, order, and the hook if its name is known.

    Args:
        before: description of the bucket layout before the change.
        after: description of the current one.
    """
    names = {one["index"]: one["name"] for one in before["parameters"]}
    made: dict[str, Any] = {"order": [names[index] for one in before["buckets"] for index in one["parameters"]]}
    caps = _caps(before.get("options") or {})
    if caps:
        made["bucket_cap_mb_list"] = caps
    hook, now = ((one.get("options") or {}).get("comm_hook") for one in (before, after))
    if hook != now:
        known = next((asked for part, asked in _HOOKS.items() if part in str(hook).lower()), hook)
        made["comm_hook"] = "none" if hook is None else known
    return made


def _now(buckets: int) -> str:
    return "There is one bucket now" if buckets == 1 else f"There are {buckets} buckets now"


def _number(value: float) -> str:
    return f"{round(value, 4):g}" if value >= 0.001 else f"{value:.2g}"


def _short(value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    numbers = [_number(one) for one in value if isinstance(one, float | int)]
    return f"[{', '.join(numbers)}]" if len(numbers) == len(value) else "as given"
