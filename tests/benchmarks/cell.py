"""Compares the round-trip time of a trivial cell: `%%distributed` and plain `%%px`.

One kernel drives two clusters of the same size: ours, and a plain ipyparallel one, in turns of one cell each. The time
is that seen by a notebook, from sending the cell until the kernel is idle again. The turns are evaluated in five
consecutive parts, as if these were sets of processes: see `ddp_lab.bench.measuring.noise`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from ddp_lab.bench.measuring import command, noise
from ddp_lab.bench.start import kernel
from ddp_lab.command_line import count

_PAUSE_S = 0.02
_PARTS = 5
_CELLS = ("x = 1", "print(1)", "rank + 1")
_SIDES = ("%%distributed", "%%px")
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
    with kernel() as run:
        run(_PLAIN.format(ranks=ranks))
        run(_OURS.format(ranks=ranks))
        try:
            for code in _CELLS:
                seconds: dict[str, list[float]] = {side: [] for side in _SIDES}
                for turn in range(-3, turns):
                    for side in _SIDES[:: -1 if turn % 2 else 1]:
                        taken = run(f"{side}\n{code}")
                        if turn >= 0:
                            seconds[side].append(taken)
                        time.sleep(_PAUSE_S)
                found[code] = _summaries(seconds, tolerance)
        finally:
            run(_END)
    return {"ranks": ranks, "turns": turns, "cells": found}


def _summaries(seconds: dict[str, list[float]], tolerance: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    judge = partial(noise.figure, tolerance=tolerance)
    for side, taken in seconds.items():
        p90 = statistics.quantiles(taken, n=10)[8]
        parts = judge([1e3 * part for part in _parts(taken)])
        found[side] = {"median_ms": statistics.median(taken) * 1e3, "p90_ms": p90 * 1e3, "parts": parts}
    ours, theirs = (found[side] for side in _SIDES)
    ratios = [a / b for a, b in zip(ours["parts"]["samples"], theirs["parts"]["samples"], strict=True)]
    return found | {"ratio": ours["median_ms"] / theirs["median_ms"], "ratio of parts": judge(ratios)}


def _parts(seconds: Sequence[float]) -> list[float]:
    """Medians of consecutive parts."""
    edges = [len(seconds) * part // _PARTS for part in range(_PARTS + 1)]
    return [statistics.median(seconds[a:b]) for a, b in itertools.pairwise(edges) if b > a]


def table(found: dict[str, Any], keep: bool) -> str:
    lines = [["cell", "%%distributed", "p90", "%%px", "p90", "ratio"]]
    for name, of_cell in found["cells"].items():
        lines.append([name])
        for one in (of_cell[side] for side in _SIDES):
            told = keep or not one["parts"]["noisy"]
            lines[-1] += [noise.shown(one["parts"], f"{one['median_ms']:.1f}", keep)]
            lines[-1] += [f"{one['p90_ms']:.1f}" if told else "-"]
        lines[-1] += [noise.shown(of_cell["ratio of parts"], f"{of_cell['ratio']:.2f}", keep)]
    about = f"round trip through a Jupyter kernel, {found['ranks']} ranks, {found['turns']} cells each, in turns (ms)"
    return "\n".join([about, *command.aligned(lines, left=1)])


OPTIONS = (
    command.RANKS,
    command.option("--turns", type=count, help="number of cells per kind and cluster"),
)
