"""Names for other processes: functions that ranks import, modules that are started.

They are not imported here, because the client loads no torch. A test imports each.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "APPLY_CHANGE",
    "ASSISTANTS",
    "BIND",
    "CALL",
    "CAPABILITY_TRIAL",
    "CHECK_DRIFT",
    "CLUSTER",
    "CONTROLLER",
    "DEMONSTRATE",
    "FORK_SERVER",
    "HOST_SERVER",
    "KEEPER",
    "MEASURE_LINK",
    "RANK",
    "READ",
    "STAGE",
    "WORKER",
    "ZYGOTE",
    "RankFunction",
]


@dataclass(frozen=True)
class RankFunction:
    """A function that the ranks import: by name, so that the client need not.

    Attributes:
        module: the module's full name.
        name: the function's name in it.
    """

    module: str
    name: str

    @property
    def expression(self) -> str:
        """An expression that evaluates to the function in any namespace."""
        return f"__import__({self.module!r}, fromlist=[{self.name!r}]).{self.name}"


# The functions that make a process a rank, called by name.
RANK = "ddp_lab.engine.rank"

CALL = RankFunction("ddp_lab.engine.cells.variables", "call")  # a function of the notebook, sent in a parcel
STAGE = RankFunction("ddp_lab.engine.cells.variables", "stage")
BIND = RankFunction("ddp_lab.engine.cells.variables", "bind")
READ = RankFunction("ddp_lab.engine.cells.variables", "read")
DEMONSTRATE = RankFunction("ddp_lab.parallel.monitoring.collectives", "demonstrate")
MEASURE_LINK = RankFunction("ddp_lab.parallel.monitoring.link", "measure")
CHECK_DRIFT = RankFunction("ddp_lab.parallel.live.model", "check_replicas")
APPLY_CHANGE = RankFunction("ddp_lab.parallel.live.model", "apply_change")

# Modules that are started.
CONTROLLER = "ddp_lab.engine.processes.controller"
FORK_SERVER = "ddp_lab.engine.processes.fork_server"
ZYGOTE = "ddp_lab.engine.processes.zygote"
KEEPER = "ddp_lab.engine.processes.keeper"
HOST_SERVER = "ddp_lab.engine.processes.host_server"
WORKER = "ddp_lab.launch.worker"
CAPABILITY_TRIAL = "ddp_lab.comm.capability_trial"

# Modules that are used only if other code has imported them.
ASSISTANTS = "ddp_lab.assistants.kernel_server"
CLUSTER = "ddp_lab.cluster.cluster"
