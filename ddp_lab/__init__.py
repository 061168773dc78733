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
    "BucketStateError": "errors",
    "CellError": "errors",
    "CellResult": "cluster.cells.run",
    "Cluster": "cluster.cluster",
    "ClusterError": "errors",
    "CommModel": "simulation.link_model",
    "DataParallel": "parallel.data_parallel",
    "DdpLabError": "errors",
    "DistributedDataParallel": "parallel.distributed",
    "ExtensionError": "errors",
    "RankFailure": "errors",
    "Timeline": "timeline.timeline",
    "check_drift": "parallel.monitoring.drift",
    "check_hook": "parallel.hook_check",
    "compare": "timeline.comparison",
    "copy_state_from": "engine.restore",
    "current_cluster": "cluster.cluster",
    "data_parallel": "parallel.data_parallel",
    "follow": "cluster.followed",
    "measure_memory": "parallel.monitoring.memory",
    "observe": "parallel.observe",
    "replace_torch_ddp": "parallel.replacement",
    "serve_doctor": "diagnosis.on_rank.doctor_page",
    "serve_mcp": "assistants.kernel_server",
}
_MODULES = {"fault_injection": "parallel.live.fault_injection", "faults": "faults", "recording": "recording"}
_SECOND = {"attach": "follow", "install": "replace_torch_ddp", "restore_from": "copy_state_from"}  # names of the same

_NAMES = [*_PUBLIC, *_MODULES, "__version__", "load_ipython_extension", "unload_ipython_extension"]
if not TYPE_CHECKING:  # type checkers understand a list of literals alone, and the names below without one
    __all__ = _NAMES

if TYPE_CHECKING:
    from . import faults as faults
    from . import recording as recording
    from .assistants.kernel_server import serve_mcp as serve_mcp
    from .cluster.cells.run import CellResult as CellResult
    from .cluster.cluster import Cluster as Cluster
    from .cluster.cluster import current_cluster as current_cluster
    from .cluster.followed import follow as follow
    from .diagnosis.on_rank.doctor_page import serve_doctor as serve_doctor
    from .engine.restore import copy_state_from as copy_state_from
    from .errors import BucketStateError as BucketStateError
    from .errors import CellError as CellError
    from .errors import ClusterError as ClusterError
    from .errors import DdpLabError as DdpLabError
    from .errors import ExtensionError as ExtensionError
    from .errors import RankFailure as RankFailure
    from .parallel.data_parallel import DataParallel as DataParallel
    from .parallel.data_parallel import data_parallel as data_parallel
    from .parallel.distributed import DistributedDataParallel as DistributedDataParallel
    from .parallel.hook_check import check_hook as check_hook
    from .parallel.live import fault_injection as fault_injection
    from .parallel.monitoring.drift import check_drift as check_drift
    from .parallel.monitoring.memory import measure_memory as measure_memory
    from .parallel.observe import observe as observe
    from .parallel.replacement import replace_torch_ddp as replace_torch_ddp
    from .simulation.link_model import CommModel as CommModel
    from .timeline.comparison import compare as compare
    from .timeline.timeline import Timeline as Timeline

    attach, install, restore_from = follow, replace_torch_ddp, copy_state_from


def __getattr__(name: str) -> Any:
    first = _SECOND.get(name, name)
    if first in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[first]}", __name__), first)
    if first in _MODULES:
        return importlib.import_module(f".{_MODULES[first]}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_NAMES)


def load_ipython_extension(shell: Any) -> None:
    """Registers the magics: called by `%load_ext ddp_lab`."""
    importlib.import_module(".cluster.processes.zygote", __name__).begin()  # its process starts during other imports
    importlib.import_module(".notebook.magics", __name__).load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Stops the current cluster and removes the magics: called by `%unload_ext ddp_lab`."""
    importlib.import_module(".notebook.magics", __name__).unload(shell)
