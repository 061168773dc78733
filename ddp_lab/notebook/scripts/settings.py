"""How a script starts its ranks: as `%cluster start` in the notebook did."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from IPython.core.error import UsageError

from ...machine import visible_gpus
from ..options import Parser, add_start_options
from .cells import NotebookCell

__all__ = ["StartSettings", "settings_of"]

_START = re.compile(r"^[ \t]*%cluster[ \t]+start\b(.*)$", re.MULTILINE)
_CPU_BACKENDS = ("gloo", "shm", "mpi")
_DEFAULT_RANKS = 2
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class StartSettings:
    """The start of a notebook's cluster.

    Attributes:
        n: number of ranks.
        backend: as for `%cluster start`; ``"auto"`` chooses by the devices.
        env: environment variables of the ranks.
        hosts: the hosts as `%cluster start --hosts` names them; "" for this one.
        name: the cluster's name; "" for none.
        threads: of torch on each rank; None shares the processor's cores among the ranks, as a cluster does.
    """

    n: int = _DEFAULT_RANKS
    backend: str = "auto"
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: str = ""
    name: str = ""
    threads: int | None = None


def settings_of(cells: Iterable[NotebookCell], world_size: int | None = None) -> StartSettings:
    """The settings of the last `%cluster start` in cells.

    Args:
        cells: also those that are left out of the script.
        world_size: of the running cluster; None: one rank per GPU, else two, unless the line says otherwise.
    """
    parser = Parser("%cluster start", "")
    add_start_options(parser)
    options = parser.parse_line("")
    for cell in cells:
        for line in [] if cell.left_out else _START.findall(cell.text):
            try:
                options = parser.parse_line(line) or options
            except UsageError:  # of a file whose cell has not run
                continue
    assert options is not None
    env = dict(options.env)
    if options.devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, options.devices))
    gpus = [] if options.backend in _CPU_BACKENDS else visible_gpus({**os.environ, **env})
    threads = env.get(_THREADS) or os.environ.get(_THREADS) or ""
    return StartSettings(
        n=options.n or world_size or len(gpus) or _DEFAULT_RANKS,
        backend=options.backend,
        env=env,
        hosts=options.hosts or "",
        name=options.name or "",
        threads=int(threads) if threads.isdigit() else None,
    )
