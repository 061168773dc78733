"""An all-reduce, or any other collective of CPU tensors, through every backend.

In fresh sets of processes, for each size in turns: some calls through one backend, then some through the next one, then
two limits of the machine that all ranks try at the same time. ``copy`` is torch's ``copy_`` of as many bytes from one
buffer to another (a memcpy). ``triad`` is STREAM's: a = b + 0.5 c by torch's ``add`` with ``out=``, on three buffers of
as many bytes each. ``shm shared`` is an all-reduce of a buffer in the backend's own memory. A call is timed from a
barrier on, on every rank; the slowest rank counts, since all wait for it. Given is the median over the sets of each
set's median; `ddp_lab.bench.telling.noise` says which figures are too noisy to show.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..command_line import count
from .measuring import backends, fresh_ranks
from .measuring.command import add_noise, add_picture, aligned, fresh_sets, new_parser, show_sound
from .measuring.operations import DTYPES, OPERATIONS, SHARED, Buffers, lacks, limits, sides_of
from .telling import noise

__all__ = ["main", "measure"]

_SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 25 << 20)
_BACKENDS = ("shm", "gloo")
_BLOCK_SECONDS = 0.15  # of a block of calls, about
_WARM_UP = 3
_CALLS = (5, 200)  # in a block: at least, at most

_Blocks = dict[str, list[float]]  # side -> median seconds of each block


_Side = tuple[torch.Tensor, Callable[[], Any]]  # what is filled anew before each call, and the call


def _sides(operation: str, buffers: Buffers, groups: dict[str, Any]) -> tuple[dict[str, _Side], dict[str, str]]:
    """What is to be timed, and what backends say that lack the operation."""
    calls = {name: partial(OPERATIONS[operation], buffers, group) for name, group in groups.items()}
    missing = {name: words for name, call in calls.items() if (words := lacks(call))}
    sides: dict[str, _Side] = {name: (buffers.whole, call) for name, call in calls.items() if name not in missing}
    for name, group in groups.items() if operation == "all_reduce" else ():
        shared = backends.memory_of(group, buffers.whole)
        if shared is not None:
            sides[name + SHARED] = shared, partial(dist.all_reduce, shared, group=group)
    if operation != "barrier":
        sides |= {name: (buffers.whole, call) for name, call in limits(buffers).items()}
    return sides, missing


def _set(operations: Sequence[str], sizes: Sequence[int], names: Sequence[str], dtype: str, rounds: int) -> Any:
    """For each operation and size what one set of processes found; on every rank the same, that of the slowest."""
    meeting = backends.groups(["shm"])["shm"]  # its barrier lets all ranks go within microseconds
    groups = backends.groups(names)
    found = []
    for operation in operations:
        for size in sizes if operation != "barrier" else (0,):
            buffers = Buffers(size, getattr(torch, dtype), dist.get_world_size())
            sides, missing = _sides(operation, buffers, groups)
            blocks: _Blocks = defaultdict(list)
            for number in range(rounds):
                for name, (tensor, call) in list(sides.items())[:: -1 if number % 2 else 1]:
                    blocks[name].append(_block(tensor, call, meeting))
            found.append({"operation": operation, "bytes": size, "blocks": blocks, "missing": missing})
    return found


def _block(tensor: torch.Tensor, call: Callable[[], Any], meeting: Any) -> float:
    """Median of a block's calls in seconds, each by its slowest rank."""
    seconds: list[float] = []
    calls = _WARM_UP
    while len(seconds) < calls:
        tensor.fill_(1)
        dist.barrier(meeting)
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
        if len(seconds) == _WARM_UP and calls == _WARM_UP:
            usual = torch.tensor(statistics.median(seconds))
            dist.all_reduce(usual, dist.ReduceOp.MAX, group=meeting)
            calls += min(_CALLS[1], max(_CALLS[0], int(_BLOCK_SECONDS / usual.item())))
    slowest = torch.tensor(seconds[_WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=meeting)
    return statistics.median(float(each) for each in slowest)


def measure(
    world_sizes: Sequence[int] = (2, 4),
    sizes: Sequence[int] = _SIZES,
    *,
    operations: Sequence[str] = ("all_reduce",),
    compared: Sequence[str] = _BACKENDS,
    dtype: str = "float32",
    rounds: int = 4,
    sets: int = 5,
    tolerance: float = noise.TOLERANCE,
) -> dict[str, Any]:
    """Measures all of it.

    Args:
        world_sizes: numbers of ranks.
        sizes: bytes; see `ddp_lab.bench.measuring.operations` for what they are the size of.
        operations: of `OPERATIONS`.
        compared: names of backends; the others are compared with the first.
        dtype: of `DTYPES`.
        rounds: blocks of each side, in turns, in a set of processes.
        sets: fresh sets of processes.
        tolerance: see `noise.figure`.

    Returns:
        ``rows``: for each operation, number of ranks and size a dict with ``sides``: a `noise.Figure` in
        microseconds for each backend, ``"shm shared"``, ``"copy"`` and ``"triad"``, with ``blocks`` (all blocks'
        medians by set); ``ratios``: a figure for each other backend over the first, and for the first one over the
        copy; ``missing``: what backends said that lack the operation. ``others``: for each number of ranks what other
        programs took, by set. Beside it what was asked for.
    """
    rows: list[dict[str, Any]] = []
    others: dict[str, list[float | None]] = {}
    for ranks in world_sizes:
        runs, beside = [], others.setdefault(str(ranks), [])
        for _ in range(sets):
            with noise.Watch() as watch:
                runs.append(fresh_ranks.run(_set, operations, sizes, compared, dtype, rounds, ranks=ranks))
            beside.append(watch.others)
        for cells in zip(*runs, strict=True):
            about = {"operation": cells[0]["operation"], "ranks": ranks, "bytes": cells[0]["bytes"]}
            rows.append(
                about
                | _figures([cell["blocks"] for cell in cells], compared, beside, tolerance)
                | {"missing": cells[0]["missing"]}
            )
    return {
        "torch": torch.__version__,
        "backends": list(compared),
        "dtype": dtype,
        "number of sets": sets,
        "rounds": rounds,
        "others": others,
        "rows": rows,
    }


def _figures(
    blocks: Sequence[_Blocks], compared: Sequence[str], others: Sequence[float | None], tolerance: float
) -> dict[str, Any]:
    us = {side: [1e6 * statistics.median(one[side]) for one in blocks] for side in blocks[0]}
    sides = {
        side: noise.figure(each, others, tolerance=tolerance)
        | {"blocks": [[1e6 * seconds for seconds in one[side]] for one in blocks]}
        for side, each in us.items()
    }
    ratios = {
        f"{one} / {other}": noise.figure(
            [a / b for a, b in zip(us[one], us[other], strict=True)], others, tolerance=tolerance
        )
        for one, other in _ratios(compared, us)
    }
    return {"sides": sides, "ratios": ratios}


def _table(found: dict[str, Any], keep: bool) -> str:
    columns = sides_of(found)
    ratios = _ratios(found["backends"], columns)
    lines = [["operation", "ranks", "bytes", *columns, *(f"{one} / {other}" for one, other in ratios)]]
    for row in found["rows"]:
        times = ["lacks it" if side in row["missing"] else _time(row["sides"].get(side), keep) for side in columns]
        compared = [_ratio(row["ratios"].get(f"{one} / {other}"), keep) for one, other in ratios]
        lines.append([row["operation"], f"{row['ranks']}", f"{row['bytes']:,}", *times, *compared])
    about = (
        f"torch {found['torch']}, {found['dtype']}; microseconds of the slowest rank: median (from .. to) of "
        + fresh_sets(found["number of sets"])
    )
    return "\n".join([about, *aligned(lines, left=1)])


def _ratios(compared: Sequence[str], sides: Collection[str]) -> list[tuple[str, str]]:
    """Which sides are compared, of those that are there."""
    first = compared[0], compared[0] + SHARED
    pairs = [(other, one) for one in first for other in compared[1:]] + [(one, "copy") for one in first]
    return [(one, other) for one, other in pairs if one in sides and other in sides]


def _time(one: noise.Figure | None, keep: bool) -> str:
    if one is None:
        return "-"
    spread = f" ({one['low']:.1f} .. {one['high']:.1f})" if len(one["samples"]) > 1 else ""
    return noise.shown(one, f"{one['median']:.1f}{spread}", keep)


def _ratio(one: noise.Figure | None, keep: bool) -> str:
    return noise.shown(one, f"{one['median']:.2f}", keep) if one else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    parser = new_parser("ddp-lab bench all-reduce", __doc__)
    parser.add_argument(
        "--operation",
        nargs="+",
        choices=[*OPERATIONS, "all"],
        default=["all_reduce"],
        metavar="NAME",
        help=f"all, or some of {', '.join(OPERATIONS)} (default: all_reduce)",
    )
    choices = backends.available()
    parser.add_argument("--backends", nargs="+", choices=choices, default=list(_BACKENDS), help="(default: both)")
    parser.add_argument("--ranks", type=count, nargs="+", default=[2, 4], metavar="N", help="numbers (default: 2 4)")
    parser.add_argument("--bytes", type=count, nargs="+", default=list(_SIZES), metavar="B", help="sizes of buffers")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=count, default=4, help="blocks of each side in a set (default: 4)")
    parser.add_argument("--sets", type=count, default=5, help="fresh sets of processes (default: 5)")
    add_noise(parser)
    add_picture(parser)
    given = parser.parse_args(argv)
    result = measure(
        given.ranks,
        given.bytes,
        operations=list(OPERATIONS) if "all" in given.operation else given.operation,
        compared=given.backends,
        dtype=given.dtype,
        rounds=given.rounds,
        sets=given.sets,
        tolerance=given.tolerance,
    )
    _draw(result, given.picture, given.keep_noise)
    return show_sound(result, _table(result, given.keep_noise), given.json, given.keep_noise)


def _draw(result: dict[str, Any], path: Path | None, keep: bool) -> None:
    if path is not None:
        from .telling import pictures

        pictures.write(pictures.collectives(result, keep=keep), path)


if __name__ == "__main__":
    sys.exit(main())
