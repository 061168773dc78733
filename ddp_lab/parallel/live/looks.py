"""Looks at values while training runs, asked for by the client: watched gradients, compared replicas.

[Note: looks while training runs]
To watch a step and to compare replicas all ranks communicate, so they must begin with the same backward. That goes as
for other buckets ([Note: a change while training runs]): rank 0, told last, writes to the group's store after how many
backwards; all find it there. Nothing is assigned anew, and no generation ends. A rejoin drops what was asked for; if it
came when only some ranks had begun to watch, `Monitors.settle` lets all of them watch.
"""

from __future__ import annotations

from ...protocol.commands import Look
from ..core import process_groups
from ..core.synchronizer import GradientSynchronizer
from ..monitoring.drift import compare, describe, describe_failure
from ..monitoring.monitors import Monitors

__all__ = ["PendingLook", "check_replicas"]


class PendingLook:
    """A look that this rank has been told of.

    Args:
        name: of the request, unique in the life of the group's store.
        wanted: what is asked for.
        decides: this is rank 0 of the model's group.
    """

    def __init__(self, name: str, wanted: Look, *, decides: bool) -> None:
        self.name, self.wanted = name, wanted
        self._decides = decides
        self._at: int | None = None

    def look(self, sync: GradientSynchronizer, monitors: Monitors) -> bool:
        """Before a synchronised forward; returns whether it is done."""
        if self._at is None:
            self._find_out(sync)
        if self._at is None or sync.reducer.finished() < self._at:
            return False
        if self.wanted.gradients is not None:
            monitors.set_gradients(self.wanted.gradients)
        if self.wanted.drift is not None:
            monitors.set_drift(self.wanted.drift)
        if self.wanted.check:
            check_replicas(sync)
        return True

    def _find_out(self, sync: GradientSynchronizer) -> None:
        store = process_groups.needed_store_of(sync.group)
        key = f"ddp_lab/look/{sync.reducer_id}/{self.name}"
        if self._decides:
            self._at = sync.reducer.finished() + 1
            store.set(key, str(self._at))
            store.check([key])  # answered when the store has it
        elif store.check([key]):
            self._at = int(store.get(key).decode())


def check_replicas(sync: GradientSynchronizer) -> None:
    """Compares the replicas now, and tells the timeline what was found or why it could not be done."""
    if sync.inputs.uneven:
        why = "inside join() ranks that have run out of inputs would not take part: check after it"
        return describe_failure(sync, why)
    try:
        describe(sync, compare(sync))
    except RuntimeError as error:  # whoever asked is told; the training goes on
        describe_failure(sync, str(error))
