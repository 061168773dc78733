"""Turns of a setting: some training steps with it, and their times; while a cell trains, or in cells of their own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import CellError, ClusterError
from ..output.board import SilentBoard
from ..protocol.entry_points import APPLY_CHANGE
from ..protocol.messages import CellText, Change, CheckChange, Ping, PrepareChange
from ..simulation.settings import Setting
from ..timeline.tables.step_table import STEP_FIELDS

if TYPE_CHECKING:
    from ..timeline.event_tables import TimelineModel
    from .ranks import Ranks
    from .training import TrainingControl


WARM_UP = 2  # steps after a change, which allocate memory
_TURN_SECONDS = 0.3
_STEPS = (5, 60)
_LOOK_SECONDS = 0.01
_ANSWER_SECONDS = 5.0
_LATE_SECONDS = 5.0  # how much later than another's a rank's record of a step may arrive
_PATIENCE_SECONDS = 20.0
_QUIET_SECONDS = 0.1  # without a step, after which the ranks are asked whether they run a cell
_PAUSE_SECONDS, _PAUSE_STEPS = 2.0, 5  # the same if they run no cell while they train, e.g. on a thread of their own
_BACKWARD_END = STEP_FIELDS.index("backward_end")


class TrainingEnded(Exception):
    """The model no longer trains, so no more turns are possible."""


class TrialRunner:
    """Common to both kinds of turns.

    Args:
        control: of the training ranks.
        reducer: the model's number on the timeline.
        steps: per turn; None: about 0.3 s of them, 5 to 60.

    Attributes:
        users: the user's setting.
        present: the current setting; None if unknown.
        count: steps per turn; None before the first.
        steps: trained so far.
    """

    def __init__(self, control: TrainingControl, reducer: int, steps: int | None) -> None:
        self.control, self.reducer, self.count, self.steps = control, reducer, steps, 0
        described = control.timeline.assignment(reducer)
        self.ranks: list[int] = list(described["group_ranks"])
        self.users = Setting(_caps(described["options"]["bucket_cap_mb_list"]))
        self.present: Setting | None = self.users
        self.hook: str | None = described["options"].get("comm_hook")
        self.views = any(described["options"].get(one) for one in ("gradient_as_bucket_view", "averages_in_place"))
        self._changed = self._hooked = False
        names = {one["index"]: one["name"] for one in described["parameters"]}
        kinds = {(one["dtype"], one["device"]) for one in described["parameters"]}
        # Buckets hold gradients of one type each and have an order, which is kept.
        order = [names[index] for bucket in described["buckets"] for index in bucket["parameters"]]
        self._order: dict[str, Any] = {"order": order} if len(kinds) > 1 and described["rebuilt"] else {}

    def refusal(self, setting: Setting) -> str:
        """Why the ranks would refuse a setting; empty if they would not."""
        change = setting.change(self.users)
        if not change:
            return ""
        answers = self.control.answers(self.reducer, self.ranks, CheckChange(Change(**change)))
        return answers.errors[min(answers.errors)] if answers.errors else ""

    def _change(self, setting: Setting) -> dict[str, Any]:
        """The change that leads to a setting from the current one."""
        if self.present is not None:
            made = setting.change(self.present)
        else:
            made = setting.change(Setting((0.0,)))
            if self._hooked:
                made["comm_hook"] = setting.hook or "none"
        return made | self._order if made else made

    def _count_for(self, times: npt.NDArray[np.float64]) -> int:
        """The number of steps per turn, from the duration of some."""
        return int(np.clip(round(1e3 * _TURN_SECONDS / float(np.median(times))), *_STEPS))

    def _begin(self, setting: Setting) -> dict[str, Any]:
        """Returns the change that is about to be made; until it has succeeded, the current setting is unknown."""
        change = self._change(setting)
        if change:
            self.present, self._changed = None, True
            self._hooked = self._hooked or "comm_hook" in change
        return change

    @property
    def _last_step(self) -> int:
        known = [one.last_step for one in self.control.timeline.reducers() if one.reducer == self.reducer]
        return known[0] if known else -1

    def _times(self, first: int, end: int) -> npt.NDArray[np.float64]:
        """Milliseconds of the known steps from `first` to `end` - 1, mean over the ranks."""
        return step_times(self.control.timeline, self.reducer, first, end)


def step_times(timeline: TimelineModel, reducer: int, first: int, end: int) -> npt.NDArray[np.float64]:
    """Milliseconds from the end of a backward to the end of the next, mean over the ranks.

    Args:
        timeline: the timeline that recorded them.
        reducer: of the model.
        first: the first step.
        end: one beyond the last step.

    Returns:
        One number for each step whose end, and the end before it, all ranks have recorded.
    """
    latest = max((one.last_step for one in timeline.reducers() if one.reducer == reducer), default=-1)
    known: list[dict[int, int]] = []
    for view in timeline.views(reducer, max(2, latest - first + 3)):
        ends = view.steps[:, _BACKWARD_END]
        known.append({int(step): int(at) for step, at in zip(view.step, ends, strict=True) if at > 0})
    made = []
    for step in range(first, end):
        if known and all(step in of_rank and step - 1 in of_rank for of_rank in known):
            made.append(float(np.mean([of_rank[step] - of_rank[step - 1] for of_rank in known])) / 1e6)
    return np.array(made)


def _caps(caps: list[float]) -> tuple[float, ...]:
    """Without redundant repetitions at the end."""
    made = [float(cap) for cap in caps]
    while len(made) > 1 and made[-1] == made[-2]:
        made.pop()
    return tuple(made)


class LiveTrialRunner(TrialRunner):
    """Observes steps that other code trains, and changes the model between them.

    Args:
        control: see `TrialRunner`.
        reducer: see `TrialRunner`.
        steps: see `TrialRunner`.
        patience: seconds without a step after which training counts as stalled; None: 20, or ten steps.
    """

    def __init__(
        self, control: TrainingControl, reducer: int, steps: int | None, patience: float | None = None
    ) -> None:
        super().__init__(control, reducer, steps)
        recent = self._times(self._last_step - 10, self._last_step)
        typical = float(np.median(recent)) / 1e3 if len(recent) else 0.0
        self.patience = max(_PATIENCE_SECONDS, 10 * typical) if patience is None else patience
        self._quiet = _QUIET_SECONDS if self.training else max(_PAUSE_SECONDS, _PAUSE_STEPS * typical)
        self._seen, self._moved, self._asked = -1, 0.0, 0.0  # the last step, since when, and when the ranks were asked

    def take(self, setting: Setting) -> npt.NDArray[np.float64]:
        """Lets the model train some steps with a setting.

        Returns:
            Milliseconds of each step, mean over the ranks.

        Raises:
            TrainingEnded: there were not enough steps.
            ClusterError: the ranks refuse the setting, or don't respond.
        """
        first = self._switch(setting) + WARM_UP
        if self.count is None:
            self.count = self._count_for(self._recorded(first, _STEPS[0]))
        times = self._recorded(first, self.count)
        self.steps += WARM_UP + self.count
        return times

    def _recorded(self, first: int, count: int) -> npt.NDArray[np.float64]:
        """The times of `count` steps, of at least half of them, once they have ended on all ranks.

        They are the next from `first` on that are still known: on a busy machine, fast steps are soon discarded.

        Raises:
            TrainingEnded: they were not trained, or too many were not recorded.
        """
        self._wait_step(first + count)
        deadline = time.monotonic() + _LATE_SECONDS
        while len(times := self._times(first, self._last_step + 1)[:count]) < count and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if len(times) < max(1, count // 2):
            raise TrainingEnded("The steps of a turn were not recorded.")
        return times

    def _switch(self, setting: Setting) -> int:
        """Returns the first step that the model trains with the setting."""
        change = self._begin(setting)
        if not change:
            return self._last_step + 1
        try:
            done = self.control.apply(self.reducer, Change(**change), self.patience, self._trains)
        except ClusterError as error:
            if not self.training:
                raise TrainingEnded("Training ended.") from error
            raise
        self.present = setting
        return done.step

    def settle(self, setting: Setting) -> bool:
        """Restores this setting, in any state; returns whether the ranks have it now.

        False: they will have it in their second step from now.
        """
        if not self._changed or not self._change(setting):
            return True
        if self.training:
            try:
                self._switch(setting)
                return True
            except (ClusterError, TrainingEnded):
                if self.training:  # it is stalled, or a change is already pending
                    return self._leave(setting)
        return apply_in_cell(self, setting)

    def _leave(self, setting: Setting) -> bool:
        """Sends the ranks the change without waiting for them."""
        prepare = PrepareChange(f"tune-{time.monotonic_ns()}", Change(**self._change(setting)))
        for ranks in (self.ranks[1:], self.ranks[:1]):
            self.control.ask(self.reducer, ranks, prepare)
        return False

    @property
    def training(self) -> bool:
        """Whether a rank of the model runs a program or a cell, or is about to."""
        if not self.control.owner.busy_ranks().isdisjoint(self.ranks):
            return True
        answers = self.control.owner.wire.request(self.ranks, Ping(), _ANSWER_SECONDS)
        return any(answer.cell is not None for answer in answers.values())

    def _trains(self) -> bool:
        """Whether the model keeps training, as far as known; called repeatedly, it asks the ranks when no step arrives.

        A cell that has ended no longer trains; a thread may train without a cell.
        """
        now, last = time.monotonic(), self._last_step
        if last != self._seen:
            self._seen, self._moved = last, now
        if now - max(self._moved, self._asked) < self._quiet:
            return True
        self._asked = now
        return self.training

    def _wait_step(self, step: int) -> None:
        """Waits until all of the steps before `step` have ended.

        Raises:
            TrainingEnded: they do not.
        """
        self._seen = -1
        while self._last_step < step:
            if not self._trains():
                raise TrainingEnded("Training ended.")
            if time.monotonic() - self._moved > self.patience:
                raise TrainingEnded(f"The model did not train a step for {self.patience:.0f} s.")
            time.sleep(_LOOK_SECONDS)


class CellTrialRunner(TrialRunner):
    """Trains itself: each turn is a cell that runs the user's step.

    Args:
        cluster: whose ranks train.
        reducer: see `TrialRunner`.
        steps: see `TrialRunner`.
        code: one training step, as the text of a cell.
    """

    def __init__(self, cluster: Ranks, reducer: int, steps: int | None, code: str) -> None:
        super().__init__(cluster.training, reducer, steps)
        self.cluster, self.code = cluster, code

    def take(self, setting: Setting) -> npt.NDArray[np.float64]:
        """See `LiveTrialRunner.take`."""
        if self.count is None:
            self.count = self._count_for(self._run(setting, _STEPS[0]))
        return self._run(setting, self.count)

    def _run(self, setting: Setting, count: int) -> npt.NDArray[np.float64]:
        change, before = self._begin(setting), self._last_step
        loop = f"_tuned_step = compile({self.code!r}, 'the step that is tuned', 'exec')\n"
        loop += f"for _tuned_turn in range({WARM_UP + count}): exec(_tuned_step, globals())\n"
        self.cluster.run(CellText(_text(self, change) + loop), label="tune", board=SilentBoard())
        self.present = setting
        self.steps += WARM_UP + count
        last = self._last_step
        if last - before < WARM_UP + count:
            raise TrainingEnded(
                f"The code trained {max(0, last - before)} steps of the model in {WARM_UP + count} turns: it must "
                "train one each time."
            )
        return self._times(last + 1 - count, last + 1)

    def settle(self, setting: Setting) -> bool:
        """See `LiveTrialRunner.settle`."""
        return apply_in_cell(self, setting) if self._changed else True


def _text(turns: TrialRunner, change: Mapping[str, Any]) -> str:
    own = turns.control.timeline.own_numbers(turns.reducer)
    return f"{APPLY_CHANGE.expression}({own}[rank], {dict(change)})\n"


def apply_in_cell(turns: TrialRunner, setting: Setting) -> bool:
    """Gives an idle model this setting, with a cell; does nothing without a cluster (its program has ended).

    Raises:
        CellError: a rank refuses it.
    """
    change = turns._change(setting)
    run = turns.control.owner.run
    if change and run is not None:
        try:
            run(CellText(_text(turns, change)), label="tune", board=SilentBoard())
        except CellError:
            turns.present = None
            raise
    turns.present = setting
    return True
