"""The figures: how each is measured, and the published values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_lab import command_line
from ddp_lab.bench.measuring import command, noise
from ddp_lab.bench.measuring.command import option

from . import hardware, rows
from .settings import SERIES, Settings, series

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["FIGURES", "PAPER", "POINTS", "Point", "main", "measure", "of_figure", "on_ranks", "picture", "result"]

FIGURES = {
    2: "all-reduce time by call size, and readiness of gradients",
    6: "step time breakdown",
    7: "bucket size (the paper: 16 GPUs)",
    8: "bucket size (the paper: 32 GPUs)",
    9: "scalability",
    10: "averaging every n-th backward",
    11: "convergence with no_sync",
    12: "round robin over process groups",
}
"""Number -> what it shows."""
PAPER = "Li et al., VLDB 2020 (arXiv 2006.15704)"
_DIGEST = "recalled, not checked against the paper's figure"


@dataclass(frozen=True)
class Point:
    """One statement of the paper: a reference for measured and simulated points.

    Attributes:
        figure: its number.
        model, backend: of the paper's; "" where it is about all of them.
        what: in words.
        values: the number, or the ends of a range.
        unit: of the values.
        approximate: whether the number was not compared with the paper's own figure.
    """

    figure: int
    model: str
    backend: str
    what: str
    values: tuple[float, ...]
    unit: str
    approximate: bool = True

    @property
    def source(self) -> str:
        """Its source and reliability."""
        return f"{PAPER}, figure {self.figure}" + (f"; approximate: {_DIGEST}" if self.approximate else "")


_GAINS = [
    Point(6, model, backend, "overlap saves", (gain,), "% of the step without it", approximate=False)
    for (model, backend), gain in hardware.GAINS.items()
]
POINTS = [
    Point(2, "", "gloo", "larger calls gain nothing more from", (5e5,), "parameters in a call"),
    Point(2, "", "nccl", "larger calls still gain at", (2e7,), "parameters in a call"),
    *_GAINS,
    Point(7, "ResNet50", "nccl", "the best size of buckets is", (10, 25), "MB"),
    Point(7, "ResNet50", "gloo", "the best size of buckets is", (5,), "MB"),
    Point(7, "BERT", "nccl", "the best size of buckets is", (50,), "MB"),
    Point(9, "ResNet50", "nccl", "256 GPUs: a step takes", (2.0,), "x as long as on one"),
    Point(9, "BERT", "nccl", "256 GPUs: a step takes", (1.65,), "x as long as on one"),
    Point(10, "ResNet50", "nccl", "256 GPUs, averaged every 8: saves", (38,), "% of the time"),
    Point(10, "ResNet50", "gloo", "256 GPUs, averaged every 8: saves", (57,), "% of the time"),
    Point(12, "BERT", "nccl", "16 GPUs: three groups are faster than one by", (33,), "%"),
]
"""Figure 7's hold for figure 8, too. Figure 11 is about curves: `no_sync` harms convergence with the large batch."""


def of_figure(number: int) -> list[Point]:
    """The statements of a figure."""
    return [point for point in POINTS if point.figure == (7 if number == 8 else number)]


def on_ranks(figure: int, settings: Settings | None = None, *, seed: int = 0) -> Any:
    """Measures a figure; all ranks of the default group call it at the same time.

    Args:
        figure: of `FIGURES`.
        settings: how much to measure; None: the defaults, some minutes.
        seed: of the order of turns and of what is random; the same on all ranks.

    Returns:
        What `result` takes, JSON-able; rank 0's counts.
    """
    import torch.distributed as dist

    from . import communication, convergence, steps

    asked = settings or Settings()
    if figure in SERIES:
        return steps.on_ranks(series(figure, asked, dist.get_world_size()), asked, seed)
    return (communication if figure == 2 else convergence).on_ranks(asked, seed)


def _seeded(figure: int, settings: Settings, seed: int) -> Any:
    return on_ranks(figure, settings, seed=seed)


def result(
    figure: int,
    raws: Sequence[Any],
    settings: Settings | None = None,
    *,
    ranks: int = 2,
    others: Sequence[float | None] = (),
    tolerance: float = noise.TOLERANCE,
) -> dict[str, Any]:
    """Combines measured, simulated and published values.

    Args:
        figure: of `FIGURES`.
        raws: what `on_ranks` returned on rank 0, in each set of processes.
        settings: with which it was called.
        ranks: how many there were.
        others: of each set what other programs took (`noise.Watch`).
        tolerance: see `noise.figure`.

    Returns:
        JSON-able: ``figure``, ``title``, ``ranks``, ``number of sets``, ``settings``, ``rows`` (measured, see `rows`),
        ``simulated`` (see `hardware.simulated`) and ``published`` (see `Point`, with its ``source``).
    """
    asked, judge = settings or Settings(), partial(noise.figure, others=others, tolerance=tolerance)
    if figure in SERIES:
        measured = rows.of_steps(series(figure, asked, ranks), raws, judge)
    else:
        measured = rows.of_communication(raws, judge) if figure == 2 else rows.of_convergence(raws)
    found = {
        "figure": figure,
        "title": FIGURES[figure],
        "ranks": ranks,
        "number of sets": len(raws),
        "settings": asdict(asked),
        "rows": measured,
        "simulated": hardware.simulated(figure),
        "published": [asdict(point) | {"source": point.source} for point in of_figure(figure)],
    }
    return found | ({"breakdown": rows.breakdown(measured)} if figure == 6 else {})


def picture(found: Mapping[str, Any], keep: bool = False) -> go.Figure:
    """A result as a plotly figure: measured above, simulated (hatched or dashed) and published below.

    Args:
        found: of `result`.
        keep: draw what is too noisy, too, but faint.
    """
    from . import pictures

    return pictures.picture(found, keep)


def measure(
    figure: int,
    models: Sequence[str] = Settings.models,
    backends: Sequence[str] = Settings.backends,
    *,
    seconds: float = Settings.seconds,
    parameters: int = Settings.parameters,
    backwards: int = Settings.backwards,
    sets: int = 3,
    ranks: int | None = None,
    threads: int = 1,
    mbit: float = 1000.0,
    delay_ms: float = 5.0,
    tolerance: float = noise.TOLERANCE,
) -> dict[str, Any]:
    """Measures a figure in fresh sets of processes.

    Args:
        figure: of `FIGURES`.
        models, backends, seconds, parameters, backwards: of `Settings`.
        sets: number of fresh sets of processes (figure 11: with different seeds).
        ranks: processes; None: 2, for figure 9 as many as there are processors, of 1, 2 and 4.
        threads: intra-op threads of each.
        mbit: figure 12: what each rank may send, megabits a second; 0: loopback.
        delay_ms: figure 12: delay of the link, milliseconds.
        tolerance: see `noise.figure`.

    Returns:
        What `result` returns, with ``torch``, ``threads``, ``mbit`` and ``delay_ms``.

    Raises:
        DdpLabError: a link is to be shaped, and this is not root, or there is no iproute2.
    """
    import torch

    from ddp_lab.bench.measuring import fresh_ranks

    from .shaped_link import shaped

    asked = Settings(tuple(models), tuple(backends), seconds, parameters, backwards)
    world = ranks or (_most_ranks() if figure == 9 else 2)
    link = {"mbit": mbit, "delay_ms": delay_ms} if figure == 12 and mbit > 0 else {"mbit": None, "delay_ms": None}

    def start(number: int) -> Any:
        with shaped(world, link["mbit"], delay_ms) as enter:  # ended with the set: see `noise.of_sets`
            call = (_seeded, figure, asked, 1000 * number)
            return fresh_ranks.run(*call, ranks=world, threads=threads, prepare=enter)

    raws, others = noise.of_sets(sets, start)
    found = result(figure, raws, asked, ranks=world, others=others, tolerance=tolerance)
    return found | link | {"torch": torch.__version__, "threads": threads}


def _most_ranks() -> int:
    return 4 if len(os.sched_getaffinity(0)) >= 4 else 2


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    from ddp_lab.bench.measuring import collectives

    from .models import PAPER_MODELS

    options = [
        option(
            "--figure",
            type=int,
            choices=sorted(FIGURES),
            required=True,
            help="; ".join(f"{number}: {title}" for number, title in FIGURES.items()),
        ),
        option("--models", nargs="+", choices=list(PAPER_MODELS), metavar="NAME", help=", ".join(PAPER_MODELS)),
        option("--backends", nargs="+", choices=collectives.available(), metavar="NAME", help="to train over"),
        command.SETS,
        option("--seconds", type=command_line.seconds, help="for each model and variant in each set"),
        option("--parameters", type=command_line.count, help="figure 2: in all"),
        option("--backwards", type=command_line.count, help="figure 11: of each training"),
        option("--ranks", type=command_line.count, help="2; figure 9: as many as there are processors, up to 4"),
        command.THREADS,
        option("--mbit", type=float, help="figure 12: of each rank's link; 0: loopback"),
        option("--delay-ms", type=float, help="figure 12: of what is sent over it"),
    ]
    about = "A figure of the DDP paper (Li et al., VLDB 2020), measured on this machine."
    return command.run("python -m paper", about, measure, rows.table, options, argv)
