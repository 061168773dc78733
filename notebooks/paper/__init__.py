"""The evaluation of the DDP paper (Li et al., VLDB 2020), on this machine: what the notebooks beside it measure.

Each figure of the paper has three kinds of points, which are kept apart and marked wherever they are shown: *measured*
for the ranks at hand, *simulated* for the paper's cluster (`paper.hardware`), and *published* ones
(`paper.figures`).

- 2: all-reduce of the same number of parameters with different call sizes, and readiness of gradients in a backward.
- 6: step time breakdown, with and without overlap.
- 7, 8: step time by bucket size (the paper: 16 and 32 GPUs), with outliers.
- 9: step time by number of ranks.
- 10: the same if gradients are averaged once in 1, 2, 4 or 8 backwards.
- 11: the effect of that on convergence, with real data.
- 12: round robin over 1, 3 and 5 process groups.

A figure is made in these steps: `on_ranks` measures, on all ranks of the default group at the same time; `result` makes
rows from the results of one or several sets of processes, with simulated and published values; `table` and `picture`
show them. The notebooks `paper_*.ipynb` call `on_ranks` in a cell. `measure` starts fresh sets of processes for it: the
command `python -m paper --figure N` in their folder.

This package imports torch only on the ranks, so that a notebook's kernel can use it.
"""

from __future__ import annotations

from . import hardware
from .figures import FIGURES, main, measure, on_ranks, picture, result
from .rows import table
from .settings import Settings

__all__ = ["FIGURES", "Settings", "hardware", "main", "measure", "on_ranks", "picture", "result", "table"]
