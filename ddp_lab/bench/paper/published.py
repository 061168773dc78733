"""What the paper says, as far as it is known here: reference points beside measured and simulated ones."""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import GAINS

__all__ = ["PAPER", "POINTS", "Point", "of_figure"]

PAPER = "Li et al., VLDB 2020 (arXiv 2006.15704)"
_DIGEST = "recalled, not checked against the paper's figure"


@dataclass(frozen=True)
class Point:
    """One statement of the paper.

    Attributes:
        figure: its number.
        model, backend: of the paper's; "" where it is about all of them.
        what: in words.
        values: the number, or the ends of a range.
        unit: of the values.
        approximate: nobody has compared the number with the paper's own figure.
    """

    figure: int
    model: str
    backend: str
    what: str
    values: tuple[float, ...]
    unit: str
    approximate: bool = True

    @property
    def source(self) -> str:
        """Where it is from, and how far to trust it."""
        return f"{PAPER}, figure {self.figure}" + (f"; approximate: {_DIGEST}" if self.approximate else "")


_GAINS = [
    Point(6, model, backend, "overlap saves", (gain,), "% of the step without it", approximate=False)
    for (model, backend), gain in GAINS.items()
]
POINTS = [
    Point(2, "", "gloo", "larger calls gain nothing more from", (5e5,), "parameters in a call"),
    Point(2, "", "nccl", "larger calls still gain at", (2e7,), "parameters in a call"),
    *_GAINS,
    Point(7, "ResNet50", "nccl", "the best size of buckets is", (10, 25), "MB"),
    Point(7, "ResNet50", "gloo", "the best size of buckets is", (5,), "MB"),
    Point(7, "BERT", "nccl", "the best size of buckets is", (50,), "MB"),
    Point(9, "ResNet50", "nccl", "256 GPUs: a step takes", (2.0,), "x as long as on one"),
    Point(9, "BERT", "nccl", "256 GPUs: a step takes", (1.65,), "x as long as on one"),
    Point(10, "ResNet50", "nccl", "256 GPUs, averaged every 8: saves", (38,), "% of the time"),
    Point(10, "ResNet50", "gloo", "256 GPUs, averaged every 8: saves", (57,), "% of the time"),
    Point(12, "BERT", "nccl", "16 GPUs: three groups are faster than one by", (33,), "%"),
]
"""Figure 7's hold for figure 8, too. Figure 11 is about curves: `no_sync` harms convergence with the large batch."""


def of_figure(number: int) -> list[Point]:
    """The statements of a figure."""
    return [point for point in POINTS if point.figure == (7 if number == 8 else number)]
