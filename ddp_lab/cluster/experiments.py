"""What a cluster measures and predicts: its interconnect, a step with other settings, and which settings are faster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..control.ranks import Ranks

if TYPE_CHECKING:
    from ..simulation.link_model import CommModel
    from ..simulation.settings import Tuned
    from ..timeline.timeline import Timeline
    from ..timeline.what_if import WhatIf


class Experiments:
    """Experiments on one cluster.

    Args:
        cluster: the cluster.

    Attributes:
        link: the `CommModel` that `measure_communication` has fitted; None before.
    """

    def __init__(self, cluster: Ranks) -> None:
        self.link: CommModel | None = None
        self._cluster = cluster

    def measure_communication(self, sizes: Sequence[int] | None = None, repeats: int = 7) -> CommModel:
        """Measures all-reduces on the ranks (about a second on 2 CPU ranks) and fits a model of the interconnect.

        Args:
            sizes: bytes of the buffers; None: 1 KiB to 16 MiB.
            repeats: number of measurements of each size.
        """
        from ..control.tuning import measure_communication

        self.link = measure_communication(self._cluster, sizes, repeats)
        return self.link

    def simulate(self, /, link: CommModel | None = None, *, model: int | None = None, **what: Any) -> WhatIf[Timeline]:
        """Predicts the step of the model that trained last; see `Timeline.simulate`.

        Args:
            link: how long an all-reduce takes; None: as measured by `measure_communication`, which is called if it was
                not.
            model: which model; None for the most recently active.
            what: see `Timeline.simulate`.
        """
        from ..timeline.what_if import what_if

        if link is not None:
            return what_if(self._cluster.timeline, link, model=model, **what)
        own = self.link or self.measure_communication()
        return what_if(self._cluster.timeline, own, recorded_link=own, model=model, **what)

    def tune(
        self,
        step: str | None = None,
        *,
        model: int | None = None,
        lossy: bool = False,
        seconds: float = 300.0,
        steps: int | None = None,
        apply: bool = True,
        tell: Callable[[str], object] | None = None,
    ) -> Tuned:
        """Searches for bucket size limits (and comm hooks) with which the model trains faster, and applies the best.

        Candidates come from the simulator. They are A/B-tested against the current setting in alternating blocks of
        training steps. The best one is applied if it is faster by its 95 % bound, else nothing is changed. After an
        error, an interrupt, or if training ends too early, the model's original setting is restored.

        The steps are either those of a cell that trains meanwhile (``%%distributed --no-wait``), or tune runs `step`
        itself. Both are ordinary training steps and change the weights.

        Args:
            step: the code of one training step on each rank, such as ``"train_step()"``; None: a cell trains.
            model: which model; None for the most recently active of those that exist.
            lossy: whether to try also comm hooks that round gradients to 16 bits.
            seconds: time limit.
            steps: training steps per block; None: about 0.3 s of them.
            apply: False: the model keeps its setting; the result says what is faster.
            tell: called with a line on each round; None: the lines are printed to stderr.

        Returns:
            The result; printed, it shows what to write into the program.

        Raises:
            ClusterError: no model is training, or the ranks don't respond.
            CellError: `step` failed.

        Example:
            >>> lab.tune("step()")  # where a cell has defined model and step
        """
        from ..control import tuning

        return tuning.tune(
            self._cluster,
            step,
            reducer=model,
            steps=steps,
            lossy=lossy,
            seconds=seconds,
            apply=apply,
            tell=tell or (lambda line: print(line, file=sys.stderr)),
        )
