"""`ddp-lab bench paper --figure N`: the evaluation of the DDP paper (Li et al., VLDB 2020), on this machine.

Each figure of the paper has three kinds of points, which are kept apart and marked wherever they are shown: *measured*
for the ranks at hand, *simulated* for the paper's cluster (`ddp_lab.bench.paper.hardware`), and *published* ones
(`ddp_lab.bench.paper.figures`).

- 2: all-reducing as many parameters in calls of different sizes, and when gradients become ready in a backward.
- 6: what a step consists of, with and without overlap.
- 7, 8: the step against the size of the buckets (the paper: 16 and 32 GPUs), with its outliers.
- 9: the step against the number of ranks.
- 10: the same if gradients are averaged once in 1, 2, 4 or 8 backwards.
- 11: what that does to convergence, on real data.
- 12: collectives that go to 1, 3 and 5 groups in turn.

The way of a figure: `on_ranks` measures, on all ranks of the default group at the same time; `result` makes rows of
what one or several sets of processes returned, with what is simulated and published beside them; `table` and `picture`
tell and draw them. `measure` starts fresh sets of processes for it; the notebooks `paper_*.ipynb` call `on_ranks` in a
cell.

This package imports torch on the ranks alone, so that a notebook's kernel can use it.
"""

from __future__ import annotations

from . import hardware
from .figures import FIGURES, main, measure, on_ranks, picture, result
from .rows import table
from .settings import Settings

__all__ = ["FIGURES", "Settings", "hardware", "main", "measure", "on_ranks", "picture", "result", "table"]
