"""What is measured for the figures that are about training steps."""

from __future__ import annotations

from .settings import Series, Settings, Variant

__all__ = ["CAPS_MB", "EVERY", "GROUPS", "breakdown", "buckets", "round_robin", "scaling", "skipping"]

_PARAMETER_MB = 1e-6  # a cap so small that each parameter has a bucket of its own, the paper's "0 MB"
CAPS_MB = (0, 1, 5, 10, 25, 50, 200)
EVERY = (1, 2, 4, 8)
GROUPS = (1, 3, 5)
_GROUPS_CAP_MB = 5.0  # so that there are several buckets to take turns with


def breakdown(settings: Settings, ranks: int) -> list[Series]:
    """Figure 6: with and without overlap, and without communication, which tells what of it is exposed."""
    return [
        Series(
            {
                f"{backend}, no overlap": Variant(backend, overlap=False),
                f"{backend}, overlap": Variant(backend),
                f"{backend}, alone": Variant(backend, alone=True),
            },
            f"{backend}, no overlap",
        )
        for backend in settings.backends
    ]


def buckets(settings: Settings, ranks: int) -> list[Series]:
    """Figures 7 and 8: sizes of buckets."""
    return [
        Series(
            {
                f"{backend}, {f'{cap} MiB' if cap else '0 (each parameter)'}": Variant(backend, cap or _PARAMETER_MB)
                for cap in CAPS_MB
            },
            f"{backend}, 25 MiB",
        )
        for backend in settings.backends
    ]


def scaling(settings: Settings, ranks: int) -> list[Series]:
    """Figure 9: all worlds of 1, 2, 4 ... that these ranks can be divided into."""
    worlds = [1 << power for power in range(ranks.bit_length()) if ranks % (1 << power) == 0]
    return [
        Series({f"{backend}, {_ranks(world)}": Variant(backend, world=world) for world in worlds}, f"{backend}, 1 rank")
        for backend in settings.backends
    ]


def skipping(settings: Settings, ranks: int) -> list[Series]:
    """Figure 10: `no_sync` for all but each n-th backward."""
    return [
        Series({f"{backend}, every {every}": Variant(backend, every=every) for every in EVERY}, f"{backend}, every 1")
        for backend in settings.backends
    ]


def round_robin(settings: Settings, ranks: int) -> list[Series]:
    """Figure 12: groups that take turns."""
    backend = settings.backends[0]
    return [Series({f"rr{count}": Variant(backend, _GROUPS_CAP_MB, groups=count) for count in GROUPS}, "rr1")]


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
