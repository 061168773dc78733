"""The table of former public names."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TABLE", "Renamed"]

# how users reach these objects
_SPELLED = {"Runs": "Cluster.results", "TrainingControl": "Cluster.training", "compare": "ddp_lab.compare"}


class Renamed(NamedTuple):
    """A public name that has changed.

    Attributes:
        owner: ``"ddp_lab"``, a class, a function of the package, a magic with its command; ``"Timeline.*"``: all
            public methods of the class.
        old: the former name: of an attribute (``name``), an argument (``name=``) or an option (``--name``).
        new: the present name, written in the same way.
        quiet: whether the former name gives no warning.
    """

    owner: str
    old: str
    new: str
    quiet: bool = False

    def spelled(self, name: str) -> str:
        """A name as users write it, with its owner."""
        owner, dot, rest = self.owner.partition(".")
        return _spelled(f"{_SPELLED.get(owner, owner)}{dot}{rest}", name)


TABLE = (
    Renamed("ddp_lab", "install", "replace_torch_ddp", quiet=True),
    Renamed("ddp_lab", "attach", "follow", quiet=True),
    Renamed("ddp_lab", "restore_from", "copy_state_from", quiet=True),
    Renamed("ddp_lab", "LinkModel", "CommModel"),
    Renamed("ddp_lab", "ScheduleError", "BucketStateError"),
    Renamed("ddp_lab", "rehearsal", "fault_injection"),
    Renamed("%%distributed", "--watch", "--dashboard", quiet=True),
    Renamed("%cluster start", "--address", "--client-address", quiet=True),
    Renamed("%cluster start", "--engines", "--launcher", quiet=True),
    Renamed("%cluster start", "--lease", "--idle-timeout", quiet=True),
    Renamed("Cluster", "find", "attach", quiet=True),
    Renamed("Cluster", "address=", "client_address="),
    Renamed("Cluster", "engines=", "launcher="),
    Renamed("Cluster", "lease_seconds=", "idle_timeout="),
    Renamed("Cluster", "watch_seconds=", "hang_seconds="),
    Renamed("Cluster", "host_seconds=", "host_timeout="),
    Renamed("Cluster", "lease_seconds", "idle_timeout"),
    Renamed("Cluster", "watch_seconds", "hang_seconds"),
    Renamed("Cluster", "left", "missed_cells"),
    Renamed("Cluster", "vitals", "health"),
    Renamed("Cluster", "looks", "monitoring"),
    Renamed("Cluster", "show_collective", "animate_collective"),
    Renamed("Cluster", "measure_link", "measure_communication"),
    Renamed("Cluster.*", "reducer=", "model="),
    Renamed("Runs", "ahead", "pending_cells"),
    Renamed("TrainingControl", "looks", "monitoring"),
    Renamed("TrainingControl.*", "reducer=", "model="),
    Renamed("DetachedCluster", "lease_seconds", "idle_timeout"),
    Renamed("Timeline", "sync", "all_reduces"),
    Renamed("Timeline", "find_late", "stragglers"),
    Renamed("Timeline", "raw", "events"),
    Renamed("Timeline.*", "reducer=", "model="),
    Renamed("compare", "reducers=", "models="),
    Renamed("DistributedDataParallel", "follow_order", "rebuild_buckets_on_reorder"),
    Renamed("DistributedDataParallel", "define_comm_hook", "register_named_comm_hook"),
    Renamed("DistributedDataParallel", "reducer_id", "model_id"),
    Renamed("Observation", "reducer_id", "model_id"),
    Renamed("RankFailure", "consequence", "secondary"),
    Renamed("RankFailure", "brief", "short_traceback"),
)
"""Every former name that still works."""


def _spelled(owner: str, name: str) -> str:
    if name.startswith("--"):
        return f"{owner} {name}"
    return f"{owner}({name})" if name.endswith("=") else f"{owner}.{name}"
