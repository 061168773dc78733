"""Ranks with a slow network on one machine: a network namespace for each, joined by a bridge, shaped by ``tc tbf``.

Needs root and iproute2 (``ip``, ``tc``); Linux. Each rank's namespace has an interface ``eth0`` whose sending is
shaped; what arrives is not, since another rank has sent it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..errors import DdpLabError

__all__ = ["Enter", "ShapedLink"]

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_INTERFACE = "eth0"


@dataclass(frozen=True)
class Enter:
    """Moves a rank's process into its namespace; called before it opens a socket."""

    namespaces: tuple[str, ...]

    def __call__(self, rank: int) -> None:
        """Enters the namespace of `rank` for good."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(f"/run/netns/{self.namespaces[rank]}", os.O_RDONLY)
        try:
            if libc.setns(descriptor, _NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), f"entering network namespace {self.namespaces[rank]}")
        finally:
            os.close(descriptor)
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE


class ShapedLink:
    """Context manager: namespaces for some ranks, gone with their links at the end.

    Args:
        ranks: how many.
        mbit: what each rank may send, megabits a second.

    Raises:
        DdpLabError: not root, or no iproute2.
    """

    def __init__(self, ranks: int, mbit: float) -> None:
        if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
            raise DdpLabError("shaping a link needs root and iproute2 (`ip`, `tc`); leave out the option --mbit")
        prefix = f"ddplab{os.getpid()}"
        self._hub = f"{prefix}hub"
        self.mbit = mbit
        self.enter = Enter(tuple(f"{prefix}r{rank}" for rank in range(ranks)))

    def __enter__(self) -> Enter:
        try:
            _run("ip", "netns", "add", self._hub)
            self._in(self._hub, "ip link add bridge0 type bridge")
            self._in(self._hub, "ip link set bridge0 up")
            for rank, namespace in enumerate(self.enter.namespaces):
                self._add(rank, namespace)
        except BaseException:
            self.__exit__()
            raise
        return self.enter

    def _add(self, rank: int, namespace: str) -> None:
        port = f"port{rank}"
        _run("ip", "netns", "add", namespace)
        self._in(self._hub, f"ip link add {port} type veth peer name {_INTERFACE} netns {namespace}")
        self._in(self._hub, f"ip link set {port} master bridge0 up")
        self._in(namespace, "ip link set lo up")
        self._in(namespace, f"ip addr add 10.99.0.{rank + 1}/24 dev {_INTERFACE}")
        self._in(namespace, f"ip link set {_INTERFACE} up")
        # The bucket of tokens holds 2 ms of sending, but at least a large segment.
        burst = max(128 * 1024, int(self.mbit * 1e6 / 8 * 2e-3))
        shape = f"tc qdisc add dev {_INTERFACE} root tbf rate {self.mbit}mbit burst {burst} latency 200ms"
        self._in(namespace, shape)

    def __exit__(self, *_: object) -> None:
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
