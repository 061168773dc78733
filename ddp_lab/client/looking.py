"""Looks at values of models that train, asked for by the client: watched gradients, compared replicas."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError
from .engine_messages import RankFunction
from .live_control import LiveControl
from .outputs import SilentBoard
from .timeline_records import DriftRecord

__all__ = ["Looking"]

_LOOK_SECONDS = 0.02
_CHECK_NOW = RankFunction("ddp_lab.parallel.live.looking", "check_now")


class Looking(LiveControl):
    """The part of `Cluster` that has ranks look at their gradients and parameters; none of it runs unasked."""

    if TYPE_CHECKING:

        def run(self, code: Any, *args: Any, **options: Any) -> Any: ...

    def watch_gradients(self, every: int = 10, reducer: int | None = None) -> None:
        """Watches the gradients of each so many-th step from one of the next steps on; works while a cell trains.

        `Timeline.gradients` and `Timeline.noise_scale` have what is seen, and the view ``dashboard("gradients")``. In a
        watched step each bucket is read twice more (0.12 ms for each MB on one CPU core) and a few numbers for each
        bucket are gathered.

        Args:
            every: how many steps apart; 0: no more.
            reducer: which model; None for the most recently active of those that exist.

        Raises:
            ClusterError: a rank refuses, or does not answer.
        """
        self._look(reducer, gradients=every)

    def watch_drift(self, every: int = 100, reducer: int | None = None) -> None:
        """Compares parameters and buffers of all ranks before each so many-th step; works while a cell trains.

        `Timeline.drift` has what is found. Each time costs one pass over all parameters (0.3 ms for each MB on one CPU
        core).

        Args:
            every: how many steps apart; 0: no more.
            reducer: which model; None for the most recently active of those that exist.

        Raises:
            ClusterError: a rank refuses, or does not answer.
        """
        self._look(reducer, drift=every)

    def check_drift(self, reducer: int | None = None, timeout: float = 30.0) -> DriftRecord:
        """Compares parameters and buffers of all ranks now: between two steps while they train, else at once.

        Args:
            reducer: which model; None for the most recently active of those that exist.
            timeout: seconds in which a model that trains must have made two steps.

        Raises:
            ClusterError: a rank refuses or does not answer, or no step came in time.
        """
        number = self._live_model(reducer)
        ranks = self._model_ranks(number)
        before = self.timeline.looks_arrived(number)
        deadline = time.monotonic() + timeout
        if self.busy_ranks() & set(ranks):
            self._look(number, check=True)
        else:
            own = {str(rank): of_rank for rank, of_rank in self.timeline.own_numbers(number).items()}
            self.run(_CHECK_NOW, own, ranks=ranks, label="check drift", board=SilentBoard())
        while time.monotonic() < deadline:
            if self.timeline.looks_arrived(number) > before:
                return self.timeline.drift_records(number)[-1]
            time.sleep(_LOOK_SECONDS)
        raise ClusterError("The model has not trained two steps in time: it is compared when it trains on.")

    def looks(self, reducer: int | None = None) -> dict[str, int]:
        """What is looked at: ``gradients`` and ``drift`` (each how many-th step; 0: none), ``pending`` requests."""
        number = self._live_model(reducer)
        first = self._model_ranks(number)[0]
        return {name: int(value) for name, value in self._live(number, [first], "looks")[first].items()}

    def _look(self, reducer: int | None, **wanted: Any) -> None:
        number = self._live_model(reducer)
        ranks = self._model_ranks(number)
        name = uuid.uuid4().hex
        # See [Note: a change while training runs] on the rank side for why rank 0 comes last.
        for some in (ranks[1:], ranks[:1]):
            self._live(number, some, "look", look=wanted, name=name)
