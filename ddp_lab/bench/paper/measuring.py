"""`ddp-lab bench paper`: fresh sets of processes for a figure, and the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from ...command_line import count, seconds
from ..measuring.command import add_noise, add_picture, new_parser, show_sound
from ..telling import noise
from .figures import FIGURES, on_ranks, picture, result, table
from .settings import Settings

__all__ = ["main", "measure"]

_ABOUT = "A figure of the DDP paper (Li et al., VLDB 2020), measured on this machine."


def measure(
    figure: int,
    settings: Settings | None = None,
    *,
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
        settings: how much is measured in each set.
        sets: how many times all processes are started anew (figure 11: with another seed).
        ranks: processes; None: 2, for figure 9 as many as there are processors, of 1, 2 and 4.
        threads: intra-op threads of each.
        mbit: figure 12: what each rank may send, megabits a second; 0: loopback.
        delay_ms: figure 12: how much later it arrives.
        tolerance: see `noise.figure`.

    Returns:
        What `result` returns, with ``torch``, ``threads``, ``mbit`` and ``delay_ms``.

    Raises:
        DdpLabError: a link is to be shaped, and this is not root, or there is no iproute2.
    """
    import torch

    from ..measuring import fresh_ranks
    from ..measuring.shaped_link import ShapedLink

    asked, shaped = settings or Settings(), figure == 12 and mbit > 0
    world = ranks or (_most_ranks() if figure == 9 else 2)
    raws, others = [], []
    for number in range(sets):
        with noise.Watch() as watch, ShapedLink(world, mbit, delay_ms) if shaped else nullcontext() as enter:
            call = (figure, asked, 1000 * number)
            raws.append(fresh_ranks.run(_on_ranks, *call, ranks=world, threads=threads, prepare=enter))
        others.append(watch.others)
    found = result(figure, raws, asked, ranks=world, others=others, tolerance=tolerance)
    link = {"mbit": mbit, "delay_ms": delay_ms} if shaped else {"mbit": None, "delay_ms": None}
    return found | link | {"torch": torch.__version__, "threads": threads}


def _most_ranks() -> int:
    cores = len(os.sched_getaffinity(0))
    return max(ranks for ranks in (1, 2, 4) if ranks <= max(2, cores))


def _on_ranks(figure: int, settings: Settings, seed: int) -> Any:
    return on_ranks(figure, settings, seed=seed)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    from ..measuring import backends
    from ..measuring.workloads import PAPER_MODELS

    usual = Settings()
    parser = new_parser("ddp-lab bench paper", _ABOUT)
    parser.add_argument(
        "--figure",
        type=int,
        choices=sorted(FIGURES),
        required=True,
        help="; ".join(f"{number}: {figure.title}" for number, figure in FIGURES.items()),
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(PAPER_MODELS),
        default=list(usual.models),
        metavar="NAME",
        help=", ".join(PAPER_MODELS) + " (%(default)s)",
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=backends.available(),
        default=list(usual.backends),
        metavar="NAME",
        help="(%(default)s)",
    )
    parser.add_argument("--sets", type=count, default=3, help="fresh sets of processes (%(default)s)")
    parser.add_argument(
        "--seconds", type=seconds, default=usual.seconds, help="for each model and variant in each set (4)"
    )
    parser.add_argument("--parameters", type=count, default=usual.parameters, help="figure 2: in all (%(default)s)")
    parser.add_argument("--backwards", type=count, default=usual.backwards, help="figure 11: of each training")
    parser.add_argument("--ranks", type=count, help="2; figure 9: as many as there are processors, up to 4")
    parser.add_argument("--threads", type=count, default=1, help="intra-op threads of each rank")
    parser.add_argument("--mbit", type=float, default=1000.0, help="figure 12: of each rank's link; 0: loopback (1000)")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="figure 12: of what is sent over it (5)")
    add_noise(parser)
    add_picture(parser)
    given = parser.parse_args(argv)
    found = measure(
        given.figure,
        Settings(tuple(given.models), tuple(given.backends), given.seconds, given.parameters, given.backwards),
        sets=given.sets,
        ranks=given.ranks,
        threads=given.threads,
        mbit=given.mbit,
        delay_ms=given.delay_ms,
        tolerance=given.tolerance,
    )
    if given.picture is not None:
        from ..telling import drawing

        drawing.write(picture(found, keep=given.keep_noise), given.picture)
    return show_sound(found, table(found, keep=given.keep_noise), given.json, given.keep_noise)
