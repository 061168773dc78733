"""Which ranks of a model's group still have inputs, inside a join context. See [Note: join]."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import _JoinConfig

from . import process_groups

__all__ = ["UnevenInputs"]

_RANKS = 3  # index of the first rank's element in the row


class UnevenInputs:
    """The data that ranks exchange in each iteration of a join context; outside one, all ranks train.

    Attributes:
        config: of torch's `Join`, which sets it.
        divide_by_initial_world_size: divide gradients by the size of the group, not by the number of training ranks.
        warned: whether it warned of SyncBatchNorm in this context.
        last_joiner: the rank whose model all ranks got at the end of the last context; None before.
        work: the `Work` of the last row; the reducer divides by its result.
    """

    def __init__(self) -> None:
        self.config: Any = _JoinConfig.construct_disabled_join_config()
        self.divide_by_initial_world_size = True
        self.warned = False
        self.last_joiner: int | None = None
        self.work: Any = None
        self._row = torch.empty(0)

    @property
    def uneven(self) -> bool:
        """Whether this is inside a join context."""
        return bool(self.config.enable)

    def leave(self) -> None:
        """Ends the context, which torch does not. Later forwards do not communicate about it."""
        self.config = _JoinConfig.construct_disabled_join_config()

    def meet(self, group: dist.ProcessGroup, device: torch.device, *, active: bool, sync: bool) -> None:
        """Starts the all-reduce of one row: how many ranks are active, whether they synchronise, and which they are.

        Args:
            group: the model's.
            device: of its collectives.
            active: whether this rank trains.
            sync: whether its backward is synchronised.
        """
        row = torch.zeros(_RANKS + group.size(), dtype=torch.float32, device=device)
        if active:
            row[0] = 1
            row[1] = sync
            row[2] = torch.is_grad_enabled()
            row[_RANKS + group.rank()] = 1
        self._row, self.work = row, process_groups.all_reduce_async(row, group)

    def settle(self) -> list[float]:
        """The row, once all ranks have contributed: active ranks, those that synchronise, with gradients; each rank."""
        process_groups.finish(self.work)
        return list(self._row.tolist())

    def source(self) -> int:
        """The rank, in the model's group, whose buffers count in this iteration: rank 0 outside a join context."""
        if not self.uneven:
            return 0
        return max(rank for rank, is_active in enumerate(self.settle()[_RANKS:]) if is_active)

    def divisor(self, size: int) -> int:
        """The divisor of the sum of this backward's gradients over a group of `size` ranks."""
        if not self.uneven or self.divide_by_initial_world_size:
            return size
        return int(self.settle()[0])
