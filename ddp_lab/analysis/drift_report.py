"""What a comparison of the ranks' replicas found, in numbers and words."""

from __future__ import annotations

from dataclasses import dataclass

from ..formatting import ms, names, size

__all__ = ["DriftReport"]

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, repr=False)
class DriftReport:
    """Whether all ranks hold the same parameters and buffers, bit by bit; the same on all ranks.

    Attributes:
        ok: nothing that is compared differs.
        step: the model's synchronised backwards so far; -1 for a plain module.
        first: qualified name of the first parameter or buffer that differs, parameters before buffers; None.
        groups: for `first`, the ranks that hold equal values, together.
        differing: all names that differ.
        pending: buffers that differ now, and become rank 0's before the next forward.
        tensors: how many were compared.
        bytes: how many a rank hashed.
        seconds: how long it took here.
    """

    ok: bool
    step: int
    first: str | None
    groups: Groups
    differing: tuple[str, ...]
    pending: tuple[str, ...]
    tensors: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        cost = f"{self.tensors} tensors, {size(self.bytes)}, {ms(1e3 * self.seconds)}"
        later = (
            f" ({len(self.pending)} buffers differ until the next forward broadcasts rank 0's.)" if self.pending else ""
        )
        if self.ok:
            return f"All ranks hold the same parameters and buffers ({cost}).{later}"
        holders = " | ".join(f"rank{'s' if len(ranks) > 1 else ''} {_join(ranks)}" for ranks in self.groups)
        more = f"; in all {len(self.differing)} differ: {names(self.differing)}" if len(self.differing) > 1 else ""
        after = f" after step {self.step - 1}" if self.step > 0 else ""
        return (
            f"The replicas have drifted apart{after}: '{self.first}' is not the same on all ranks. Equal values are "
            f"held by: {holders}{more} ({cost}).{later} Look for updates that not all ranks make alike: an optimizer "
            "step that is skipped on some ranks, a learning rate or random number of a rank's own, parameters that are "
            "not averaged (no_sync, find_unused_parameters), a comm hook whose result differs (check_hook)."
        )

    __repr__ = __str__


def _join(ranks: tuple[int, ...]) -> str:
    return ", ".join(str(rank) for rank in ranks)
