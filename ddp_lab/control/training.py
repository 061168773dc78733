"""The client's actions on training models: reconfigure them, inject faults, pause and step through.

All of them use the control channel and work while a cell runs; the rank side is `ddp_lab.parallel.live`. If no model
is given, they apply to the most recently active one that the ranks still have.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..analysis.comparison import BeforeAfter, before_after
from ..errors import ClusterError
from ..faults import Fault
from ..output.board import SilentBoard
from ..protocol import messages
from ..protocol.entry_points import CHECK_DRIFT
from ..protocol.messages import ChangeState, ModelRequest
from ..timeline.changes import last_change
from ..timeline.records import DriftRecord
from ..timeline.steady_steps import ANALYSED_STEPS
from .records import Reconfigured, StepState

if TYPE_CHECKING:
    from ..protocol.messages import Replies
    from ..timeline.timeline import Timeline
    from .wire import Wire


_R = TypeVar("_R")
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.02


class Owner(Protocol):
    """The owner of the ranks: a cluster, or a program that `ddp-lab tune` runs."""

    timeline: Timeline

    @property
    def wire(self) -> Wire:
        """To the ranks."""

    @property
    def run(self) -> Callable[..., Any] | None:
        """Runs a cell; None: the ranks run a program."""

    def busy_ranks(self) -> set[int]:
        """Those that run a cell."""


class TrainingControl:
    """Changes models while they train, and monitors their gradients and parameters.

    It has no state of its own: the state is in the ranks, and the timeline holds what they report.

    Args:
        owner: the owner of the ranks.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    @property
    def timeline(self) -> Timeline:
        """Where the models' steps arrive."""
        return self.owner.timeline

    # -- buckets and hooks

    def reconfigure(
        self,
        model: int | None = None,
        *,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        order: str | Sequence[str] | None = None,
        comm_hook: str | None = None,
        timeout: float = 30.0,
    ) -> Reconfigured:
        """Changes a model's buckets, their order or its comm hook, on all its ranks between the same two steps.

        Works while a cell trains (started with ``wait=False``, or from another thread), or before such a cell.

        Args:
            model: which model; None for the most recently active of those that exist.
            bucket_cap_mb: size limit of all buckets in MiB; of all but the first if `first_bucket_mb` is given.
            first_bucket_mb: size limit of the bucket that is launched first.
            bucket_cap_mb_list: size limits in the order of launch, the last one repeats; excludes the other two.
            order: ``"ready"`` (as the gradients became ready last), ``"registration"``, ``"reversed"``, or the
                qualified names of all trained parameters.
            comm_hook: ``"none"``, ``"fp16"``, ``"bf16"``, ``"powersgd"``, or a name that the ranks have given to a hook
                with `DistributedDataParallel.register_named_comm_hook`.
            timeout: seconds within which the model must train two steps.

        Raises:
            ClusterError: the ranks refuse (the message says why), or the model did not train two steps within
                `timeout`: then nothing is changed, unless the message says otherwise.
        """
        change = messages.Change(
            bucket_cap_mb,
            first_bucket_mb,
            None if bucket_cap_mb_list is None else list(bucket_cap_mb_list),
            order if order is None or isinstance(order, str) else list(order),
            comm_hook,
        )
        return self.apply(self.model(model), change, timeout)

    def apply(
        self, number: int, asked: messages.Change, timeout: float, trains: Callable[[], bool] = lambda: True
    ) -> Reconfigured:
        """See `reconfigure`; also gives up when `trains()`, which is called repeatedly, returns False."""
        ranks = list(self.timeline.assignment(number)["group_ranks"])
        name = uuid.uuid4().hex
        self.ask(number, ranks, messages.CheckChange(asked))
        # See [Note: a change while training runs] on the rank side for why rank 0 comes last.
        try:
            self.ask(number, ranks[1:], messages.PrepareChange(name, asked))
            self.ask(number, ranks[:1], messages.PrepareChange(name, asked))
            done = self._wait_applied(number, ranks, name, time.monotonic() + timeout, trains)
        except ClusterError as error:
            if not self._withdraw(number, ranks, name):
                raise ClusterError(
                    f"{error} The change is already decided: the ranks apply it when they train again."
                ) from error
            raise
        except KeyboardInterrupt:
            self._withdraw(number, ranks, name)
            raise
        first = done[ranks[0]]
        self._wait_described(number, first.generation)
        given = {name: value for name, value in asdict(asked).items() if value is not None}
        return Reconfigured(number, first.step, first.generation, given)

    def _wait_applied(
        self, reducer: int, ranks: list[int], name: str, deadline: float, trains: Callable[[], bool]
    ) -> Mapping[int, ChangeState]:
        while True:
            found = self.ask(reducer, ranks, messages.GetChange(name))
            states = {answer.state for answer in found.values()}
            if states == {"applied"}:
                after = {rank: answer.after for rank, answer in found.items()}
                if len(set(after.values())) > 1:
                    words = f"The ranks applied the change after different backwards ({after})"
                    raise ClusterError(f"{words}: make sure that all ranks train the same steps.")
                return found
            if "dropped" in states:
                raise ClusterError("The process groups were rebuilt meanwhile, so the change was dropped: try again.")
            if time.monotonic() > deadline:
                raise ClusterError("Timed out waiting for two training steps.")
            if not trains():
                raise ClusterError("The training has ended.")
            time.sleep(_LOOK_SECONDS)

    def _wait_described(self, reducer: int, generation: int) -> None:
        """Waits until the timeline knows the new buckets, which the ranks send over another channel."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            if any(one.reducer == reducer and generation in one.generations for one in self.timeline.reducers()):
                return
            time.sleep(_LOOK_SECONDS)

    def _withdraw(self, reducer: int, ranks: list[int], name: str) -> bool:
        """Withdraws a change, first on the rank that decides; returns False if it is too late."""
        for some in (ranks[:1], ranks[1:]):
            answers = self.answers(reducer, some, messages.WithdrawChange(name))
            if any(not answer.withdrawn for answer in answers.values()):
                return False
        return True

    def before_after(
        self,
        model: int | None = None,
        *,
        what: str = "step_ms",
        last_steps: int = ANALYSED_STEPS,
        generation: int | None = None,
    ) -> BeforeAfter:
        """Compares the steps before and after the last change of a model's buckets or hook.

        Args:
            model: which model; None for the most recently active.
            what: a column of `Timeline.steps` in ms; averaged over the ranks.
            last_steps: at most this many of the newest steps on each side. Steps beyond the beginning or end of an
                injected fault count on neither side.
            generation: version of a bucket layout (`Reconfigured.generation`): compares around the change that led to
                it; None for the last change.

        Raises:
            ValueError: there was no change, or a side has fewer than 10 steps.
        """
        known = [one.reducer for one in self.timeline.reducers() if model in (None, one.reducer)]
        number = known[-1] if known else self.model(model)  # which raises if there is none
        return before_after(*last_change(self.timeline, number, what, last_steps, generation).times)

    # -- fault injection

    def inject(self, fault: Fault, model: int | None = None) -> int:
        """Injects a fault on its rank from the next forward on, while training runs; see `ddp_lab.faults`.

        Args:
            fault: e.g. ``ddp_lab.faults.SlowLayer(rank=1, parameter="0.weight", seconds=0.02)``.
            model: which model; None for the most recently active of those that exist.

        Returns:
            A number, for `clear_faults`.

        Raises:
            ValueError: the fault is invalid.
            ClusterError: its rank refuses it, or does not respond.
        """
        fault.check()
        answer = self.ask(self.model(model), [fault.rank], messages.InjectFault(fault))
        return int(answer[fault.rank].number or 0)

    def faults(self) -> dict[int, list[dict[str, Any]]]:
        """rank -> its faults: the fields of each, its ``number``, and whether it has ``begun``."""
        answers = self.owner.wire.request(None, messages.GetFaults(), _ANSWER_SECONDS)
        return {rank: [dict(one) for one in answer.faults] for rank, answer in sorted(answers.items()) if answer.faults}

    def clear_faults(self, rank: int | None = None, number: int | None = None) -> None:
        """Ends faults before the next forward: one of a rank, all of a rank, or all.

        Args:
            rank: where; None for all ranks.
            number: the fault's number, as `inject` returned it; None for all of the rank.
        """
        if number is not None and rank is None:
            raise ValueError("fault numbers are per rank: pass rank= as well")
        ranks = None if rank is None else [rank]
        self.owner.wire.request(ranks, messages.ClearFaults(number), _ANSWER_SECONDS)

    # -- pauses

    def breakpoints(
        self,
        *points: str,
        ranks: Iterable[int] | None = None,
        parameters: Sequence[str] = (),
        buckets: Sequence[int] = (),
        model: int | None = None,
    ) -> None:
        """Pauses a model's backwards at these points from now on; replaces earlier breakpoints on these ranks.

        The other ranks wait in their collectives meanwhile; group timeouts do not expire. See `step_state`.

        Args:
            points: ``"gradient_ready"``, ``"bucket_ready"``, ``"launched"``, ``"reduced"``; none: no breakpoints on
                these ranks.
            ranks: the ranks that pause; None for all of the model.
            parameters: only at the gradients of these (qualified names); empty: at all.
            buckets: at the other points, only for these; empty: for all.
            model: which model; None for the most recently active of those that exist.

        Raises:
            ClusterError: a rank refuses it, or does not respond.
        """
        number = self.model(model)
        chosen = self.ranks_of(number) if ranks is None else sorted(set(ranks))
        self.owner.wire.request(None, messages.HoldTimeouts(), _ANSWER_SECONDS)
        self.ask(number, chosen, messages.SetBreakpoints(points, parameters, buckets))

    def step_state(self, model: int | None = None) -> dict[int, StepState]:
        """rank -> the state of its backward and of each bucket now; also while it is paused."""
        number = self.model(model)
        answers = self.ask(number, self.ranks_of(number), messages.GetStage())
        return {rank: StepState.of(rank, answer) for rank, answer in sorted(answers.items())}

    def wait_paused(
        self, ranks: Iterable[int] | None = None, timeout: float = 10.0, model: int | None = None
    ) -> dict[int, StepState]:
        """Waits until these ranks are paused (None: any rank), for `timeout` seconds at most; returns `step_state`."""
        deadline = time.monotonic() + timeout
        while True:
            states = self.step_state(model)
            paused = {rank for rank, state in states.items() if state.paused}
            if (paused if ranks is None else set(ranks) <= paused) or time.monotonic() > deadline:
                return states
            time.sleep(_LOOK_SECONDS)

    def next_event(
        self, ranks: Iterable[int] | None = None, timeout: float = 10.0, model: int | None = None
    ) -> dict[int, StepState]:
        """Lets paused ranks continue to the next event, and waits for it; returns `step_state`.

        Args:
            ranks: which ranks; None for all that are paused. The others stay where they are.
            timeout: seconds to wait: a rank that depends on a paused one can't reach its next event.
            model: which model; None for the most recently active of those that exist.
        """
        return self._go_on("event", ranks, timeout, model)

    def next_bucket(
        self, ranks: Iterable[int] | None = None, timeout: float = 10.0, model: int | None = None
    ) -> dict[int, StepState]:
        """Lets paused ranks continue until their next bucket is ready; otherwise like `next_event`."""
        return self._go_on("bucket", ranks, timeout, model)

    def next_breakpoint(
        self, ranks: Iterable[int] | None = None, timeout: float = 10.0, model: int | None = None
    ) -> dict[int, StepState]:
        """Lets paused ranks continue to the next breakpoint; otherwise like `next_event`."""
        return self._go_on("breakpoint", ranks, timeout, model)

    def resume(self) -> None:
        """Removes all breakpoints: paused ranks continue, and train at full speed."""
        self.owner.wire.request(None, messages.Resume(), _ANSWER_SECONDS)

    def _go_on(
        self, until: str, ranks: Iterable[int] | None, timeout: float, reducer: int | None
    ) -> dict[int, StepState]:
        number = self.model(reducer)
        states = self.step_state(number)
        paused = [rank for rank, state in states.items() if state.paused and (ranks is None or rank in set(ranks))]
        if not paused:
            return states
        self.ask(number, paused, messages.Continue(until))
        return self.wait_paused(paused, timeout, number)

    # -- monitoring; none of it runs unless requested

    def watch_gradients(self, every: int = 10, model: int | None = None) -> None:
        """Monitors the gradients of every `every`-th step, starting within the next steps; works while a cell trains.

        `Timeline.gradients`, `Timeline.noise_scale` and the view ``dashboard("gradients")`` show the results. In a
        monitored step each bucket is read twice more (0.12 ms for each MB on one CPU core) and a few numbers for each
        bucket are gathered.

        Args:
            every: interval in steps; 0 stops it.
            model: which model; None for the most recently active of those that exist.

        Raises:
            ClusterError: a rank refuses, or does not respond.
        """
        self._look(model, messages.MonitoringRequest(gradients=every))

    def watch_drift(self, every: int = 100, model: int | None = None) -> None:
        """Compares parameters and buffers of all ranks before every `every`-th step; works while a cell trains.

        `Timeline.drift` has the results. Each comparison costs one pass over all parameters (0.3 ms for each MB on one
        CPU core).

        Args:
            every: interval in steps; 0 stops it.
            model: which model; None for the most recently active of those that exist.

        Raises:
            ClusterError: a rank refuses, or does not respond.
        """
        self._look(model, messages.MonitoringRequest(drift=every))

    def check_drift(self, model: int | None = None, timeout: float = 30.0) -> DriftRecord:
        """Compares parameters and buffers of all ranks now: between two steps while they train, else at once.

        Args:
            model: which model; None for the most recently active of those that exist.
            timeout: seconds within which a training model must train two steps.

        Raises:
            ClusterError: a rank refuses or does not respond, or the timeout expired.
        """
        number = self.model(model)
        ranks = self.ranks_of(number)
        before = self.timeline.inspection_count(number)
        deadline = time.monotonic() + timeout
        if self.owner.run is None or self.owner.busy_ranks() & set(ranks):
            self._look(number, messages.MonitoringRequest(check=True))
        else:
            own = {str(rank): of_rank for rank, of_rank in self.timeline.own_numbers(number).items()}
            self.owner.run(CHECK_DRIFT, own, ranks=ranks, label="check drift", board=SilentBoard())
        while time.monotonic() < deadline:
            if self.timeline.inspection_count(number) > before:
                return self.timeline.drift_records(number)[-1]
            time.sleep(_LOOK_SECONDS)
        raise ClusterError(
            "Timed out waiting for two training steps: the comparison is made when the model trains again."
        )

    def monitoring(self, model: int | None = None) -> dict[str, int]:
        """The active monitoring: ``gradients`` and ``drift`` (interval in steps; 0: off), ``pending`` requests."""
        number = self.model(model)
        first = self.ranks_of(number)[0]
        return asdict(self.ask(number, [first], messages.GetMonitoring())[first])

    def _look(self, reducer: int | None, wanted: messages.MonitoringRequest) -> None:
        number = self.model(reducer)
        ranks = self.ranks_of(number)
        name = uuid.uuid4().hex
        # See [Note: a change while training runs] on the rank side for why rank 0 comes last.
        for some in (ranks[1:], ranks[:1]):
            self.ask(number, some, messages.PrepareMonitoring(name, wanted))

    # -- the ranks

    def model(self, model: int | None) -> int:
        """The requested model's number, without asking ranks.

        See [Note: models that are gone] in `timeline.model_registry`.
        """
        living = [one.reducer for one in self.timeline.living()]
        if model in living or (model is None and living):
            return living[-1] if model is None else model
        known = [one.reducer for one in self.timeline.reducers()]
        if model is not None and model not in known:
            raise ValueError(f"the timeline has no model {model}: choose one of {sorted(living)}")
        if not known:
            raise ClusterError("no rank has a model yet: wrap one in ddp_lab.DistributedDataParallel")
        which = "no rank has a model any more" if model is None else f"model {model} no longer exists"
        why = "no variable of a cell refers to it, or one of its ranks was restarted"
        wrap = "wrap one in ddp_lab.DistributedDataParallel, and keep it in a variable"
        remedy = f"choose one of {sorted(living)}" if living else wrap
        raise ClusterError(f"{which} ({why}): {remedy}")

    def ranks_of(self, model: int) -> list[int]:
        """The ranks that train a model."""
        return list(self.timeline.assignment(model)["group_ranks"])

    def answers(self, model: int, ranks: Sequence[int], request: ModelRequest[_R]) -> Replies[_R]:
        """The answers of these ranks, of those that answer, to a request about this model."""
        request = replace(request, reducers=dict(self.timeline.own_numbers(model)))
        return self.owner.wire.request(ranks, request, _ANSWER_SECONDS)

    def ask(self, model: int, ranks: Sequence[int], request: ModelRequest[_R]) -> Replies[_R]:
        """Like `answers`; raises `ClusterError` if one does not answer, or answers with an error."""
        answers = self.answers(model, ranks, request)
        for rank in sorted(ranks):
            if rank in answers.errors:
                raise ClusterError(f"rank {rank} refused: {answers.errors[rank]}")
            if rank not in answers:
                raise ClusterError(
                    f"rank {rank} does not respond: check with `status()` whether its process is still running"
                )
        return answers
