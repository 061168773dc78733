"""`ddp-lab bench all-reduce`: an all-reduce of CPU tensors through shared memory and through Gloo, on this machine.

In fresh sets of processes, for each size in turns: some calls through one group, then some through the other, then some
copies of as many bytes that all ranks make at the same time, as a limit. A call is timed from a barrier on, on every
rank; the slowest rank counts, since all wait for it. Given is the median of the calls of all sets.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import comm
from . import fresh_ranks
from .command import new_parser, show

__all__ = ["main", "measure"]

_SIZES = (4, 64 << 10, 1 << 20, 25 << 20)
_BLOCK_SECONDS = 0.15  # of a block of calls, about
_WARM_UP = 3
_CALLS = (5, 200)  # in a block: at least, at most


def _calls(sizes: Sequence[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each call, by size and side; on every rank the same, those of the slowest."""
    comm.register()
    groups = {"shm": dist.new_group(backend="shm"), "gloo": dist.group.WORLD}
    found: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        tensor, other = torch.ones(size // 4), torch.empty(size // 4)
        sides: dict[str, Callable[[], Any]] = {
            name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()
        }
        sides["copy"] = partial(other.copy_, tensor)
        times: dict[str, list[float]] = defaultdict(list)
        for number in range(rounds):
            for name, call in sorted(sides.items(), reverse=bool(number % 2)):
                times[name] += _block(tensor, call, groups["shm"])
        found[str(size)] = dict(times)
    return found


def _block(tensor: torch.Tensor, call: Callable[[], Any], meeting: Any) -> list[float]:
    seconds: list[float] = []
    calls = _WARM_UP
    while len(seconds) < calls:
        tensor.fill_(1)
        dist.barrier(meeting)
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
        if len(seconds) == _WARM_UP and calls == _WARM_UP:
            mean = torch.tensor(statistics.median(seconds))
            dist.all_reduce(mean, dist.ReduceOp.MAX, group=meeting)
            calls += min(_CALLS[1], max(_CALLS[0], int(_BLOCK_SECONDS / mean.item())))
    slowest = torch.tensor(seconds[_WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=meeting)
    return [float(each) for each in slowest]


def measure(
    world_sizes: Sequence[int] = (2,), sizes: Sequence[int] = _SIZES, rounds: int = 4, sets: int = 3
) -> dict[str, Any]:
    """Measures all of it.

    Args:
        world_sizes: numbers of ranks.
        sizes: bytes of the tensors (float32).
        rounds: blocks of each side, in turns, in a set of processes.
        sets: fresh sets of processes.

    Returns:
        world size -> bytes -> side (``"shm"``, ``"gloo"``, ``"copy"``) -> ``median_us`` and, over the medians of the
        sets, ``least_us`` and ``most_us``.
    """
    found: dict[str, Any] = {}
    for ranks in world_sizes:
        runs = [fresh_ranks.run(_calls, list(sizes), rounds, ranks=ranks) for _ in range(sets)]
        found[str(ranks)] = {
            size: {side: _summary([run[size][side] for run in runs]) for side in runs[0][size]} for size in runs[0]
        }
    return found


def _summary(runs: Sequence[Sequence[float]]) -> dict[str, float]:
    medians = [statistics.median(run) * 1e6 for run in runs]
    every = statistics.median([each for run in runs for each in run]) * 1e6
    return {"median_us": every, "least_us": min(medians), "most_us": max(medians)}


def _table(found: dict[str, Any]) -> str:
    lines = [
        "all-reduce of float32, microseconds: median (least to most median of a set of processes)",
        f"{'ranks':>5} {'bytes':>10} {'shm':>26} {'Gloo':>26} {'copy':>9} {'Gloo / shm':>11} {'shm / copy':>11}",
    ]
    for ranks, sizes in found.items():
        for size, sides in sizes.items():
            shm, gloo, copy = (sides[name] for name in ("shm", "gloo", "copy"))
            lines.append(
                f"{ranks:>5} {size:>10} {_spread(shm):>26} {_spread(gloo):>26} {copy['median_us']:9.1f} "
                f"{gloo['median_us'] / shm['median_us']:11.1f} {shm['median_us'] / copy['median_us']:11.2f}"
            )
    return "\n".join(lines)


def _spread(one: dict[str, float]) -> str:
    return f"{one['median_us']:.1f} ({one['least_us']:.1f} to {one['most_us']:.1f})"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    parser = new_parser("all-reduce", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="numbers of ranks (default: 2)")
    parser.add_argument("--bytes", type=int, nargs="+", default=list(_SIZES), metavar="B", help="sizes of the tensors")
    parser.add_argument("--rounds", type=int, default=4, help="blocks of each side in a set (default: 4)")
    parser.add_argument("--sets", type=int, default=3, help="fresh sets of processes (default: 3)")
    given = parser.parse_args(argv)
    result = measure(given.ranks, given.bytes, given.rounds, given.sets)
    show(result, _table(result), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
