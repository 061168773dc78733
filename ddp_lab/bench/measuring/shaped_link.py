"""Ranks with a slow network on one machine: a network namespace for each, joined by a bridge, shaped by ``tc tbf``.

Needs root and iproute2 (``ip``, ``tc``); Linux. Each rank's namespace has an interface ``eth0`` whose sending is
shaped; what arrives is not, since another rank has sent it. With a delay, a relay (`delaying_relay.py`) takes the place
of the bridge: not every kernel has ``tc netem``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ...errors import DdpLabError
from . import delaying_relay
from .delaying_relay import INTERFACE, MTU, address, enter

__all__ = ["Enter", "ShapedLink"]


@dataclass(frozen=True)
class Enter:
    """Moves a rank's process into its namespace; called before it opens a socket."""

    namespaces: tuple[str, ...]

    def __call__(self, rank: int) -> None:
        """Enters the namespace of `rank` for good."""
        enter(self.namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


class ShapedLink:
    """Context manager: namespaces for some ranks, gone with their links at the end.

    Args:
        ranks: how many.
        mbit: what each rank may send, megabits a second.
        delay_ms: how much later it arrives, milliseconds.

    Raises:
        DdpLabError: not root, or no iproute2.
    """

    def __init__(self, ranks: int, mbit: float, delay_ms: float = 0.0) -> None:
        if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
            raise DdpLabError("shaping a link needs root and iproute2 (`ip`, `tc`); leave out the option --mbit")
        prefix = f"ddplab{os.getpid()}"
        self._hub = f"{prefix}hub"
        self.mbit = mbit
        self._delay = delay_ms / 1e3
        self._relay: subprocess.Popen[str] | None = None
        self.enter = Enter(tuple(f"{prefix}r{rank}" for rank in range(ranks)))

    def __enter__(self) -> Enter:
        try:
            for namespace in (*self.enter.namespaces, self._hub):
                _run("ip", "netns", "add", namespace)
            self._join_by_relay() if self._delay else self._join_by_bridge()
            for rank, namespace in enumerate(self.enter.namespaces):
                self._shape(rank, namespace)
        except BaseException:
            self.__exit__()
            raise
        return self.enter

    def _join_by_bridge(self) -> None:
        self._in(self._hub, "ip link add bridge0 type bridge")
        self._in(self._hub, "ip link set bridge0 up")
        for rank, namespace in enumerate(self.enter.namespaces):
            port = f"port{rank}"
            self._in(self._hub, f"ip link add {port} type veth peer name {INTERFACE} netns {namespace}")
            self._in(self._hub, f"ip link set {port} master bridge0 up")

    def _join_by_relay(self) -> None:
        command = [sys.executable, "-m", delaying_relay.__name__, str(self._delay), *self.enter.namespaces]
        self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise DdpLabError("a link with a delay needs TUN devices (/dev/net/tun), and they could not be made")

    def _shape(self, rank: int, namespace: str) -> None:
        self._in(namespace, "ip link set lo up")
        self._in(namespace, f"ip addr add {address(rank)}/24 dev {INTERFACE}")
        if self._delay:
            self._in(namespace, f"ip link set {INTERFACE} mtu {MTU} txqueuelen 1000")
        self._in(namespace, f"ip link set {INTERFACE} up")
        # The bucket of tokens holds 2 ms of sending, but at least a large segment.
        burst = max(128 * 1024, int(self.mbit * 1e6 / 8 * 2e-3))
        shape = f"tc qdisc add dev {INTERFACE} root tbf rate {self.mbit}mbit burst {burst} latency 200ms"
        self._in(namespace, shape)

    def __exit__(self, *_: object) -> None:
        if self._relay is not None:
            self._relay.communicate()  # closes its standard input, which ends it
        for namespace in (*self.enter.namespaces, self._hub):
            if Path("/run/netns", namespace).exists():
                _run("ip", "netns", "delete", namespace)

    @staticmethod
    def _in(namespace: str, command: str) -> None:
        _run("ip", "netns", "exec", namespace, *command.split())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DdpLabError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
