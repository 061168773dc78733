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

from ...bucketing import assign_buckets
from . import process_groups
from .model_state import ModelState

__all__ = ["BucketOrder", "OrderFollower", "out_of_place"]


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

    def look(self, model: ModelState) -> list[int] | None:
        """The new order if it is time to look and the order has drifted; on all ranks the same."""
        self.since += 1
        if self.since < self.every:
            return None
        self.since = 0
        arrived = list(model.reducer.ready_order())
        held = [index for bucket in model._assignment for index in bucket]
        complete = sorted(arrived) == sorted(held)
        if not complete or out_of_place(arrived, held) <= self.threshold:
            arrived = [-1] * len(held)
        order = torch.tensor(arrived, dtype=torch.int64, device=model.device)
        process_groups.broadcast(order, model.process_group)
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


class BucketOrder(ModelState):
    """The part of `DistributedDataParallel` that assigns its buckets anew."""

    def follow_order(self, threshold: float | None, every: int = 20) -> None:
        """Assigns the buckets anew when gradients arrive in another order than that of the buckets.

        All ranks call it, with the same arguments.

        Args:
            threshold: the share of parameters (0 to 1) that may arrive out of place; None ends it.
            every: rank 0 looks every so many synchronised forwards, and broadcasts what it found.
        """
        self._order_follower = None if threshold is None else OrderFollower(threshold, every)

    def _rebuild_if_due(self, sync: bool) -> None:
        """Everything that forwards communicate about the order, `sync`: in a synchronised one."""
        if self.reducer.rebuild_due():
            self._rebuild()
        elif sync and self._order_follower is not None:
            order = self._order_follower.look(self)
            if order is not None:
                self._reassign(order)

    def _rebuild(self) -> None:
        """Assigns the buckets anew in the order in which rank 0's gradients became ready. Once; all ranks."""
        order = torch.tensor(self.reducer.ready_order(), dtype=torch.int64, device=self.device)
        process_groups.broadcast(order, self.process_group)
        self._reassign(order.tolist())

    def _reassign(self, order: list[int]) -> None:
        self._assignment = assign_buckets(
            self._sizes,
            self._keys,
            self._caps.rebuilt(),
            order,
            alone=self._sparse,
            small_last=self._caps.small_last,
        )
        self.reducer.rebuild(self._assignment)
        self._has_rebuilt_buckets = True
        self._describe_assignment()
