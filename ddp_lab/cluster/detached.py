"""What ran in a detached cluster while nobody was attached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..formatting import label_of

__all__ = ["LeftCell", "left_cells"]

_LAST_LINES = 10


@dataclass(frozen=True)
class LeftCell:
    """A cell that ran on while no client was attached.

    Attributes:
        label: its name.
        ranks: those that were given it.
        running: those on which it still runs.
        errors: rank -> what it failed with.
        seconds: since it began; of one that has ended, that it took.
        text: rank -> the end of what it has printed, at most 8,192 characters.
    """

    label: str
    ranks: tuple[int, ...]
    running: tuple[int, ...]
    errors: dict[int, str]
    seconds: float
    text: dict[int, str]

    def __str__(self) -> str:
        if self.running:
            head = f"{self.label} still runs on {label_of(self.running)}, for {self.seconds:.0f} s"
        else:
            head = f"{self.label} ended on {label_of(self.ranks)} after {self.seconds:.1f} s"
        lines = [head, *(f"  rank {rank}: {error}" for rank, error in self.errors.items())]
        for rank, text in self.text.items():
            lines += [f"[rank {rank}] {line}" for line in text.splitlines()[-_LAST_LINES:]]
        return "\n".join(lines)


def left_cells(told: Mapping[int, Mapping[str, Any]]) -> tuple[LeftCell, ...]:
    """The cells, by what each rank says of its last one."""
    cells: dict[str, list[int]] = {}
    for rank, answer in sorted(told.items()):
        cells.setdefault(answer["cell"]["id"], []).append(rank)
    made = []
    for ranks in cells.values():
        found = {rank: told[rank]["cell"] for rank in ranks}
        ends = [cell["ended"] or told[rank]["now"] for rank, cell in found.items()]
        made.append(
            LeftCell(
                label=found[ranks[0]]["label"],
                ranks=tuple(ranks),
                running=tuple(rank for rank, cell in found.items() if cell["ended"] is None),
                errors={rank: cell["error"] for rank, cell in found.items() if cell["error"]},
                seconds=max(ends) - min(cell["began"] for cell in found.values()),
                text={rank: text for rank in ranks if (text := told[rank]["text"])},
            )
        )
    return tuple(made)
