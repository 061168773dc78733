"""The configuration of a cluster: how many ranks, where, and how long they live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .._version import __version__
from ..errors import ClusterError
from ..protocol.registry import is_name
from .processes.devices import Placement, place
from .processes.host_commands import of_batch_system
from .processes.host_processes import HostSettings
from .processes.hosts import ALLOCATION, parse_hosts, provisional
from .processes.remote_launchers import Starting

_BACKENDS = ("auto", "nccl", "gloo", "shm", "mpi")


@dataclass(frozen=True)
class ClusterConfig:
    """See `Cluster`, whose arguments these are.

    Attributes:
        placement: how many ranks, where, with which variables; with several hosts not yet which of their devices.
        backend: of the default process group.
        hosts: how ranks on several hosts are started; None: all are on this machine.
        detach: whether the ranks outlive this process.
        idle_timeout: how many seconds a detached cluster lives while no client is attached.
    """

    placement: Placement
    backend: str
    hosts: HostSettings | None = None
    detach: bool = False
    idle_timeout: float = 3600.0

    @classmethod
    def of(
        cls,
        n: int | None,
        *,
        backend: str,
        devices: Sequence[int] | None,
        env: Mapping[str, str] | None,
        hosts: str | Sequence[str] | Mapping[str, int] | None,
        starting: Starting,
        detach: bool,
        name: str | None,
        idle_timeout: float,
    ) -> ClusterConfig:
        """Checks the arguments of `Cluster`.

        Raises:
            ValueError: an argument is invalid here.
        """
        if name is not None and not is_name(name):
            raise ValueError(f"name={name!r} is invalid: use letters, digits, '.', '_' and '-', at most 64")
        if not 0 < idle_timeout < float("inf"):
            raise ValueError(f"idle_timeout={idle_timeout}: give a time in seconds")
        if detach and hosts is not None:
            raise ValueError("detach=True can't be combined with hosts: ranks on other hosts end with this process")
        if backend not in _BACKENDS:
            raise ValueError(f"backend={backend!r}: choose one of {', '.join(_BACKENDS)}")
        environment = {name: str(value) for name, value in (env or {}).items()}
        if hosts is None and of_batch_system(starting.launcher):
            hosts = ALLOCATION
        if hosts is None:
            if (starting.launcher, starting.python, starting.client_address) != ("ssh", None, None):
                raise ValueError(
                    "launcher=, python= and client_address= configure ranks on other hosts: give hosts= as well"
                )
            return cls(place(n, devices, environment, backend), backend, None, detach, idle_timeout)
        starting.check()
        settings = HostSettings(parse_hosts(hosts, n), devices, environment, backend, starting)
        return cls(provisional(settings.hosts), backend, settings, detach, idle_timeout)

    def notes(self) -> dict[str, Any]:
        """What a later client must know about a detached cluster; plain data, for `noted`."""
        return {
            "version": __version__,
            "world_size": self.placement.world_size,
            "placement": asdict(self.placement),
            "backend": self.backend,
        }

    @classmethod
    def noted(cls, notes: Mapping[str, Any], idle_timeout: float) -> ClusterConfig:
        """The configuration of a detached cluster.

        Raises:
            ClusterError: another version of ddp_lab started it.
        """
        if notes.get("version") != __version__:
            raise ClusterError(
                f"the cluster was started by ddp_lab {notes.get('version')}, this is {__version__}: attach with that "
                "version, or wait until its idle timeout expires"
            )
        placed = notes["placement"]
        environments = {int(rank): variables for rank, variables in placed["rank_environments"].items()}
        placement = Placement(placed["world_size"], tuple(placed["devices"]), placed["environment"], environments)
        return cls(placement, notes["backend"], None, True, idle_timeout)
