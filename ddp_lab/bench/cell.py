"""Round trip of a trivial cell through a real Jupyter kernel: `%%distributed` against plain `%%px`, taking turns.

One kernel drives two clusters of the same size: ours, and a plain ipyparallel one. A turn is one cell with each; the
time is what a notebook sees, from sending the cell until the kernel is idle again.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from .command import new_parser, show
from .kernel import Kernel

__all__ = ["main", "measure"]

_PAUSE_S = 0.02
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


def measure(ranks: int = 2, turns: int = 50) -> dict[str, Any]:
    """Measures both sides.

    Args:
        ranks: ranks, and engines of the plain cluster.
        turns: cells of each kind and side.

    Returns:
        cell -> side ("%%distributed", "%%px") -> ``median_ms``, ``p90_ms``; and ``ratio`` of the medians.
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
                found[name] = {side: _summary(taken) for side, taken in seconds.items()}
                found[name]["ratio"] = found[name]["%%distributed"]["median_ms"] / found[name]["%%px"]["median_ms"]
        finally:
            kernel.run(_END)
    return {"ranks": ranks, "turns": turns, "cells": found}


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    tenths = statistics.quantiles(seconds, n=10)
    return {"median_ms": statistics.median(seconds) * 1e3, "p90_ms": tenths[8] * 1e3}


def _table(summary: dict[str, Any]) -> str:
    lines = [
        f"round trip through a Jupyter kernel, {summary['ranks']} ranks, {summary['turns']} cells each, in turns (ms)",
        f"{'cell':12} {'%%distributed':>16} {'p90':>7} {'%%px':>9} {'p90':>7} {'ratio':>7}",
    ]
    for name, found in summary["cells"].items():
        ours, theirs = found["%%distributed"], found["%%px"]
        lines.append(
            f"{name:12} {ours['median_ms']:16.1f} {ours['p90_ms']:7.1f} {theirs['median_ms']:9.1f} "
            f"{theirs['p90_ms']:7.1f} {found['ratio']:7.2f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    parser = new_parser("cell", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=50, help="cells of each kind and side")
    given = parser.parse_args(argv)
    summary = measure(given.ranks, given.turns)
    show(summary, _table(summary), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
