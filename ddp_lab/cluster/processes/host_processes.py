"""The processes of a cluster on several hosts: the same as on one, after finding the network paths between the hosts.

[Note: who listens where]
On this machine the controller's engine side and the wire listen on the address from which it reaches the hosts (on all
addresses only if there are several), the controller's client side on Unix sockets. On the first host the rendezvous
listens on the address from which that host reaches the second one; Gloo and NCCL use the interfaces of these addresses.
With ranks on a single host, its rendezvous and groups stay on loopback. Each of these paths is tried before ranks use
it, so that a firewall is reported at the start instead of making a training hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import machine
from ...documentation import with_help
from ...errors import ClusterError
from . import hosts as hosts_
from .hosts import Host
from .launchers import RankProcess
from .remote_launchers import HostServer, HostServers, Server, Starting
from .startup import LOOPBACK, Processes, Progress, ignore

_EVERYWHERE = "0.0.0.0"
_TRY_SECONDS = 5.0


@dataclass(frozen=True)
class HostSettings:
    """How ranks on several hosts are started.

    Attributes:
        hosts: with their ranks.
        devices: as for `ddp_lab.cluster.processes.devices.place`; each host's own.
        environment: variables of all ranks.
        backend: of the default process group.
        starting: how ranks are started on other hosts.
    """

    hosts: tuple[Host, ...]
    devices: Sequence[int] | None
    environment: Mapping[str, str]
    backend: str
    starting: Starting


class HostProcesses(Processes):
    """Controller here, fork servers and engines on several hosts; see [Note: who listens where].

    Args:
        settings: which hosts, and how their ranks are started.
    """

    fork_server: HostServers

    def __init__(self, settings: HostSettings) -> None:
        super().__init__(hosts_.provisional(settings.hosts))
        self._folder = None  # other hosts need not have it
        self._settings = settings
        self.fork_server = HostServers(settings.hosts, self._run_dir, settings.starting)
        self._variables: dict[str, dict[str, str]] = {}
        self._here: dict[str, str] = {}  # host -> the address at which it reaches this machine
        self._interfaces: dict[str, str] = {}
        self._rendezvous = LOOPBACK

    def reach(self, progress: Progress) -> str:
        """Connects to all hosts, compares their installed versions, and lets them import torch meanwhile.

        Returns:
            The address on which the services for the hosts must listen.

        Raises:
            ClusterError: a host is unreachable, or differs from the others; the message names it.
        """
        self.fork_server.start()
        facts = self._facts(progress)
        settings = self._settings
        self.placement, self._variables = hosts_.spread(
            settings.hosts, facts, settings.devices, settings.environment, settings.backend
        )
        for server in self.fork_server:
            server.begin(self._variables[server.host.name])
        self._here = {name: self._here_for(name, each) for name, each in facts.items()}
        return self._listening

    @property
    def _listening(self) -> str:
        found = set(self._here.values())
        return found.pop() if len(found) == 1 else _EVERYWHERE

    def place_of(self, rank: int) -> dict[str, Any]:
        host = self._host_of(rank)
        return {
            "local_rank": rank - host.ranks.start,
            "local_world_size": len(host.ranks),
            "host_index": self._settings.hosts.index(host),
            "address": self._rendezvous,
            "interface": self._interfaces.get(host.name, "lo"),
            "device": self.placement.devices[rank],
        }

    def endpoint_of(self, rank: int, endpoint: Mapping[str, str]) -> dict[str, str]:
        here = self._here[self._host_of(rank).name]
        return {key: value.replace(_EVERYWHERE, here) for key, value in endpoint.items()}

    @property
    def broken(self) -> bool:
        return bool(self.fork_server.lost()) or self._disturbed

    @property
    def far_ranks(self) -> frozenset[int]:
        return frozenset(rank for host in self._settings.hosts if not host.local for rank in host.ranks)

    @property
    def pids(self) -> dict[str, int]:
        connections = {
            f"connection to {server.host.name}": server.pid
            for server in self.fork_server
            if isinstance(server, HostServer) and server.pid is not None
        }
        return super().pids | connections

    def clocks(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {
            each.host.name: (each.facts["clock"], tuple(each.host.ranks)) for each in self.fork_server if each.facts
        }

    def _start_controller(self) -> None:
        self.controller.start(self._listening)

    def _fork(self, ranks: Mapping[int, RankProcess], progress: Progress) -> None:
        self._wait(lambda: self.fork_server.ready or None, "starting engines", progress)
        self._find_ways()
        engine = self._connection["engine"]
        connections = {name: {**engine, "interface": f"tcp://{here}"} for name, here in self._here.items()}
        self.fork_server.fork(connections, ranks)

    def _bring_back(self, progress: Progress) -> None:
        """Reconnects to hosts that were lost.

        Raises:
            ClusterError: one is unreachable, or has changed.
        """
        lost = self.fork_server.lost()
        if not lost:
            return
        for host in lost:
            self.fork_server.renew(host)
        facts = self._facts(progress)
        for host in lost:
            self.fork_server[host.name].begin(self._variables[host.name])
            self._here[host.name] = self._here_for(host.name, facts[host.name])

    def _facts(self, progress: Progress) -> dict[str, dict[str, Any]]:
        """The facts that each host has reported, once all have and their versions are equal."""

        def all_said_hello() -> bool | None:
            self.fork_server.check()
            return all(server.facts for server in self.fork_server) or None

        self._wait(all_said_hello, "connecting to the hosts", progress)
        facts = {server.host.name: server.facts for server in self.fork_server}
        here = {"this machine": machine.versions()}
        hosts_.check_versions(here | {name: each["versions"] for name, each in facts.items()})
        return facts

    def _here_for(self, name: str, facts: Mapping[str, Any]) -> str:
        """The address at which a host reaches this machine."""
        address = self._settings.starting.client_address
        if address is not None:
            if not machine.interface_of(address):
                raise ClusterError(f"client_address={address!r}: no interface of this machine has this address")
            return address
        if self.fork_server[name].host.local:
            others = [each for each in self.fork_server if not each.host.local]
            return self._here_for(others[0].host.name, others[0].facts) if others else LOOPBACK
        try:
            return machine.local_address(hosts_.address_of(name, facts))
        except OSError as error:
            raise ClusterError(f"host {name} is reachable only through ssh, not directly: {error}") from error

    def _find_ways(self) -> None:
        """Finds and tries the addresses and interfaces by which the hosts reach each other.

        Raises:
            ClusterError: a host can't reach another one; the message names both and the address.
        """
        servers = list(self.fork_server)
        self._try_this_machine(servers)
        if len(servers) == 1:
            return
        first, *others = servers
        way = self._answers({first: ("route", {"to": self._address(others[0], first)})})[first]
        self._rendezvous, self._interfaces[first.host.name] = way["address"], way["interface"]
        ways = self._answers({each: ("route", {"to": self._rendezvous}) for each in others})
        self._interfaces |= {each.host.name: way["interface"] for each, way in ways.items()}
        port = self._answers({first: ("listen", {"address": self._rendezvous})})[first]["port"]
        targets = {"targets": [(self._rendezvous, port)], "seconds": _TRY_SECONDS}
        self._answers(dict.fromkeys(others, ("reach", targets)))
        self._answers({first: ("listen", {"address": None})})

    def _address(self, server: Server, seen_from: Server) -> str:
        if server.host.local:
            return self._here[seen_from.host.name]
        return hosts_.address_of(server.host.name, server.facts)

    def _try_this_machine(self, servers: Sequence[Server]) -> None:
        port = self._connection["engine"]["registration"]
        asked = {}
        for server in servers:
            if not server.host.local:
                targets = [(self._here[server.host.name], port)]
                asked[server] = ("reach", {"targets": targets, "seconds": _TRY_SECONDS})
        self._answers(asked)

    def _answers(self, questions: Mapping[Server, tuple[str, Mapping[str, Any]]]) -> dict[Server, dict[str, Any]]:
        """Asks servers at the same time and waits for all answers."""
        numbers = {server: server.ask(op, **arguments) for server, (op, arguments) in questions.items()}
        found: dict[Server, dict[str, Any]] = {}

        def all_answered() -> bool | None:
            for server, number in numbers.items():
                if server not in found and (answer := server.answer(number)) is not None:
                    found[server] = answer
            return len(found) == len(numbers) or None

        self._wait(all_answered, "finding the network paths between the hosts", ignore)
        for server, answer in found.items():
            if "error" in answer:
                raise ClusterError(_no_way(server.host, questions[server], answer))
        return found

    def _host_of(self, rank: int) -> Host:
        return self.fork_server.of_rank(rank).host


def _no_way(host: Host, question: tuple[str, Mapping[str, Any]], answer: Mapping[str, Any]) -> str:
    """The error text when hosts can't reach each other."""
    op, arguments = question
    if op == "reach":
        address, port = answer["target"]
        return with_help(
            f"host {host.name} can't reach {address} port {port}: {answer['error']}. Ranks connect to ports that the "
            "system chooses: let the firewall allow them between the hosts and this machine, or give an address that "
            "the hosts can reach (client_address=..., --client-address)",
            "firewall",
        )
    where = arguments.get("to") or arguments.get("address")
    return f"host {host.name} has no route to {where}: {answer['error']}"
