"""See and fix what data-parallel training does: ranks, cells and live bucket timelines in a notebook.

Public names are imported when first used (PEP 562), so that the notebook side never loads torch and a rank never
loads widgets. See ARCHITECTURE.md for which module lives on which side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

# public name -> module that defines it
_PUBLIC = {
    "CellError": "errors",
    "CellResult": "cluster.cells.run",
    "Cluster": "cluster.cluster",
    "ClusterError": "errors",
    "DataParallel": "parallel.data_parallel",
    "DdpLabError": "errors",
    "DistributedDataParallel": "parallel.distributed",
    "ExtensionError": "errors",
    "LinkModel": "simulation.link_model",
    "RankFailure": "errors",
    "ScheduleError": "errors",
    "Timeline": "timeline.timeline",
    "attach": "cluster.attached",
    "check_drift": "parallel.monitoring.drift",
    "check_hook": "parallel.hook_check",
    "compare": "timeline.comparison",
    "current_cluster": "cluster.cluster",
    "data_parallel": "parallel.data_parallel",
    "install": "parallel.install",
    "observe": "parallel.observe",
    "restore_from": "engine.restore",
}
_MODULES = {"faults": "faults", "recording": "recording", "rehearsal": "parallel.live.rehearsal"}

__all__ = [  # noqa: RUF022 (classes, modules, the rest)
    "CellError",
    "CellResult",
    "Cluster",
    "ClusterError",
    "DataParallel",
    "DdpLabError",
    "DistributedDataParallel",
    "ExtensionError",
    "LinkModel",
    "RankFailure",
    "ScheduleError",
    "Timeline",
    "attach",
    "check_drift",
    "check_hook",
    "compare",
    "current_cluster",
    "data_parallel",
    "install",
    "observe",
    "restore_from",
    "faults",
    "recording",
    "rehearsal",
    "__version__",
    "load_ipython_extension",
    "unload_ipython_extension",
]

if TYPE_CHECKING:
    from . import faults, recording
    from .cluster.attached import attach
    from .cluster.cells.run import CellResult
    from .cluster.cluster import Cluster, current_cluster
    from .engine.restore import restore_from
    from .errors import CellError, ClusterError, DdpLabError, ExtensionError, RankFailure, ScheduleError
    from .parallel.data_parallel import DataParallel, data_parallel
    from .parallel.distributed import DistributedDataParallel
    from .parallel.hook_check import check_hook
    from .parallel.install import install
    from .parallel.live import rehearsal
    from .parallel.monitoring.drift import check_drift
    from .parallel.observe import observe
    from .simulation.link_model import LinkModel
    from .timeline.comparison import compare
    from .timeline.timeline import Timeline


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Registers the magics: called by `%load_ext ddp_lab`."""
    importlib.import_module(".notebook.magics", __name__).load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Stops the current cluster and removes the magics: called by `%unload_ext ddp_lab`."""
    importlib.import_module(".notebook.magics", __name__).unload(shell)
