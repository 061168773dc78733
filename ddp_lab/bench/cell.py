"""Round trip of a trivial cell, `%%distributed` against plain `%%px`, in turns.

One kernel drives two clusters of the same size: ours, and a plain ipyparallel one. A turn is one cell with each; the
time is what a notebook sees, from sending the cell until the kernel is idle again. The turns are judged in five parts,
one after the other, as if these were sets of processes: see `ddp_lab.bench.telling.noise`.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..command_line import count
from .kernel import Kernel
from .measuring.command import add_noise, aligned, new_parser, show_sound
from .telling import noise

__all__ = ["main", "measure"]

_PAUSE_S = 0.02
_PARTS = 5
_CELLS = {"x = 1": "x = 1", "print(1)": "print(1)", "rank + 1": "rank + 1"}
_PLAIN = """
import ipyparallel
_plain = ipyparallel.Cluster(n={ranks}, delay=0, controller_args=["--HeartMonitor.period=200"], log_level=40)
_client = _plain.start_and_connect_sync()
_view = _client[:]
_view.scatter("rank", list(range({ranks})), flatten=True, block=True)
_view.block = True
_view.activate()
"""
_OURS = "%load_ext ddp_lab\n%cluster start -n {ranks}"
_END = "%cluster stop\n_plain.stop_cluster_sync()"


def measure(ranks: int = 2, turns: int = 50, tolerance: float = noise.TOLERANCE) -> dict[str, Any]:
    """Measures both sides.

    Args:
        ranks: ranks, and engines of the plain cluster.
        turns: cells of each kind and side.
        tolerance: see `noise.figure`.

    Returns:
        cell -> side ("%%distributed", "%%px") -> ``median_ms``, ``p90_ms``, and in ``parts`` whether it is too noisy;
        and ``ratio`` of the medians, with ``ratio of parts``.
    """
    found: dict[str, Any] = {}
    with Kernel() as kernel:
        kernel.run(_PLAIN.format(ranks=ranks))
        kernel.run(_OURS.format(ranks=ranks))
        try:
            for name, code in _CELLS.items():
                sides = {"%%distributed": f"%%distributed\n{code}", "%%px": f"%%px\n{code}"}
                seconds: dict[str, list[float]] = {side: [] for side in sides}
                for turn in range(-3, turns):
                    for side in sorted(sides, reverse=bool(turn % 2)):
                        taken = kernel.run(sides[side])
                        if turn >= 0:
                            seconds[side].append(taken)
                        time.sleep(_PAUSE_S)
                found[name] = _summaries(seconds, tolerance)
        finally:
            kernel.run(_END)
    return {"ranks": ranks, "turns": turns, "cells": found}


def _summaries(seconds: dict[str, list[float]], tolerance: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side, taken in seconds.items():
        tenths = statistics.quantiles(taken, n=10)
        parts = noise.figure([1e3 * part for part in _parts(taken)], tolerance=tolerance)
        found[side] = {"median_ms": statistics.median(taken) * 1e3, "p90_ms": tenths[8] * 1e3, "parts": parts}
    ours, theirs = (found[side]["parts"]["samples"] for side in ("%%distributed", "%%px"))
    found["ratio"] = found["%%distributed"]["median_ms"] / found["%%px"]["median_ms"]
    found["ratio of parts"] = noise.figure([a / b for a, b in zip(ours, theirs, strict=True)], tolerance=tolerance)
    return found


def _parts(seconds: Sequence[float]) -> list[float]:
    """Medians of consecutive parts."""
    edges = [len(seconds) * part // _PARTS for part in range(_PARTS + 1)]
    return [statistics.median(seconds[a:b]) for a, b in itertools.pairwise(edges) if b > a]


def _table(summary: dict[str, Any], keep: bool) -> str:
    lines = [["cell", "%%distributed", "p90", "%%px", "p90", "ratio"]]
    for name, found in summary["cells"].items():
        cells = []
        for side in ("%%distributed", "%%px"):
            one = found[side]
            cells.append(noise.shown(one["parts"], f"{one['median_ms']:.1f}", keep))
            cells.append(f"{one['p90_ms']:.1f}" if keep or not one["parts"]["noisy"] else "-")
        lines.append([name, *cells, noise.shown(found["ratio of parts"], f"{found['ratio']:.2f}", keep)])
    about = (
        f"round trip through a Jupyter kernel, {summary['ranks']} ranks, {summary['turns']} cells each, in turns (ms)"
    )
    return "\n".join([about, *aligned(lines, left=1)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    parser = new_parser("ddp-lab bench cell", __doc__)
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--turns", type=count, default=50, help="cells of each kind and side")
    add_noise(parser)
    given = parser.parse_args(argv)
    summary = measure(given.ranks, given.turns, given.tolerance)
    return show_sound(summary, _table(summary, given.keep_noise), given.json, given.keep_noise)


if __name__ == "__main__":
    sys.exit(main())
