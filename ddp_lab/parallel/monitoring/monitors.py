"""Monitors a model's values while it trains: its gradients, and whether the replicas are still equal."""

from __future__ import annotations

import weakref
from typing import Literal

from ...protocol.messages import MonitoringRequest
from ..core import process_groups
from ..core.synchronizer import GradientSynchronizer
from .accumulation import AccumulationWatch
from .drift import DriftWatch, check_replicas
from .gradient_norms import GradientWatch

__all__ = ["Monitors"]


class Monitors:
    """The monitors of one model; none runs unless requested, and a copy of the model has none.

    Attributes:
        gradients, drift: the monitors; None if not requested.
    """

    def __init__(self, sync: GradientSynchronizer) -> None:
        self._sync = weakref.ref(sync)
        self.gradients: GradientWatch | None = None
        self.drift: DriftWatch | None = None
        self._accumulation = AccumulationWatch(sync, lambda sync: (sync.reducer.step(), sync.model_id))
        sync.on_new_reducer.append(self._follow)

    def _follow(self, sync: GradientSynchronizer) -> None:
        if not sync.in_python:  # compiled autograd would make a graph of its own of the hook
            self._accumulation.follow(sync.trained.tensors)
        if self.gradients is not None:
            self.gradients.attach(sync)

    def watch_gradients(self, every: int, nonfinite: Literal["warn", "raise"]) -> GradientWatch:
        """See `DistributedDataParallel.watch_gradients`."""
        self.gradients = GradientWatch(self._model(), every, nonfinite)
        return self.gradients

    def watch_drift(self, every: int, action: Literal["warn", "raise"]) -> DriftWatch:
        """See `DistributedDataParallel.watch_drift`."""
        self.drift = DriftWatch(every, action)
        return self.drift

    @property
    def gradients_every(self) -> int:
        """Interval in steps of monitoring gradients; 0: off."""
        return self.gradients.every if self.gradients is not None else 0

    @property
    def drift_every(self) -> int:
        """Interval in steps of comparing replicas; 0: off."""
        return self.drift.every if self.drift is not None else 0

    def set_gradients(self, every: int) -> None:
        """Sets the interval in steps of monitoring gradients, 0: off; on all ranks between the same two backwards.

        The reaction to NaN or Inf stays as requested before.
        """
        watch = self.gradients
        if every:
            self.watch_gradients(every, watch.nonfinite if watch is not None else "warn")
        elif watch is not None:
            watch.remove()

    def set_drift(self, every: int) -> None:
        """Sets the interval in steps of comparing replicas, 0: off; the same on all ranks.

        The reaction to a difference stays as requested before.
        """
        watch = self.drift
        if watch is not None:
            watch.remove()
        if every:
            self.watch_drift(every, watch.action if watch is not None else "warn")

    def look(self, wanted: MonitoringRequest) -> None:
        """Carries out a request while training runs; on all ranks between the same two backwards."""
        if wanted.gradients is not None:
            self.set_gradients(wanted.gradients)
        if wanted.drift is not None:
            self.set_drift(wanted.drift)
        if wanted.check:
            check_replicas(self._model())

    def settle(self) -> None:
        """With a new group: makes all ranks monitor what some of them do. All ranks call it."""
        sync = self._model()
        mine = [self.gradients_every, self.drift_every]
        gradients, drift = process_groups.maximum(mine, sync.group, sync.device)
        if gradients != mine[0]:
            self.set_gradients(gradients)
        if drift != mine[1]:
            self.set_drift(drift)

    def _model(self) -> GradientSynchronizer:
        sync = self._sync()
        assert sync is not None  # the caller has the model
        return sync
