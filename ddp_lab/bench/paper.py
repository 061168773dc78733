"""`ddp-lab bench paper --figure N`: a figure of the DDP paper (Li et al., VLDB 2020), measured on this machine.

- 7: the step against the size of the buckets (figures 7 and 8: 16 and 32 GPUs), on each backend.
- 12: the step with collectives that go to 1, 3 and 5 groups in turn, over a link of `--mbit` megabits a second on which
  everything arrives `--delay-ms` later (needs root; ``--mbit 0`` leaves the ranks on loopback). One group waits for
  that delay after each round of a collective; several use the link meanwhile.

Our `DistributedDataParallel` trains models of `bench step` in all variants of a figure; they take turns within fresh
sets of processes, and ratios to one of them come from the same turn.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import fresh_ranks, noise
from .command import add_noise, add_picture, aligned, fresh_sets, new_parser, show_sound
from .shaped_link import ShapedLink
from .turns import take_turns
from .workloads import WORKLOADS, training_step

__all__ = ["FIGURES", "main", "measure"]

_WARM_UP = 4  # steps: the first bucket assignment, the rebuild, and two as all others
_PARAMETER_MB = 1e-6  # a cap so small that each parameter has a bucket of its own, the paper's "0 MB"

Variant = dict[str, Any]
"""``backend``, ``groups`` (how many, in turn) and ``cap_mb``."""


@dataclass(frozen=True)
class Series:
    """Variants that take turns, and the name of the one that the others are compared with."""

    variants: dict[str, Variant]
    reference: str


def _caps(backend: str) -> Series:
    caps = {"0 (each parameter)": _PARAMETER_MB} | {f"{cap} MiB": cap for cap in (1, 5, 10, 25, 50, 200)}
    variants = {f"{backend}, {name}": {"backend": backend, "groups": 1, "cap_mb": cap} for name, cap in caps.items()}
    return Series(variants, f"{backend}, 25 MiB")


def _groups(cap_mb: float) -> Series:
    variants = {f"rr{count}": {"backend": "gloo", "groups": count, "cap_mb": cap_mb} for count in (1, 3, 5)}
    return Series(variants, "rr1")


FIGURES: dict[int, list[Series]] = {7: [_caps("gloo"), _caps("shm")], 12: [_groups(5)]}
"""For each figure what is measured."""


def _process_group(variant: Variant, made: dict[str, list[Any]]) -> Any:
    from ..comm import round_robin_process_group

    plain = made.setdefault(variant["backend"], [])
    while len(plain) < variant["groups"]:
        plain.append(dist.new_group(backend=variant["backend"]))
    wanted = plain[: variant["groups"]]
    return wanted[0] if len(wanted) == 1 else round_robin_process_group(wanted)


def _set(workloads: Sequence[str], variants: Mapping[str, Variant], seconds: float, seed: int) -> list[Any]:
    """On a rank: for each model, the turns of each variant, ms."""
    from .. import DistributedDataParallel, comm

    comm.register()
    made: dict[str, list[Any]] = {}
    groups = {name: _process_group(variant, made) for name, variant in variants.items()}
    found = []
    for number, workload in enumerate(workloads):
        torch.manual_seed(0)
        module, batch = WORKLOADS[workload]()
        steps = {
            name: training_step(
                DistributedDataParallel(
                    copy.deepcopy(module), process_group=groups[name], bucket_cap_mb=variant["cap_mb"]
                ),
                batch,
            )
            for name, variant in variants.items()
        }
        until = time.monotonic() + seconds * len(variants)
        found.append(take_turns(steps, dict.fromkeys(steps, _WARM_UP), until, random.Random(seed + number)))
        del steps
        gc.collect()
    return found


def measure(
    figure: int,
    workloads: Sequence[str] = ("mlp", "transformer", "conv_net"),
    *,
    sets: int = 3,
    seconds: float = 4.0,
    ranks: int = 2,
    threads: int = 1,
    mbit: float = 1000.0,
    delay_ms: float = 5.0,
    tolerance: float = noise.TOLERANCE,
) -> dict[str, Any]:
    """Measures a figure.

    Args:
        figure: of `FIGURES`.
        workloads: of `WORKLOADS`.
        sets: how many times all processes are started anew.
        seconds: for each model and variant in each set.
        ranks: processes.
        threads: intra-op threads of each.
        mbit: figure 12: what each rank may send, megabits a second; 0: loopback.
        delay_ms: figure 12: how much later it arrives.
        tolerance: see `noise.figure`.

    Returns:
        ``rows``: for each model and variant ``ms`` and ``ratio`` (to its ``reference``), both
        `noise.Figure`. Beside it what was asked for.

    Raises:
        DdpLabError: a link is to be shaped, and this is not root, or there is no iproute2.
    """
    shaped = figure == 12 and mbit > 0
    rows: list[dict[str, Any]] = []
    for series in FIGURES[figure]:
        taken, others = [], []
        for number in range(sets):
            with noise.Watch() as watch, ShapedLink(ranks, mbit, delay_ms) if shaped else nullcontext() as enter:
                call = (list(workloads), series.variants, seconds, 1000 * number)
                taken.append(fresh_ranks.run(_set, *call, ranks=ranks, threads=threads, prepare=enter))
            others.append(watch.others)
        for index, workload in enumerate(workloads):
            rows += _rows(workload, series.reference, [one[index] for one in taken], others, tolerance)
    return {
        "figure": figure,
        "torch": torch.__version__,
        "ranks": ranks,
        "threads": threads,
        "mbit": mbit if shaped else None,
        "delay_ms": delay_ms if shaped else None,
        "number of sets": sets,
        "seconds": seconds,
        "rows": rows,
    }


def _rows(
    workload: str,
    reference: str,
    sets: Sequence[Mapping[str, Sequence[float]]],
    others: Sequence[float | None],
    tolerance: float,
) -> list[dict[str, Any]]:
    rows = []
    for name in sets[0]:
        ms = [statistics.median(turns[name]) for turns in sets]
        ratios = [
            statistics.median(a / b for a, b in zip(turns[name], turns[reference], strict=True)) for turns in sets
        ]
        rows.append(
            {
                "model": workload,
                "variant": name,
                "reference": reference,
                "ms": noise.figure(ms, others, tolerance=tolerance),
                "ratio": noise.figure(ratios, others, tolerance=tolerance),
            }
        )
    return rows


def _table(found: Mapping[str, Any], keep: bool) -> str:
    link = f", links of {found['mbit']:g} Mbit/s, {found['delay_ms']:g} ms away" if found["mbit"] else ""
    about = (
        f"figure {found['figure']}: torch {found['torch']}, {found['ranks']} ranks with {found['threads']} thread each"
        f"{link}; medians (from .. to) over {fresh_sets(found['number of sets'])}"
    )
    lines = [["model", "variant", "step ms", "against", "ratio", "(from .. to)"]]
    for row in found["rows"]:
        ms, ratio = row["ms"], row["ratio"]
        lines.append(
            [
                row["model"],
                row["variant"],
                noise.shown(ms, f"{ms['median']:.2f} ({ms['low']:.2f} .. {ms['high']:.2f})", keep),
                row["reference"],
                noise.shown(ratio, f"{ratio['median']:.3f}", keep),
                f"({ratio['low']:.3f} .. {ratio['high']:.3f})" if keep or not ratio["noisy"] else "-",
            ]
        )
    return "\n".join([about, "", *aligned(lines, left=2)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    parser = new_parser("paper", __doc__)
    parser.add_argument("--figure", type=int, choices=sorted(FIGURES), required=True, help="of the paper")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(WORKLOADS),
        default=["mlp", "transformer", "conv_net"],
        metavar="NAME",
        help=", ".join(WORKLOADS),
    )
    parser.add_argument("--sets", type=_positive, default=3, help="fresh sets of processes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each model and variant in each set (4)")
    parser.add_argument("--ranks", type=_positive, default=2)
    parser.add_argument("--threads", type=_positive, default=1, help="intra-op threads of each rank")
    parser.add_argument("--mbit", type=float, default=1000.0, help="figure 12: of each rank's link; 0: loopback (1000)")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="figure 12: of what is sent over it (5)")
    add_noise(parser)
    add_picture(parser)
    given = parser.parse_args(argv)
    found = measure(
        given.figure,
        given.models,
        sets=given.sets,
        seconds=given.seconds,
        ranks=given.ranks,
        threads=given.threads,
        mbit=given.mbit,
        delay_ms=given.delay_ms,
        tolerance=given.tolerance,
    )
    if given.picture is not None:
        from . import pictures

        pictures.write(pictures.variants(found, keep=given.keep_noise), given.picture)
    return show_sound(found, _table(found, given.keep_noise), given.json, given.keep_noise)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
