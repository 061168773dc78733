"""Times an all-reduce, or other collectives of CPU tensors, with every backend.

In fresh sets of processes, for each size in turn: some calls with one backend, then with the next one, then two limits
of the machine that all ranks measure at the same time. ``copy`` is torch's ``copy_`` of as many bytes from one buffer
to another (a memcpy). ``triad`` is STREAM's: a = b + 0.5 c by torch's ``add`` with ``out=``, on three buffers of as
many bytes each. ``shm shared`` is an all-reduce of a buffer in the backend's own memory. A call is timed from a
barrier, on every rank; the slowest rank counts, because all wait for it. The result is the median over the sets of each
set's median; `ddp_lab.bench.measuring.noise` decides which results are too noisy to show.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..command_line import count
from .measuring import collectives, command, fresh_ranks, noise
from .measuring.collectives import DTYPES, OPERATIONS, SHARED, Buffers
from .measuring.command import option

__all__ = ["main", "measure"]

_SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 25 << 20)
_BACKENDS = ("shm", "gloo")
_BLOCK_SECONDS = 0.15  # of a block of calls, about
_WARM_UP = 3
_CALLS = (5, 200)  # in a block: at least, at most

_Blocks = dict[str, list[float]]  # side -> median seconds of each block
_Side = tuple[torch.Tensor, Callable[[], Any]]  # what is filled anew before each call, and the call


def _memory_of(group: Any, like: torch.Tensor) -> torch.Tensor | None:
    """A tensor of the same shape and type in memory of the group's backend; None if it has none to give."""
    backend = group._get_backend(like.device)
    if not backend.supports_tensor_alloc(like.device):
        return None
    made: torch.Tensor = backend.allocate_tensor(like.numel(), dtype=like.dtype, device=like.device)
    return made


def _sides(operation: str, buffers: Buffers, groups: dict[str, Any]) -> tuple[dict[str, _Side], dict[str, str]]:
    """What is to be timed, and what backends say that lack the operation."""
    calls = {name: partial(OPERATIONS[operation], buffers, group) for name, group in groups.items()}
    missing = {name: words for name, call in calls.items() if (words := collectives.lacks(call))}
    sides: dict[str, _Side] = {name: (buffers.whole, call) for name, call in calls.items() if name not in missing}
    for name, group in groups.items() if operation == "all_reduce" else ():
        shared = _memory_of(group, buffers.whole)
        if shared is not None:
            sides[name + SHARED] = shared, partial(dist.all_reduce, shared, group=group)
    if operation != "barrier":
        sides |= {name: (buffers.whole, call) for name, call in collectives.limits(buffers).items()}
    return sides, missing


def _set(operations: Sequence[str], sizes: Sequence[int], names: Sequence[str], dtype: str, rounds: int) -> Any:
    """For each operation and size what one set of processes found; on every rank the same, that of the slowest."""
    meeting = collectives.groups(["shm"])["shm"]  # its barrier lets all ranks go within microseconds
    groups = collectives.groups(names)
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
    ranks: Sequence[int] = (2, 4),
    sizes: Sequence[int] = _SIZES,
    *,
    operations: Sequence[str] = ("all_reduce",),
    backends: Sequence[str] = _BACKENDS,
    dtype: str = "float32",
    rounds: int = 4,
    sets: int = 5,
    tolerance: float = noise.TOLERANCE,
) -> dict[str, Any]:
    """Measures all of it.

    Args:
        ranks: numbers of ranks.
        sizes: bytes; see `ddp_lab.bench.measuring.collectives` for what they are the size of.
        operations: of `OPERATIONS`, or ``"all"``.
        backends: their names; the others are compared with the first.
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
    chosen = list(OPERATIONS) if "all" in operations else operations
    rows: list[dict[str, Any]] = []
    others: dict[str, list[float | None]] = {}
    for world in ranks:
        call = (_set, chosen, sizes, backends, dtype, rounds)
        runs, beside = noise.of_sets(sets, lambda _, call=call, world=world: fresh_ranks.run(*call, ranks=world))  # type: ignore[misc]
        others[str(world)] = beside
        judge = partial(noise.figure, others=beside, tolerance=tolerance)
        for cells in zip(*runs, strict=True):
            about = {"operation": cells[0]["operation"], "ranks": world, "bytes": cells[0]["bytes"]}
            figures = _figures([cell["blocks"] for cell in cells], backends, judge)
            rows.append(about | figures | {"missing": cells[0]["missing"]})
    return {
        "torch": torch.__version__,
        "backends": list(backends),
        "dtype": dtype,
        "number of sets": sets,
        "rounds": rounds,
        "others": others,
        "rows": rows,
    }


def _figures(blocks: Sequence[_Blocks], compared: Sequence[str], judge: noise.Judge) -> dict[str, Any]:
    us = {side: [[1e6 * seconds for seconds in one[side]] for one in blocks] for side in blocks[0]}
    medians = {side: [statistics.median(one) for one in each] for side, each in us.items()}
    return {
        "sides": {side: judge(medians[side]) | {"blocks": us[side]} for side in us},
        "ratios": {
            f"{one} / {other}": judge([a / b for a, b in zip(medians[one], medians[other], strict=True)])
            for one, other in _ratios(compared, us)
        },
    }


def _ratios(compared: Sequence[str], sides: Collection[str]) -> list[tuple[str, str]]:
    """Which sides are compared, of those that are there."""
    first = compared[0], compared[0] + SHARED
    pairs = [(other, one) for one in first for other in compared[1:]] + [(one, "copy") for one in first]
    return [(one, other) for one, other in pairs if one in sides and other in sides]


def _table(found: dict[str, Any], keep: bool) -> str:
    sides = collectives.sides_of(found)
    ratios = [f"{one} / {other}" for one, other in _ratios(found["backends"], sides)]
    lines = [["operation", "ranks", "bytes", *sides, *ratios]]
    for row in found["rows"]:
        times = [
            "not supported" if side in row["missing"] else noise.told(row["sides"].get(side), 1, keep) for side in sides
        ]
        some = [row["ratios"].get(name) for name in ratios]
        compared = [noise.shown(one, f"{one['median']:.2f}", keep) if one else "-" for one in some]
        lines.append([row["operation"], f"{row['ranks']}", f"{row['bytes']:,}", *times, *compared])
    about = (
        f"torch {found['torch']}, {found['dtype']}; microseconds of the slowest rank: median (from .. to) of "
        + noise.fresh_sets(found["number of sets"])
    )
    return "\n".join([about, *command.aligned(lines, left=1)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    options = [
        option(
            "--operation",
            dest="operations",
            nargs="+",
            choices=[*OPERATIONS, "all"],
            metavar="NAME",
            help=f"all, or some of {', '.join(OPERATIONS)}",
        ),
        option("--backends", nargs="+", choices=collectives.available()),
        option("--ranks", type=count, nargs="+", metavar="N", help="numbers of ranks"),
        option("--bytes", type=count, nargs="+", dest="sizes", metavar="B", help="buffer sizes in bytes"),
        option("--dtype", choices=DTYPES),
        option("--rounds", type=count, help="blocks per backend in each set"),
        command.SETS,
    ]
    return command.run("ddp-lab bench all-reduce", __doc__, measure, _table, options, argv)
