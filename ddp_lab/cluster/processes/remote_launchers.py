"""The fork servers of a cluster on several hosts, each reached over ssh (or the like), used as one.

See [Note: a host on its own] in `ddp_lab.engine.processes.host_server`, and [Note: lost hosts] here.

[Note: lost hosts]
A host is lost when its ssh ends, or when its server has answered none of the pings of `host_timeout`. Pings are
counted, not seconds: a notebook that was suspended for a minute has not sent any. Shorter network outages are
survived: TCP retransmits, and no timeout here or on the ranks is shorter. A lost host's ranks count as failed. The next
rejoin starts a server over a new connection, which first ends processes that may still run there.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...documentation import with_help
from ...errors import ClusterError
from ...formatting import exit_words
from .host_commands import check_launcher, host_command
from .hosts import Host
from .launchers import ForkServer, RankProcess, last_lines, open_log, started, tail

_PINGS = 6  # within the time after which a host is lost
_LEASE = 4  # multiple of that time after which a host gives up its client
_NOISE = 2_000  # characters of a login shell's output, kept for errors
_WHY_LINES = 3
_POLL_SECONDS = 0.004


@dataclass(frozen=True)
class Starting:
    """How fork servers are started on other hosts.

    Attributes:
        launcher: see `ddp_lab.cluster.processes.host_commands.host_command`.
        python: path of the Python there; None: the same path as here.
        client_address: the address of this machine to which the hosts connect; None: found automatically.
        host_timeout: seconds without an answer after which a host is lost.
    """

    launcher: str | Sequence[str] = "ssh"
    python: str | None = None
    client_address: str | None = None
    host_timeout: float = 30.0

    def check(self) -> None:
        """Checks the values. Called only if ranks run on other hosts.

        Raises:
            ValueError: one of them is invalid.
        """
        check_launcher(self.launcher)
        if self.host_timeout <= 0:
            raise ValueError(
                f"host_timeout={self.host_timeout}: give the seconds after which an unresponsive host is lost"
            )


class HostServer(ForkServer):
    """The fork server of one host; `start` opens the connection, `begin` lets it import torch.

    Attributes:
        facts: the host's `ddp_lab.machine.facts`; empty until it has reported them.
        former: facts of the server that this one replaces; empty for the first.
    """

    def __init__(self, host: Host, run_dir: Path, starting: Starting) -> None:
        super().__init__(run_dir, {})
        self.host = host
        self.facts: dict[str, Any] = {}
        self.former: dict[str, Any] = {}
        self.stage = f"connecting to {host.name}"
        self._python = starting.python or sys.executable
        self._seconds = starting.host_timeout
        self._words = host_command(starting.launcher, host.name, self._python, starting.host_timeout)
        self._pings = self._pongs = 0
        self._noise = ""
        self._stopping = False
        self._why = ""

    def start(self) -> None:
        """Opens the connection and returns at once.

        Raises:
            ClusterError: the command does not exist on this machine.
        """
        if shutil.which(self._words[0]) is None:
            raise ClusterError(f"host {self.host.name} can't be reached: this machine has no command {self._words[0]}")
        with open_log(self._log) as log:
            log.truncate(0)
        super().start()

    def begin(self, environment: Mapping[str, str]) -> None:
        """Lets it import torch, with these variables of the host's ranks; processes of its former server end."""
        told = {name: self.former[name] for name in ("pid", "started")} if self.former else None
        lease = self._seconds * _LEASE
        self._send({"op": "begin", "environment": dict(environment), "lease": lease, "former": told})

    def look_after(self) -> None:
        """Pings it; gives the host up if it has answered none of the last pings. See [Note: lost hosts]."""
        if not self.ready or self.failed:
            return
        if self._pings - self._pongs >= _PINGS:
            self._why = f"it did not respond for {self._seconds:g} s"
            self.kill()
            return
        self._pings += 1
        self._send({"op": "ping"})

    @property
    def answering(self) -> bool:
        """Whether the host has answered the last ping but one."""
        return not self.failed and self._pings - self._pongs <= 1

    def answers(self, seconds: float) -> bool:
        """Whether the host answers within `seconds` from now."""
        number = self.ask("route", to="127.0.0.1")
        deadline = time.monotonic() + seconds
        while self.answer(number) is None:
            if self.failed or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def kill(self) -> None:
        """Closes the connection; the host's ranks end when they notice it."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Ends the host's ranks and the connection."""
        self._stopping = True
        super().stop()

    def check(self, ranks: Sequence[int] = ()) -> None:
        """Raises `ClusterError` naming the host if it is lost; see `ForkServer.check`."""
        if self._failure is not None:
            raise ClusterError(self._failure)
        super().check([rank for rank in ranks if rank in self.host.ranks])

    @property
    def _log(self) -> Path:
        return self._run_dir / f"host-{self.host.ranks.start}.log"

    def _started(self, log: int) -> subprocess.Popen[bytes]:
        return started(self._words, log, pipes=True)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        """An event; lines printed by a login shell are not events."""
        text = line.decode(errors="replace")
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if isinstance(event, dict) and "event" in event:
            return event
        self._noise = (self._noise + text)[-_NOISE:]
        return {"event": "noise"}

    def _take(self, event: Mapping[str, Any]) -> int | None:
        kind = event["event"]
        if kind == "hello":
            self.facts = dict(event)
            self.stage = f"starting on {self.host.name}"
        elif kind == "pong":
            self._pongs = self._pings  # an answer to one answers all before it: they arrive in order
        elif kind == "stage":
            self.stage = f"{event['name']} on {self.host.name}"
            return None
        elif kind == "failed":
            self._failure = f"the ranks of {self.host.words} could not start:\n{last_lines(event['error'])}"
            return None
        elif kind == "exited" and event.get("log") and self.pids.get(event["rank"]) == event["pid"]:
            # Before anything sees that it has ended, and reads the file. A stopped cluster no longer has a folder.
            with contextlib.suppress(FileNotFoundError), open_log(self.log_of(event["rank"])) as log:
                log.truncate(0)
                log.write(event["log"].encode())
        return super()._take(event)

    def _ended(self, code: int) -> None:
        words = (
            self._why or "; ".join(tail(self._log).splitlines()[-_WHY_LINES:]) or f"{self._words[0]} {exit_words(code)}"
        )
        with self._lock:
            alive = [rank for rank in self.pids if rank not in self.exits]
            if self._failure is None:
                lost = with_help(f"{self.host.words} was lost: {words}", "host-lost")
                self._failure = lost if self.facts else self._unreached(words)
            for rank in alive:
                self.exits[rank] = -signal.SIGKILL
                self.reasons[rank] = f"was lost with host {self.host.name}: {words}"
        told = self.on_exit
        if told is not None and not self._stopping:
            for rank in alive:
                told(rank)

    def _unreached(self, words: str) -> str:
        """Why the server could not be started."""
        name, said = self.host.name, f"{words}\n{self._noise}".rstrip()
        if "No module named" in said or "Error while finding module" in said:
            return (
                f"host {name}: {self._python} can't import ddp_lab there: {words}. Install ddp_lab on the host, "
                "or give a Python that has it (python=..., --python)"
            )
        if "not found" in said or "No such file" in said:
            return f"host {name}: {words}. Give a Python that exists there (python=..., --python)"
        hint = f" (try: ssh -o BatchMode=yes {name} true)" if self._words[0] == "ssh" else ""
        return with_help(f"host {name} could not be reached with {self._words[0]}: {said}{hint}", "host-not-reached")


class LocalServer(ForkServer):
    """This machine's own fork server, as one host of several."""

    def __init__(self, host: Host, run_dir: Path, facts: Mapping[str, Any]) -> None:
        super().__init__(run_dir, {})
        self.host = host
        self.facts = dict(facts)
        self.former: dict[str, Any] = {}
        self.answering = True

    def answers(self, seconds: float) -> bool:
        """Nothing to connect to: it is on this machine."""
        return True

    def start(self) -> None:
        """Nothing: `begin` starts it; until then nothing needs to be imported."""

    def begin(self, environment: Mapping[str, str]) -> None:
        """Starts it; it imports torch meanwhile."""
        self._environment = dict(environment)
        super().start()

    def look_after(self) -> None:
        """Nothing: the end of a local process is noticed at once."""


Server = HostServer | LocalServer


class HostServers:
    """The fork servers of all hosts, used as one `ForkServer`.

    Args:
        hosts: with their ranks.
        run_dir: the cluster's folder on this machine.
        starting: how those of other hosts are started.
    """

    def __init__(self, hosts: Sequence[Host], run_dir: Path, starting: Starting) -> None:
        self.hosts = tuple(hosts)
        self._run_dir = run_dir
        self._starting = starting
        self._servers: dict[str, Server] = {host.name: self._made(host) for host in hosts}
        self._on_exit: Callable[[int], None] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __getitem__(self, name: str) -> Server:
        return self._servers[name]

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    def _made(self, host: Host) -> Server:
        if host.local:
            from ... import machine

            return LocalServer(host, self._run_dir, machine.facts())
        return HostServer(host, self._run_dir, self._starting)

    # The interface of `ForkServer`

    @property
    def pid(self) -> int | None:
        """Process id of this machine's own, if it has one."""
        return next((server.pid for server in self if isinstance(server, LocalServer)), None)

    @property
    def zygote_pid(self) -> int | None:
        """Process id of the zygote that has not forked it yet."""
        return next((server.zygote_pid for server in self if isinstance(server, LocalServer)), None)

    @property
    def stage(self) -> str:
        """What the slowest one is doing."""
        return next((server.stage for server in self if not server.ready), "forking")

    @property
    def ready(self) -> bool:
        """Whether all can fork."""
        return all(server.ready for server in self)

    @property
    def failed(self) -> bool:
        """Whether forking is no longer possible: never, a lost host may come back."""
        return False

    @property
    def pids(self) -> dict[int, int]:
        """rank -> process id on its host."""
        return {rank: pid for server in self for rank, pid in list(server.pids.items())}

    @property
    def exits(self) -> dict[int, int]:
        """rank -> exit code, of those that have ended."""
        return {rank: code for server in self for rank, code in list(server.exits.items())}

    @property
    def reasons(self) -> dict[int, str]:
        """rank -> why it ended, if its host was lost."""
        return {rank: why for server in self for rank, why in list(server.reasons.items())}

    @property
    def on_exit(self) -> Callable[[int], None] | None:
        """Called with the rank when one has ended."""
        return self._on_exit

    @on_exit.setter
    def on_exit(self, told: Callable[[int], None] | None) -> None:
        self._on_exit = told
        for server in self:
            server.on_exit = told

    def start(self) -> None:
        """Opens all connections and returns at once."""
        for server in self:
            server.start()
        self._thread = threading.Thread(target=self._look_after, name="ddp_lab-hosts", daemon=True)
        self._thread.start()

    def fork(
        self,
        connections: Mapping[str, Mapping[str, Any]],
        ranks: Mapping[int, RankProcess],
    ) -> None:
        """Requests one engine per rank.

        Args:
            connections: host's name -> how its engines connect to the controller.
            ranks: rank -> what its process needs.
        """
        for server in self:
            chosen = {rank: ranks[rank] for rank in server.host.ranks if rank in ranks}
            if chosen:
                server.fork(connections[server.host.name], chosen)

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to one rank's process."""
        self.of_rank(rank).signal(rank, number)

    def log_of(self, rank: int) -> Path:
        """The file with the output of the rank's process outside cells; for another host's rank, once it has ended."""
        return self.of_rank(rank).log_of(rank)

    def check(self, ranks: Sequence[int] = ()) -> None:
        """Raises `ClusterError` if a host is lost or one of `ranks` has ended."""
        for server in self:
            server.check([rank for rank in ranks if rank in server.host.ranks])

    def stop(self) -> None:
        """Ends every rank, then the connections."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        for server in self:
            if isinstance(server, HostServer) and not server.answering:
                server.kill()  # waiting for it would be useless
            server.stop()

    # Only for several hosts

    def of_rank(self, rank: int) -> Server:
        """The server of a rank's host."""
        return next(server for server in self if rank in server.host.ranks)

    def unreachable(self, ranks: Iterable[int], seconds: float) -> set[int]:
        """Those of these ranks whose hosts don't answer within `seconds`."""
        chosen = set(ranks)
        asked = [server for server in self if chosen.intersection(server.host.ranks)]
        return {rank for server in asked if not server.answers(seconds) for rank in server.host.ranks} & chosen

    def lost(self) -> list[Host]:
        """The hosts to which a new connection is needed."""
        return [server.host for server in self if server.failed]

    def renew(self, host: Host) -> None:
        """Opens a new connection to a lost host."""
        former = self._servers[host.name]
        former.stop()
        made = self._made(host)
        made.pids.update(former.pids)
        made.exits.update(former.exits)
        made.reasons.update(former.reasons)
        made.on_exit = self._on_exit
        made.former = former.facts or former.former  # a connection that failed had none
        self._servers[host.name] = made
        made.start()

    def _look_after(self) -> None:
        while not self._stopping.wait(self._starting.host_timeout / _PINGS):
            for server in list(self):
                server.look_after()
