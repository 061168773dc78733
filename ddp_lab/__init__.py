"""See and fix what data-parallel training does: ranks, cells and live bucket timelines in a notebook.

Public names are imported when first used (PEP 562), so that the notebook side never loads torch and a rank never
loads widgets. See ARCHITECTURE.md for which module lives on which side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

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

_NAMES = [*_PUBLIC, *_MODULES, "__version__", "load_ipython_extension", "unload_ipython_extension"]
if not TYPE_CHECKING:  # type checkers understand a list of literals alone, and the names below without one
    __all__ = _NAMES

if TYPE_CHECKING:
    from . import faults as faults
    from . import recording as recording
    from .cluster.attached import attach as attach
    from .cluster.cells.run import CellResult as CellResult
    from .cluster.cluster import Cluster as Cluster
    from .cluster.cluster import current_cluster as current_cluster
    from .engine.restore import restore_from as restore_from
    from .errors import CellError as CellError
    from .errors import ClusterError as ClusterError
    from .errors import DdpLabError as DdpLabError
    from .errors import ExtensionError as ExtensionError
    from .errors import RankFailure as RankFailure
    from .errors import ScheduleError as ScheduleError
    from .parallel.data_parallel import DataParallel as DataParallel
    from .parallel.data_parallel import data_parallel as data_parallel
    from .parallel.distributed import DistributedDataParallel as DistributedDataParallel
    from .parallel.hook_check import check_hook as check_hook
    from .parallel.install import install as install
    from .parallel.live import rehearsal as rehearsal
    from .parallel.monitoring.drift import check_drift as check_drift
    from .parallel.observe import observe as observe
    from .simulation.link_model import LinkModel as LinkModel
    from .timeline.comparison import compare as compare
    from .timeline.timeline import Timeline as Timeline


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_NAMES)


def load_ipython_extension(shell: Any) -> None:
    """Registers the magics: called by `%load_ext ddp_lab`."""
    importlib.import_module(".notebook.magics", __name__).load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Stops the current cluster and removes the magics: called by `%unload_ext ddp_lab`."""
    importlib.import_module(".notebook.magics", __name__).unload(shell)
