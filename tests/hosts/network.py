"""Real hosts of Linux namespaces: each with a network, processes, a name and a monotonic clock of its own, and sshd.

Their cables end at a bridge of this machine, on which they reach it and each other. To cut a cable is to take its end
down there: the host's own interface keeps its address and its routes, as behind a switch that lost power.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.leftovers import MARK
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
_NEEDED = ("ip", "tc", "sshd", "ssh", "ssh-keygen", "unshare")
_UNSHARE = ["unshare", "--uts", "--mount", "--pid", "--mount-proc", "--time", "--fork", "--kill-child"]
_SBIN = "/usr/sbin:/sbin"


def why_not() -> str:
    """Why this machine can't have such hosts; empty if it can."""
    path = f"{os.environ['PATH']}:{_SBIN}"
    missing = [name for name in _NEEDED if shutil.which(name, path=path) is None]
    if missing:
        return f"no {', '.join(missing)} (Debian: apt install openssh-server iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    cables = "ip link add probe type bridge && ip link add one type veth peer name two && ip link set one master probe"
    tried = subprocess.run(
        [*_UNSHARE, "--net", "--monotonic=10", "sh", "-c", cables],
        capture_output=True,
        text=True,
        env=_environment(),
    )
    return "" if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ['PATH']}:{_SBIN}"}


class NamespaceHost:
    """One host; made by `Network`.

    Attributes:
        name: what ssh and the cluster call it.
        address: its IPv4 address.
        ahead_s: how far its monotonic clock is ahead of this machine's.
    """

    def __init__(self, network: Network, name: str, number: int, ahead_s: int) -> None:
        self.name = name
        self.address = f"{network.prefix}.{number + 2}"
        self.ahead_s = ahead_s
        self._namespace = f"{network.bridge}{name}"
        self._cable = f"{network.bridge}v{number}"
        self._folder = network.folder / name
        self._network = network
        self._sshd: subprocess.Popen[bytes] | None = None
        (self._folder / "tmp").mkdir(parents=True)
        _do("ip", "netns", "add", self._namespace)
        try:
            _do("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth7", "netns", self._namespace)
        except BaseException:
            _do("ip", "netns", "del", self._namespace)
            raise
        _do("ip", "link", "set", self._cable, "master", network.bridge, "up")
        for command in ("link set lo up", "link set eth7 up", f"addr add {self.address}/24 dev eth7"):
            _do("ip", "-n", self._namespace, *command.split())
        self._write_config()
        self.start()

    def _write_config(self) -> None:
        python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"TMPDIR": str(self._folder / "tmp"), "PYTHONPATH": python_path, MARK: os.environ[MARK]}
        lines = [
            f"ListenAddress {self.address}",
            f"HostKey {self._network.folder / 'host_key'}",
            f"AuthorizedKeysFile {self._network.folder / 'key.pub'}",
            "StrictModes no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "UsePAM no",
            "PidFile none",
            "SetEnv " + " ".join(f"{name}={value}" for name, value in variables.items()),
        ]
        (self._folder / "sshd_config").write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        """Boots it: returns when its sshd takes connections."""
        sshd = shutil.which("sshd", path=_environment()["PATH"])
        script = f"hostname {self.name} && mkdir -p /run/sshd && exec {sshd} -D -e -f {self._folder / 'sshd_config'}"
        with (self._folder / "sshd.log").open("ab") as log:
            self._sshd = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, *_UNSHARE, f"--monotonic={self.ahead_s}", "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )
        wait_until(self._listens, f"sshd of {self.name}")

    def _listens(self) -> bool:
        try:
            with socket.create_connection((self.address, 22), 1):
                return True
        except OSError:
            return False

    def cut(self) -> None:
        """Pulls its cable out."""
        _do("ip", "link", "set", self._cable, "down")

    def mend(self) -> None:
        """Plugs its cable in."""
        _do("ip", "link", "set", self._cable, "up")

    def slow_down(self, rate: str) -> None:
        """Makes its network card send at most this, e.g. "200mbit"."""
        limit = f"qdisc replace dev eth7 root tbf rate {rate} burst 256kb latency 50ms"
        _do("tc", "-n", self._namespace, *limit.split())

    def kill(self) -> None:
        """Pulls its power out: nobody hears that anything ended."""
        self.cut()
        self._end()

    def processes(self) -> list[str]:
        """Commands of what runs there, sshd apart."""
        if self._sshd is None:
            return []
        commands = []
        for pid in self._pids():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has just ended
                continue
            if command and "sshd" not in command:
                commands.append(command.strip())
        return commands

    def folders(self) -> list[Path]:
        """The folders of clusters there."""
        return list((self._folder / "tmp").glob("ddp_lab-*"))

    def process_texts(self) -> list[bytes]:
        """Arguments and variables of what runs there."""
        texts = []
        for pid in self._pids():
            for name in ("cmdline", "environ"):
                with contextlib.suppress(OSError):  # it has just ended
                    texts.append(Path(f"/proc/{pid}/{name}").read_bytes())
        return texts

    def _pids(self) -> list[str]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self._namespace], capture_output=True, text=True, env=_environment(), check=True
        )
        return listed.stdout.split()

    def _end(self) -> None:
        if self._sshd is not None:
            self._sshd.kill()
            self._sshd.wait()
            self._sshd = None
            wait_until(lambda: not self.processes(), f"the end of {self.name}")

    def remove(self) -> None:
        """Ends it for good."""
        self._end()
        _do("ip", "link", "del", self._cable)  # both ends at once: a namespace takes its own away some time later
        _do("ip", "netns", "del", self._namespace)


class Network:
    """A bridge of this machine with hosts at it, and an `ssh` that knows them; `close` takes all of it away.

    Args:
        folder: for keys and configurations; only root may enter it.
        clocks: name -> how many seconds a host's monotonic clock is ahead.
    """

    def __init__(self, folder: Path, clocks: dict[str, int]) -> None:
        self.folder = folder
        self.ip = shutil.which("ip", path=_environment()["PATH"])
        self.bridge = f"dl{os.getpid()}"
        self.prefix = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        for key in ("key", "host_key"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        _do("ip", "link", "add", self.bridge, "type", "bridge")
        _do("ip", "addr", "add", f"{self.prefix}.1/24", "dev", self.bridge)
        _do("ip", "link", "set", self.bridge, "up")
        self.hosts: dict[str, NamespaceHost] = {}
        try:
            for number, (name, ahead_s) in enumerate(clocks.items()):
                self.hosts[name] = NamespaceHost(self, name, number, ahead_s)
        except BaseException:
            self.close()
            raise
        self._write_ssh()

    def _write_ssh(self) -> None:
        """An `ssh` with a configuration of its own: the real one reads that of the user, whatever HOME says."""
        blocks = [f"Host {host.name}\n  HostName {host.address}" for host in self.hosts.values()]
        common = f"Host *\n  IdentityFile {self.folder / 'key'}\n  User root\n  StrictHostKeyChecking no\n"
        common += "  UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /dev/null\n"
        (self.folder / "ssh_config").write_text("\n".join(blocks) + "\n" + common)
        folder = self.folder / "bin"
        folder.mkdir()
        script = f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder / "ssh_config"} "$@"\n'
        (folder / "ssh").write_text(script)
        (folder / "ssh").chmod(0o755)
        self.path = f"{folder}:{os.environ['PATH']}"

    def close(self) -> None:
        """Removes hosts, cables and bridge."""
        for host in self.hosts.values():
            host.remove()
        _do("ip", "link", "del", self.bridge)


if __name__ == "__main__":  # by hand: hosts a and b, until Enter
    import tempfile

    os.environ.setdefault(MARK, "by-hand")
    with tempfile.TemporaryDirectory() as folder:
        made = Network(Path(folder), {"a": 0, "b": 1000})
        try:
            print(f"PATH={made.path}", flush=True)
            for line in sys.stdin:
                word, _, name = line.strip().partition(" ")
                if name:
                    getattr(made.hosts[name], word)()
                    print(f"{time.monotonic():.3f} {word} {name}", flush=True)
        finally:
            made.close()
