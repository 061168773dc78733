"""What a figure's measurement is asked for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PARTS", "Series", "Settings", "Variant"]

PARTS = ("forward", "backward", "communication", "optimizer")
"""Of a step, in the order in which they are stacked; "communication" is what no other part hides."""


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        models: of `ddp_lab.bench.measuring.workloads.PAPER_MODELS`.
        backends: of the process groups. Figure 12 uses the first one.
        seconds: for each model and variant (figure 2: each size of a call).
        parameters: figure 2: how many float32 are all-reduced.
        backwards: figure 11: of each training.
    """

    models: tuple[str, ...] = ("resnet", "transformer")
    backends: tuple[str, ...] = ("gloo", "shm")
    seconds: float = 4.0
    parameters: int = 60_000_000
    backwards: int = 320


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        backend: of the process group.
        cap_mb: size of the buckets, MiB.
        groups: process groups that take turns.
        world: how many ranks train together; the others do the same beside them. 0: all.
        every: gradients are averaged once in so many backwards.
        overlap: False: all buckets are launched after the backward.
        alone: no communication at all (``no_sync``).
    """

    backend: str
    cap_mb: float = 25.0
    groups: int = 1
    world: int = 0
    every: int = 1
    overlap: bool = True
    alone: bool = False


@dataclass(frozen=True)
class Series:
    """Variants that take turns, and the name of the one that the others are compared with."""

    variants: dict[str, Variant]
    reference: str
