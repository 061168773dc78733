"""Every collective with random arguments: on a group, and the same on Gloo."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["COLLECTIVES", "call"]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
SIZES = (0, 1, 2, 3, 17, 1_000, 4_096, 70_001, 300_000)
REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


@dataclass(frozen=True)
class _Collective:
    """``run(output, group=, async_op=)`` calls it on an output of a group; `exact`: its bits are Gloo's."""

    run: Callable[..., Any]
    output: Callable[[Any], Any]
    exact: bool = True


def call(name: str, draw: random.Random, group: Any, gloo: Any, *, later: bool, what: str) -> None:
    """Calls a collective on both groups, with what is drawn alike on all ranks: its results must be equal."""
    collective = COLLECTIVES[name](draw, dist.get_rank(), dist.get_world_size())
    found, expected = collective.output(group), collective.output(gloo)
    work = collective.run(found, group=group, async_op=later)
    if work is not None:
        work.wait()
    collective.run(expected, group=gloo, async_op=False)
    if found is not None:
        _assert_close(_joined(found), _joined(expected), collective.exact, what)


def _joined(output: Any) -> torch.Tensor:
    return torch.cat(output) if isinstance(output, list) else output


def _assert_close(found: torch.Tensor, expected: torch.Tensor, exact: bool, what: str) -> None:
    if exact:
        assert torch.equal(found, expected), what
        return
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-12}.get(found.dtype, 1e-5)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=what)


def _values(draw: random.Random, dtype: torch.dtype, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """Of this rank; small, so that float16 holds their sums and products exactly enough."""
    made = torch.Generator().manual_seed(draw.randrange(1 << 30) + rank)
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=made) * 2 - 1).to(dtype)
    return torch.randint(0, 4, shape, generator=made).to(dtype)


def _drawn(draw: random.Random, rank: int) -> torch.Tensor:
    return _values(draw, draw.choice((*FLOATS, *INTEGERS)), (draw.choice(SIZES),), rank)


def _empty_like(tensor: torch.Tensor, size: int) -> Callable[[Any], list[torch.Tensor]]:
    return lambda group: [torch.empty_like(tensor) for _ in range(size)]


def _reduced(draw: random.Random, rank: int, size: int) -> tuple[torch.Tensor, Any, bool]:
    dtype = draw.choice((*FLOATS, *INTEGERS))
    shape = (draw.choice(SIZES),) if draw.random() < 0.8 else (draw.randrange(1, 40), draw.randrange(1, 40))
    op = draw.choice(REDUCTIONS)
    return _values(draw, dtype, shape, rank), op, size == 2 or not dtype.is_floating_point


def _all_reduce(draw: random.Random, rank: int, size: int) -> _Collective:
    mine, op, exact = _reduced(draw, rank, size)
    shared = draw.randrange(1 << size) >> rank & 1  # on some ranks only, mostly

    def output(group: Any) -> torch.Tensor:
        if not shared or dist.get_backend(group) != "shm":
            return mine.clone()
        backend = group._get_backend(mine.device)  # in memory that the other ranks of the group read
        copy: torch.Tensor = backend.allocate_tensor(mine.numel(), dtype=mine.dtype, device=mine.device)
        return copy.view(mine.shape).copy_(mine)

    return _Collective(lambda out, **options: dist.all_reduce(out, op, **options), output, exact)


def _reduce(draw: random.Random, rank: int, size: int) -> _Collective:
    mine, op, exact = _reduced(draw, rank, size)
    root = draw.randrange(size)

    def run(out: torch.Tensor, group: Any, async_op: bool) -> Any:
        work = dist.reduce(out, root, op, group=group, async_op=async_op)
        if rank != root and dist.get_backend(group) != "shm":  # Gloo leaves anything there
            if work is not None:
                work.wait()
            out.copy_(mine)
        return work

    return _Collective(run, lambda group: mine.clone(), exact or rank != root)


def _broadcast(draw: random.Random, rank: int, size: int) -> _Collective:
    mine, root = _drawn(draw, rank), draw.randrange(size)
    return _Collective(lambda out, **options: dist.broadcast(out, root, **options), lambda group: mine.clone())


def _all_gather(draw: random.Random, rank: int, size: int) -> _Collective:
    mine = _drawn(draw, rank)
    return _Collective(lambda out, **options: dist.all_gather(out, mine, **options), _empty_like(mine, size))


def _gather(draw: random.Random, rank: int, size: int) -> _Collective:
    mine, root = _drawn(draw, rank), draw.randrange(size)
    output = _empty_like(mine, size) if rank == root else lambda group: None
    return _Collective(lambda out, **options: dist.gather(mine, out, root, **options), output)


def _scatter(draw: random.Random, rank: int, size: int) -> _Collective:
    mine, root = _drawn(draw, rank), draw.randrange(size)
    sent = [mine + number for number in range(size)] if rank == root else None
    return _Collective(
        lambda out, **options: dist.scatter(out, sent, root, **options), lambda group: torch.empty_like(mine)
    )


def _reduce_scatter(draw: random.Random, rank: int, size: int) -> _Collective:
    op, first = draw.choice(REDUCTIONS), _drawn(draw, rank)
    sent = [first, *(_values(draw, first.dtype, first.shape, rank) for _ in range(size - 1))]

    def run(out: torch.Tensor, group: Any, async_op: bool) -> Any:
        if dist.get_backend(group) != "gloo":
            return dist.reduce_scatter(out, [one.clone() for one in sent], op, group=group, async_op=async_op)
        whole = torch.stack(sent)
        dist.all_reduce(whole, op, group=group)
        out.copy_(whole[rank])
        return None

    exact = size == 2 or not first.dtype.is_floating_point
    return _Collective(run, lambda group: torch.empty_like(first), exact)


def _all_to_all(draw: random.Random, rank: int, size: int) -> _Collective:
    dtype = draw.choice((*FLOATS, *INTEGERS))
    rows = [[draw.choice((0, 1, 5, 2_000)) for _ in range(size)] for _ in range(size)]  # sender, receiver
    sent, comes = _values(draw, dtype, (sum(rows[rank]), 3), rank), [rows[other][rank] for other in range(size)]
    return _Collective(
        lambda out, **options: dist.all_to_all_single(out, sent, comes, rows[rank], **options),
        lambda group: torch.empty(sum(comes), 3, dtype=dtype),
    )


def _barrier(draw: random.Random, rank: int, size: int) -> _Collective:
    return _Collective(lambda out, **options: dist.barrier(**options), lambda group: None)


_ALL = (_all_reduce, _reduce, _broadcast, _all_gather, _gather, _scatter, _reduce_scatter, _all_to_all, _barrier)
COLLECTIVES = {function.__name__.removeprefix("_"): function for function in _ALL}
