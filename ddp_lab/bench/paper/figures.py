"""The figures: what is measured for each, what stands beside it, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..telling import noise
from . import published, rows, series, simulated, tables
from .settings import Series, Settings

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["FIGURES", "on_ranks", "picture", "result", "table"]

_Simulated = Callable[[], rows.Rows]


@dataclass(frozen=True)
class Figure:
    """One figure of the paper.

    Attributes:
        title: what it shows.
        simulated: rows of `simulated`, for the paper's cluster.
        series: variants of training steps that take turns, for settings and a number of ranks; None: no such figure.
    """

    title: str
    simulated: _Simulated
    series: Callable[[Settings, int], list[Series]] | None = None


FIGURES: dict[int, Figure] = {
    2: Figure(
        "how long an all-reduce takes, and when gradients are ready",
        lambda: simulated.communication() + simulated.readiness(),
    ),
    6: Figure("what a step consists of", simulated.breakdown, series.breakdown),
    7: Figure("sizes of buckets (the paper: 16 GPUs)", lambda: simulated.buckets(16), series.buckets),
    8: Figure("sizes of buckets (the paper: 32 GPUs)", lambda: simulated.buckets(32), series.buckets),
    9: Figure("scalability", simulated.scaling, series.scaling),
    10: Figure("averaging every n-th backward", simulated.skipping, series.skipping),
    11: Figure("convergence with no_sync", lambda: []),
    12: Figure("groups that take turns", simulated.round_robin, series.round_robin),
}


def on_ranks(figure: int, settings: Settings | None = None, *, seed: int = 0) -> Any:
    """Measures a figure; all ranks of the default group call it at the same time.

    Args:
        figure: of `FIGURES`.
        settings: how much; None: the defaults, some minutes.
        seed: of the order of turns and of what is random; the same on all ranks.

    Returns:
        What `result` takes, JSON-able; rank 0's counts.
    """
    asked = settings or Settings()
    if figure == 2:
        from .ranks import communication

        return communication.on_ranks(asked, seed)
    if figure == 11:
        from .ranks import convergence

        return convergence.on_ranks(asked, seed)
    import torch.distributed as dist

    from .ranks import steps

    return steps.on_ranks(_series(figure, asked, dist.get_world_size()), asked, seed)


def _series(figure: int, settings: Settings, ranks: int) -> list[Series]:
    make = FIGURES[figure].series
    assert make is not None
    return make(settings, ranks)


def result(
    figure: int,
    raws: Sequence[Any],
    settings: Settings | None = None,
    *,
    ranks: int = 2,
    others: Sequence[float | None] = (),
    tolerance: float = noise.TOLERANCE,
) -> dict[str, Any]:
    """Puts together what was measured, what is simulated and what was published.

    Args:
        figure: of `FIGURES`.
        raws: what `on_ranks` returned on rank 0, in each set of processes.
        settings: with which it was called.
        ranks: how many there were.
        others: of each set what other programs took (`noise.Watch`).
        tolerance: see `noise.figure`.

    Returns:
        JSON-able: ``figure``, ``title``, ``ranks``, ``number of sets``, ``settings``, ``rows`` (measured, see `rows`),
        ``simulated`` (see `simulated`) and ``published`` (see `published.Point`, with its ``source``).
    """
    asked = settings or Settings()
    if figure == 2:
        measured = rows.of_communication(raws, others, tolerance)
    elif figure == 11:
        measured = rows.of_convergence(raws)
    else:
        measured = rows.of_steps(_series(figure, asked, ranks), raws, others, tolerance)
    found = {
        "figure": figure,
        "title": FIGURES[figure].title,
        "ranks": ranks,
        "number of sets": len(raws),
        "settings": asdict(asked),
        "rows": measured,
        "simulated": FIGURES[figure].simulated(),
        "published": [asdict(point) | {"source": point.source} for point in published.of_figure(figure)],
    }
    return found | ({"breakdown": rows.breakdown(measured)} if figure == 6 else {})


def table(found: Mapping[str, Any], *, keep: bool = False) -> str:
    """A result as text: what was measured, then what was published.

    Args:
        found: of `result`.
        keep: show what is too noisy, too.
    """
    return tables.table(found, keep)


def picture(found: Mapping[str, Any], *, keep: bool = False) -> go.Figure:
    """A result as a plotly figure: measured on the left, simulated (hatched or dashed) and published on the right.

    Args:
        found: of `result`.
        keep: draw what is too noisy, too, but faint.
    """
    from . import pictures

    return pictures.picture(found, keep)
