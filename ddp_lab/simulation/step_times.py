"""The parts of a step: of a recorded one, and of each prediction."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepTimes"]


@dataclass(frozen=True)
class StepTimes:
    """A step by parts; ``step_ns = forward_ns + compute_ns + exposed_ns + other_ns``.

    Attributes:
        step_ns: the step.
        forward_ns: the forward.
        compute_ns: the backward's own computation.
        hidden_ns: communication beside computation (not a part of the sum).
        exposed_ns: waiting for communication.
        other_ns: the rest: optimizer, input data.
    """

    step_ns: float
    forward_ns: float
    compute_ns: float
    hidden_ns: float
    exposed_ns: float
    other_ns: float

    @property
    def parts_ms(self) -> dict[str, float]:
        """Milliseconds by part; all but ``hidden`` add up to the step."""
        parts = ("forward", "compute", "hidden", "exposed", "other")
        return {part: getattr(self, f"{part}_ns") / 1e6 for part in parts}
