"""What a cluster predicts and tries: link, what-if questions, tuning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from .live_control import LiveControl

if TYPE_CHECKING:
    from ..insight.link_model import LinkModel
    from ..insight.tuned import Tuned
    from .cluster import Cluster
    from .what_if import WhatIf

__all__ = ["Predictions"]


class Predictions(LiveControl):
    """The part of `Cluster` that predicts steps, and looks for faster ones."""

    _link: LinkModel | None

    def measure_link(self, sizes: Sequence[int] | None = None, repeats: int = 7) -> LinkModel:
        """Measures all-reduces on the ranks (about a second on 2 CPU ranks) and fits a model of the link to them.

        Args:
            sizes: bytes of the buffers; None: 1 KiB to 16 MiB.
            repeats: measurements of each size.
        """
        from .what_if import measure_link

        self._link = measure_link(cast("Cluster", self), sizes, repeats)
        return self._link

    def simulate(self, link: LinkModel | None = None, **what: Any) -> WhatIf:
        """Predicts the step of the model that trained last, see `Timeline.simulate`.

        Args:
            link: how long an all-reduce takes; None: as measured on the ranks, now if `measure_link` was not called.
            what: see `Timeline.simulate`.
        """
        from .what_if import what_if

        own = link or self._link or self.measure_link()
        return what_if(self.timeline, own, recorded_link=None if link is not None else own, **what)

    def tune(
        self,
        step: str | None = None,
        *,
        reducer: int | None = None,
        lossy: bool = False,
        seconds: float = 300.0,
        steps: int | None = None,
        apply: bool = True,
        tell: Callable[[str], object] | None = None,
    ) -> Tuned:
        """Looks for bucket caps (and comm hooks) with which the model trains faster, and gives it those.

        Candidates come from the simulator. They and what the model has take turns of some training steps each; the
        best one is taken if its 95 % bound leaves no doubt that it is faster, else nothing is changed. After an error,
        an interrupt, or when training ends too early, the model has what it had.

        Either the steps are those of a cell that trains meanwhile (``%%distributed --no-wait``), or `step` says what
        one training step is and tune trains them itself; both are steps like others, and move the weights.

        Args:
            step: the code of one training step on each rank, such as ``"train_step()"``; None: a cell trains.
            reducer: which model; None for the most recently active of those that exist.
            lossy: try comm hooks, too, that round gradients to 16 bits.
            seconds: how long it may take.
            steps: of a turn; None: about 0.3 s of them.
            apply: False: the model keeps what it has; the result says what is faster.
            tell: is called with a line on each round; None: prints them to stderr.

        Returns:
            What was found; printed, it says what to write into the program.

        Raises:
            ClusterError: nothing trains, or the ranks don't answer.
            CellError: `step` failed.

        Example:
            lab.tune("step()")          # where a cell has defined model and step
        """
        from . import tune

        return tune.tune(
            cast("Cluster", self),
            step,
            reducer=reducer,
            steps=steps,
            lossy=lossy,
            seconds=seconds,
            apply=apply,
            tell=tell or (lambda line: print(line, file=sys.stderr)),
        )
