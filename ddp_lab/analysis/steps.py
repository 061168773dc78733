"""The times of the steps that all ranks have completed, side by side: what findings and comparisons start from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Steps"]

_Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """Host times in ns on one axis (device times where `on_device`), 0 where it has not happened.

    Attributes:
        ranks: the ranks, in the order of the first axis.
        step: shape ``[steps]``, ascending.
        forward_begin, forward_end, begin, finalize, end: shape ``[ranks, steps]``: of the last forward before the
            backward, of the backward, of its own computation, of the whole.
        gradients: shape ``[ranks, steps, parameters]``: when each gradient was accumulated.
        ready, launched, reduced: shape ``[ranks, steps, buckets]``.
        on_device: the host runs ahead of devices that compute; ready and launched are then when the device reached
            the launch of a bucket, and reduced when the device was done with it.
    """

    ranks: tuple[int, ...]
    step: _Times
    forward_begin: _Times
    forward_end: _Times
    begin: _Times
    finalize: _Times
    end: _Times
    gradients: _Times
    ready: _Times
    launched: _Times
    reduced: _Times
    on_device: bool

    def __len__(self) -> int:
        return len(self.step)

    @property
    def follows(self) -> npt.NDArray[np.bool_]:
        """Shape ``[steps]``: whether the step before is here as well."""
        return np.asarray(np.diff(self.step, prepend=-2) == 1)

    def forward_ns(self) -> npt.NDArray[np.float64]:
        """How long each forward took, shape ``[ranks, steps]``; NaN where unknown."""
        known = (self.forward_begin > 0) & (self.forward_end > 0)
        return np.where(known, (self.forward_end - self.forward_begin).astype(np.float64), np.nan)

    def step_ns(self) -> npt.NDArray[np.float64]:
        """From the end of the step before, shape ``[ranks, steps]``; NaN where that is unknown."""
        before = np.concatenate([np.zeros_like(self.end[:, :1]), self.end[:, :-1]], axis=1)
        return np.where(self.follows, (self.end - before).astype(np.float64), np.nan)

    def typical_ns(self) -> float:
        """Median time of a step; of a backward where no two steps follow each other."""
        whole = self.step_ns()
        if np.isfinite(whole).any():
            return float(np.nanmedian(whole))
        return float(np.median(self.end - self.begin)) if len(self) else 0.0

    def places(self) -> _Times:
        """Readiness by parameter, or on devices by bucket: shape ``[ranks, steps, places]``."""
        return self.launched if self.on_device else self.gradients
