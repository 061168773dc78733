"""Settings of a figure's measurement, and for figures about training steps the variants that alternate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["EVERY", "GROUPS", "PARTS", "SERIES", "Series", "Settings", "Variant", "series"]

PARTS = ("forward", "backward", "communication", "optimizer")
"""The parts of a step, in the order in which they are stacked; "communication" is the exposed part."""
EVERY = (1, 2, 4, 8)
GROUPS = (1, 3, 5)
_CAPS_MB = (0, 1, 5, 10, 25, 50, 200)
_PARAMETER_MB = 1e-6  # a cap so small that each parameter has a bucket of its own, the paper's "0 MB"
_GROUPS_CAP_MB = 5.0  # so that there are several buckets to take turns with


@dataclass(frozen=True)
class Settings:
    """The extent of a measurement.

    Attributes:
        models: of `paper.models.PAPER_MODELS`.
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
        alone: no communication (``no_sync``).
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


def _breakdown(backend: str, ranks: int) -> Series:
    """Figure 6: with and without overlap, and without communication, which tells what of it is exposed."""
    ways = {"no overlap": {"overlap": False}, "overlap": {}, "alone": {"alone": True}}
    return Series(
        {f"{backend}, {name}": Variant(backend, **way) for name, way in ways.items()}, f"{backend}, no overlap"
    )


def _buckets(backend: str, ranks: int) -> Series:
    """Figures 7 and 8: sizes of buckets."""
    caps = {f"{cap} MiB" if cap else "0 (each parameter)": cap or _PARAMETER_MB for cap in _CAPS_MB}
    return Series({f"{backend}, {name}": Variant(backend, cap) for name, cap in caps.items()}, f"{backend}, 25 MiB")


def _scaling(backend: str, ranks: int) -> Series:
    """Figure 9: all worlds of 1, 2, 4 ... that these ranks can be divided into."""
    worlds = [1 << power for power in range(ranks.bit_length()) if ranks % (1 << power) == 0]
    names = {f"{world} rank{'' if world == 1 else 's'}": world for world in worlds}
    return Series(
        {f"{backend}, {name}": Variant(backend, world=world) for name, world in names.items()}, f"{backend}, 1 rank"
    )


def _skipping(backend: str, ranks: int) -> Series:
    """Figure 10: `no_sync` for all but each n-th backward."""
    return Series({f"{backend}, every {n}": Variant(backend, every=n) for n in EVERY}, f"{backend}, every 1")


def _round_robin(backend: str, ranks: int) -> Series:
    """Figure 12: groups that take turns."""
    return Series({f"rr{count}": Variant(backend, _GROUPS_CAP_MB, groups=count) for count in GROUPS}, "rr1")


SERIES: dict[int, Callable[[str, int], Series]] = {
    6: _breakdown,
    7: _buckets,
    8: _buckets,
    9: _scaling,
    10: _skipping,
    12: _round_robin,
}
"""Figure -> what takes turns on a backend, by the number of ranks."""


def series(figure: int, settings: Settings, ranks: int) -> list[Series]:
    """What takes turns for a figure of `SERIES`."""
    backends = settings.backends[:1] if figure == 12 else settings.backends
    return [SERIES[figure](backend, ranks) for backend in backends]
