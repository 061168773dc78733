"""Training steps that take turns, on ranks that must take equally many."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from .workloads import Step

__all__ = ["block", "rank_zeros", "take_turns"]

_BLOCK_S = 0.06  # a block is as many steps as fit, at least one

Side = TypeVar("Side")


def block(step: Step, count: int) -> list[float]:
    """The times of `count` steps in ms, begun together on all ranks."""
    dist.barrier()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def rank_zeros(value: int) -> int:
    """Rank 0's number, on all ranks: what depends on a clock must not differ between them."""
    told = torch.tensor([value])
    dist.broadcast(told, 0)
    return int(told.item())


def take_turns(
    steps: Mapping[Side, Step],
    warm_up: Mapping[Side, int],
    until: float,
    shuffle: random.Random,
    each: dict[Side, list[float]] | None = None,
) -> dict[Side, list[float]]:
    """Times all sides, block by block, in changing order; called on all ranks of the default group.

    Args:
        steps: what is timed.
        warm_up: for each side how many steps are taken first and not counted.
        until: about when to stop, of `time.monotonic`.
        shuffle: seeded alike on all ranks.
        each: gets every step that is counted, ms.

    Returns:
        For each side its median step in each turn (at least three), ms.
    """
    sides = list(steps)
    warm = [[statistics.median(block(steps[side], 1)) for _ in range(warm_up[side])] for side in sides]
    usual = statistics.median(times[-1] for times in warm) / 1e3
    count = rank_zeros(max(1, int(_BLOCK_S / usual)))
    times: dict[Side, list[float]] = {side: [] for side in sides}
    begin, turn, turns = time.monotonic(), 0, 2
    while turn < turns:
        shuffle.shuffle(sides)
        for side in sides:
            taken = block(steps[side], count)
            times[side].append(statistics.median(taken))
            if each is not None:
                each.setdefault(side, []).extend(taken)
        turn += 1
        if turn == 2:
            a_turn = (time.monotonic() - begin) / turn
            turns = rank_zeros(max(3, round((until - begin) / a_turn)))
    return times
