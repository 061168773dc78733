"""Small answers between the ranks of a group, through its store: works when the group's collectives do not."""

from __future__ import annotations

import json
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..core import process_groups

__all__ = ["Exchange"]

_used: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Exchange:
    """One conversation; every rank of the group begins it, and calls `all` equally often.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        number = _used.get(group, 0)
        _used[group] = number + 1
        self._store: Any = process_groups.needed_store_of(group)
        self._prefix = f"ddp_lab/exchange/{number}"
        self._ranks = group.size()
        self._rank = group.rank()
        self._turn = 0

    def all(self, answer: Any, seconds: float) -> list[Any]:
        """Every rank's answer, by rank in the group.

        Args:
            answer: what JSON can express.
            seconds: how long to wait for the others.

        Raises:
            RuntimeError: ranks have not answered in time; names them.
        """
        turn, self._turn = self._turn, self._turn + 1
        self._store.set(self._key(turn, self._rank), json.dumps(answer))
        end = time.monotonic() + seconds
        found = [self._wait(turn, rank, end) for rank in range(self._ranks)]
        if turn:  # everyone who has answered now has read the answers before
            self._store.delete_key(self._key(turn - 1, self._rank))
        return [json.loads(text) for text in found]

    def _key(self, turn: int, rank: int) -> str:
        return f"{self._prefix}/{turn}/{rank}"

    def _wait(self, turn: int, rank: int, end: float) -> bytes:
        key = self._key(turn, rank)
        left = max(0.1, end - time.monotonic())
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:
            if self._store.check([key]):
                return bytes(self._store.get(key))
            raise RuntimeError(
                f"rank {rank} of the group did not answer in time: did every rank make this call, and is it alive?"
            ) from error
        return bytes(self._store.get(key))
