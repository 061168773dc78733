"""Tuning: simulated candidates are A/B-tested live and the winner confirmed; else everything stays as it was.

The interconnect between the ranks, which the simulator needs to know, is measured on them.

Which settings are tried is [Note: which settings to try] in `ddp_lab.simulation.settings`, who wins is [Note: a race
and a confirmation] in `ddp_lab.simulation.candidate_selection`. This module runs the turns, and restores the user's
setting if it stops before a winner is certain: after an error, an interrupt, or the end of the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError
from ..output.board import SilentBoard
from ..protocol.entry_points import MEASURE_LINK
from ..protocol.messages import CellText, Ping
from ..simulation.calibration import Measured, anchored, calibrated
from ..simulation.candidate_selection import FinalTest, SuccessiveHalving
from ..simulation.link_model import LANES, CommModel
from ..simulation.settings import HOOKS, Setting, Tried, Tuned, candidates, spread
from ..simulation.simulator import simulate_many
from ..simulation.workload import Workload
from ..timeline.what_if import fit_link, workload
from .ab_trials import CellTrialRunner, LiveTrialRunner, TrainingEnded

if TYPE_CHECKING:
    from .ranks import Ranks
    from .training import TrainingControl


_CANDIDATES, _SECOND_THOUGHTS = 4, 2
_REFINED_AFTER = 2  # rounds
_RACE_SHARE = 0.6  # of the seconds
_FIRST_STEPS = 8
_REFUSED = "refused: "


def measure_communication(cluster: Ranks, sizes: Sequence[int] | None, repeats: int) -> CommModel:
    """See `Cluster.measure_communication`."""
    arguments = f"sizes={None if sizes is None else list(map(int, sizes))}, repeats={int(repeats)}, device=device"
    code = CellText(f"{MEASURE_LINK.expression}({arguments})")
    found: dict[int, Any] = cluster.run(code, label="measure the link", board=SilentBoard()).values
    measured = found[min(found)]
    points = [(size, ns, measured["ranks"]) for size, ns in measured["points"]]
    made = CommModel.fitted(points, lanes=LANES.get(measured["backend"], 1))
    return replace(made, launch_ns=measured["launch_ns"], sharing=measured["sharing"] if made.lanes > 1 else 1.0)


def tune(cluster: Ranks, step: str | None, *, reducer: int | None, steps: int | None, **options: Any) -> Tuned:
    """See `Cluster.tune`."""
    control = cluster.training
    if step is None:
        return tune_live(control, reducer, steps=steps, link=cluster.link, **options)
    if _recorded(control, reducer) < _FIRST_STEPS:
        cluster.run(
            CellText(f"_tuned_step = {step!r}\nfor _ in range({_FIRST_STEPS}): exec(_tuned_step, globals())"),
            label="tune",
            board=SilentBoard(),
        )
    turns = CellTrialRunner(cluster, control.model(reducer), steps, step)
    return Session(turns, cluster.link or cluster.measure_communication(), **options).run()


def tune_live(
    control: TrainingControl,
    reducer: int | None = None,
    *,
    steps: int | None = None,
    link: CommModel | None = None,
    first_seconds: float = 60.0,
    **options: Any,
) -> Tuned:
    """Tunes a model that other code trains meanwhile.

    Args:
        control: access to the ranks.
        reducer: which model; None for the most recently active of those that exist.
        steps: per turn, see `TrialRunner`.
        link: how long an all-reduce takes; None: fitted to recorded ones.
        first_seconds: how long to wait for the first steps.
        options: arguments of `Session`.

    Raises:
        ClusterError: the model is not training.
    """
    _wait_first_steps(control, reducer, first_seconds)
    turns = LiveTrialRunner(control, control.model(reducer), steps)
    return Session(turns, link, **options).run()


def _recorded(control: TrainingControl, reducer: int | None) -> int:
    known = [one for one in control.timeline.living() if reducer in (None, one.reducer)]
    return known[-1].last_step + 1 if known else 0


def _wait_first_steps(control: TrainingControl, reducer: int | None, seconds: float) -> None:
    deadline, seen = time.monotonic() + seconds, _recorded(control, reducer)
    wanted = max(_FIRST_STEPS, seen + 1)
    asked = time.monotonic() + 1.0
    while _recorded(control, reducer) < wanted:
        if time.monotonic() > asked:
            asked += 1.0
            answers = control.owner.wire.request(None, Ping(), 5.0)
            if not any(answer.cell is not None for answer in answers.values()):
                raise ClusterError(
                    "no model is training: start the training cell with `%%distributed --no-wait` and call tune() "
                    'while it runs, or pass the code of one training step: tune("step()")'
                )
        if time.monotonic() > deadline:
            raise ClusterError(f"timed out: the ranks did not train {wanted} steps in {seconds:.0f} s")
        time.sleep(0.02)


class Session:
    """One tuning, or one comparison of a given setting (the dashboard's *Run it*).

    Args:
        turns: how settings are tried.
        link: how long an all-reduce takes; None: fitted to recorded ones.
        lossy: whether to try comm hooks that compress gradients.
        seconds: time limit.
        apply: whether the model keeps the winner.
        tell: called with a line on each round.
    """

    def __init__(
        self,
        turns: LiveTrialRunner | CellTrialRunner,
        link: CommModel | None,
        *,
        lossy: bool = False,
        seconds: float = 300.0,
        apply: bool = True,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        if lossy and turns.hook is not None:
            raise ValueError(
                f"the model's comm hook ({turns.hook}) can't be restored after a trial: run tune() without lossy=True"
            )
        self.turns, self.link, self.apply = turns, link, apply
        self.tell: Callable[[str], object] = tell or (lambda line: None)
        self.hooks: tuple[str | None, ...] = (None, *HOOKS) if lossy else (None,)
        self.began, self.seconds = time.monotonic(), seconds
        self.settings = [turns.users]
        self.refused: dict[int, str] = {}
        self.workload: Workload | None = None
        self.race = SuccessiveHalving(1)
        self.confirmation: FinalTest | None = None
        self.winner = 0

    def run(self) -> Tuned:
        """Races, confirms, and leaves the model with the winner or its former setting."""
        ended, left = "", self.turns.users
        try:
            if len(self.turns.ranks) > 1:
                self._prepare()
                self._race()
                if self.winner != 0:
                    self._confirm(FinalTest())
            else:
                ended = "The model trains on one rank, so nothing is communicated."
            if self.confirmation is not None and self.confirmation.clear and self.apply:
                left = self.settings[self.winner]
        except TrainingEnded as error:
            ended = str(error)
        finally:
            self.turns.settle(left)
        return self._tuned(ended, left)

    def compare(self, setting: Setting, rounds: int) -> FinalTest:
        """Alternates a setting with the user's, which the model then has again; raises `TrainingEnded`."""
        self.settings, self.winner = [self.turns.users, setting], 1
        try:
            return self._confirm(FinalTest(most_rounds=rounds, fewest_rounds=rounds))
        finally:
            self.turns.settle(self.turns.users)

    # ---- what to try

    def _prepare(self) -> None:
        """Candidates by simulation; over the whole range of bucket sizes if nothing can be simulated."""
        timeline, reducer = self.turns.control.timeline, self.turns.reducer
        self.workload = workload(timeline, reducer)
        try:
            self.link = self.link or fit_link(timeline, reducer)
            self.workload, self.link = anchored(self.workload, self.link)
        except ValueError:
            self.link = None
        self._enter(self._candidates(_CANDIDATES))

    def _candidates(self, count: int) -> list[Setting]:
        assert self.workload is not None
        if self.link is None:
            return spread(self.workload, self.turns.users, count)
        found = candidates(self.workload, self.link, self.turns.users, count, (None,))
        if len(self.hooks) > 1:
            # One setting of each hook, with suitable bucket sizes.
            for hook in self.hooks[1:]:
                found += candidates(self.workload, self.link, self.turns.users, 1, (hook,))
        return [setting for setting, _ in found]

    def _enter(self, settings: Iterable[Setting]) -> None:
        for setting in settings:
            if any(setting == other for other in self.settings):
                continue
            self.settings.append(setting)
            number = self.race.enter()
            refusal = self.turns.refusal(setting)
            if refusal:
                self.refused[number] = _REFUSED + refusal
                self.race.leave(number)

    def _think_again(self) -> None:
        """More candidates, by a simulation that the turns so far have calibrated."""
        if self.workload is None or self.link is None:
            return
        known = [
            (self.settings[number], typical)
            for number in range(len(self.settings))
            if (typical := self.race.typical(number)) is not None and self.settings[number].hook is None
        ]
        configurations = [setting.configuration for setting, _ in known]
        measured = Measured(self.workload, configurations, [1e6 * typical for _, typical in known])
        self.link = calibrated([measured], self.link, rounds=3)
        self.workload, self.link = anchored(self.workload, self.link)
        ranked = [one for one in self._candidates(_CANDIDATES) if one not in self.settings]
        predicted = self._predicted([*ranked, self.settings[self.race.best]])
        better = [one for one, ns in zip(ranked, predicted, strict=False) if ns < 1.01 * predicted[-1]]
        self._enter(better[:_SECOND_THOUGHTS])

    def _predicted(self, settings: list[Setting]) -> list[float]:
        assert self.workload is not None
        assert self.link is not None
        made = simulate_many(self.workload, [one.configuration for one in settings], self.link).step_ns
        return [float(one) for one in made]

    # ---- the winner

    def _race(self) -> None:
        while not self.race.over and not self._late(_RACE_SHARE):
            if self.race.rounds == _REFINED_AFTER:
                self._think_again()
            if len(self.race.alive) < 2:
                break
            self.race.add({number: self._take(number) for number in self.race.order()})
            best = self.race.best
            self.tell(
                f"round {self.race.rounds}: {len(self.race.alive)} settings, the fastest is "
                f"{self.settings[best]} ({self.race.typical(best):.2f} ms)"
            )
        self.winner = self.race.best

    def _confirm(self, made: FinalTest) -> FinalTest:
        self.confirmation, users, winner = made, self.settings[0], self.settings[self.winner]
        while not made.over and not self._late(1.0):
            order = (self.winner, 0) if made.winner_first else (0, self.winner)
            turns = {number: self._take(number) for number in order}
            made.add(turns[0], turns[self.winner])
            saved = made.gain.percent
            by = f"saves {saved:.1f} %" if saved >= 0 else f"costs {-saved:.1f} %"
            self.tell(f"{winner} against {users}, after round {made.rounds}: {by}")
        return made

    def _take(self, number: int) -> Any:
        return self.turns.take(self.settings[number])

    def _late(self, share: float) -> bool:
        return time.monotonic() - self.began > share * self.seconds

    # ---- the result

    def _tuned(self, ended: str, left: Setting) -> Tuned:
        confirmed = self.confirmation
        clear = confirmed is not None and confirmed.clear and not ended
        if not ended and not clear and self._late(1.0):
            ended = f"The time limit of {self.seconds:.0f} s was reached."
        return Tuned(
            users=self.turns.users,
            best=self.settings[self.winner] if clear else None,
            applied=clear and left != self.turns.users,
            gain=confirmed.gain if confirmed is not None and confirmed.rounds >= confirmed.fewest_rounds else None,
            tried=self._tried(),
            steps=self.turns.steps,
            seconds=time.monotonic() - self.began,
            ended=ended,
            views_percent=self._views(),
        )

    def _tried(self) -> list[Tried]:
        simulated = self.workload is not None and self.link is not None
        predicted = [ns / 1e6 for ns in self._predicted(self.settings)] if simulated else None
        made = [
            Tried(
                setting,
                None if predicted is None else predicted[number],
                self.race.typical(number),
                self.race.taken(number),
                self.refused.get(number, "yours" if number == 0 else ""),
            )
            for number, setting in enumerate(self.settings)
        ]
        return sorted(made, key=lambda one: one.measured_ms if one.measured_ms is not None else float("inf"))

    def _views(self) -> float | None:
        """The saving of bucket views: gradients that are already in the buffers are not written back."""
        if self.workload is None or self.link is None or self.turns.views:
            return None
        configuration = self.settings[self.winner].configuration
        without = replace(self.workload, write_back_ns=(self.workload.write_back_ns[0], 0.0))
        before, after = (
            float(simulate_many(one, [configuration], self.link).step_ns[0]) for one in (self.workload, without)
        )
        return 100 * (1 - after / before)
