"""Opt-in looks at a model while it trains: gradients, and whether the replicas are still equal."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal

from ..core.model_state import ModelState
from . import inspection

if TYPE_CHECKING:
    from ...analysis.drift_report import DriftReport
    from .drift import DriftWatch
    from .gradient_norms import GradientWatch

__all__ = ["Watching", "drift_every", "follow", "gradients_every", "set_drift", "set_gradients"]

# Kept outside the models, so that copies and pickles of them are not watched.
_watches: weakref.WeakKeyDictionary[ModelState, GradientWatch] = weakref.WeakKeyDictionary()
_drift_watches: weakref.WeakKeyDictionary[ModelState, DriftWatch] = weakref.WeakKeyDictionary()


def gradients_every(model: ModelState) -> int:
    """Each how many-th step's gradients are watched; 0: none."""
    watch = _watches.get(model)
    return watch.every if watch is not None else 0


def drift_every(model: ModelState) -> int:
    """Before each how many-th step the replicas are compared; 0: none."""
    watch = _drift_watches.get(model)
    return watch.every if watch is not None else 0


def set_gradients(model: ModelState, every: int) -> None:
    """Watches each so many-th step from now on, or none for 0; all ranks between the same two backwards.

    What to do on NaN or Inf stays as it was asked for before.
    """
    watch = _watches.get(model)
    if every:
        nonfinite = watch.nonfinite if watch is not None else "warn"
        Watching.watch_gradients(model, every, nonfinite)  # type: ignore[arg-type]
    elif watch is not None:
        watch.remove()


def set_drift(model: ModelState, every: int) -> None:
    """Compares the replicas before each so many-th step from now on, or no more for 0; all ranks alike.

    What to do if they differ stays as it was asked for before.
    """
    watch = _drift_watches.get(model)
    if watch is not None:
        watch.remove()
    if every:
        action = watch.action if watch is not None else "warn"
        Watching.watch_drift(model, every, action)  # type: ignore[arg-type]


def follow(model: ModelState) -> None:
    """Goes on watching a model that has a new reducer."""
    if model in _watches:
        _watches[model].attach(model)


class Watching(ModelState):
    """The part of `DistributedDataParallel` that looks at values, not at times; none of it runs unasked."""

    def inspect_gradients(self) -> list[dict[str, Any]]:
        """Norm and checksum of each bucket's gradients, to be compared between ranks.

        Returns:
            For each bucket a dict: ``bucket`` (index), ``norm`` (Euclidean), ``checksum`` (64 bits of the
            gradients' bytes: different numbers on two ranks mean different gradients).

        Raises:
            RuntimeError: called during a backward.
        """
        return inspection.inspect_gradients(self)

    def check_drift(self) -> DriftReport:
        """Compares parameters and buffers of all ranks, see `ddp_lab.check_drift`. All ranks call it."""
        from .drift import check_drift

        return check_drift(self)

    def watch_drift(self, every: int = 100, action: Literal["warn", "raise"] = "warn") -> DriftWatch:
        """Compares parameters and buffers of all ranks before every so many synchronised forwards.

        Each time costs one pass over all parameters (0.3 ms for each MB on one CPU core) and 24 gathered bytes a rank;
        `DriftWatch.seconds` says what it was. All ranks call it alike.
        Under `join` nothing is compared.

        Args:
            every: how many steps apart.
            action: what to do if they differ, on all ranks.

        Raises:
            ValueError: an argument is none of these.
        """
        from .drift import DriftWatch

        _drift_watches[self] = watch = DriftWatch(self, every, action)
        return watch

    def watch_gradients(self, every: int = 1, nonfinite: Literal["warn", "raise"] = "warn") -> GradientWatch:
        """Measures the gradients' norms before and after averaging, and says where a NaN or Inf came from.

        For each bucket and rank; `Timeline.gradients` has them, and the gradient noise scale that follows. In a
        watched step each bucket is read twice more (together 0.12 ms for each MB on one CPU core), and its numbers are
        gathered at the end of the backward (0.1 ms and a small all-gather); `GradientWatch.seconds` says what it cost.
        All ranks call it alike, outside a backward. A second call replaces the first watch.

        Args:
            every: watch each so many-th step.
            nonfinite: on NaN or Inf, warn, or let the backward raise RuntimeError on all ranks, before the optimizer
                has used it.

        Raises:
            ValueError: an argument is none of these.
            RuntimeError: called during a backward.
        """
        from .gradient_norms import GradientWatch

        _watches[self] = watch = GradientWatch(self, every, nonfinite)
        return watch
