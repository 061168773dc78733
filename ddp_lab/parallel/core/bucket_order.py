"""The order of the buckets: assigned anew after the first backward, and, if asked for, when the order drifts.

[Note: an order that drifts]
Buckets are assigned in the order in which gradients arrived in the first backward. If later backwards bring them in
another order (layers are dropped, the graph depends on the data), a bucket waits for its last gradient while others
could go. `follow_order(threshold)` has rank 0 compare, every few synchronised steps, the order of the last backward
with that of the buckets; the ranks learn by a broadcast of one order whether to rebuild, so all rebuild in the same
forward. Nothing is communicated in the steps between.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import process_groups

__all__ = ["OrderFollower", "out_of_place"]


@dataclass
class OrderFollower:
    """When to look at the order, and what counts as drifted.

    Attributes:
        threshold: the share of parameters out of place (0 to 1) above which buckets are assigned anew.
        every: number of synchronised forwards from look to look.
        since: forwards since the last look.
    """

    threshold: float
    every: int
    since: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be a share between 0 and 1, got {self.threshold}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")

    def is_due(self) -> bool:
        """Counts a forward; whether it is time to look."""
        self.since += 1
        if self.since < self.every:
            return False
        self.since = 0
        return True

    def drifted(
        self, arrived: list[int], held: Sequence[int], group: dist.ProcessGroup, device: torch.device
    ) -> list[int] | None:
        """The new order if it has drifted, by what rank 0 sees; on all ranks the same.

        Args:
            arrived: the indices of the parameters in the order in which gradients arrived last.
            held: in the order of the buckets.
            group: the ranks.
            device: of the group's collectives.
        """
        complete = sorted(arrived) == sorted(held)
        if not complete or out_of_place(arrived, held) <= self.threshold:
            arrived = [-1] * len(held)
        order = torch.tensor(arrived, dtype=torch.int64, device=device)
        process_groups.broadcast(order, group)
        return None if int(order[0]) < 0 else [int(index) for index in order.tolist()]


def out_of_place(arrived: Sequence[int], held: Sequence[int]) -> float:
    """The share of parameters that would have to move to bring one order into the other.

    All but a longest common subsequence have to, so one late gradient counts once, however far it has moved.
    """
    place = {index: position for position, index in enumerate(held)}
    ends: list[int] = []  # ends[n]: the smallest end of an increasing run of n + 1 places
    for index in arrived:
        at = bisect.bisect_left(ends, place[index])
        ends[at : at + 1] = [place[index]]
    return 1 - len(ends) / len(held) if held else 0.0
