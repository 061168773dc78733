"""Ranks with a slow network on one machine: a network namespace for each, joined by a bridge, shaped by ``tc tbf``.

Needs root and iproute2 (``ip``, ``tc``); Linux. Each rank's namespace has an interface ``eth0`` whose sending is
shaped; what arrives is not, since another rank has sent it. With a delay, a relay (this file, run as a program) takes
the place of the bridge: not every kernel has ``tc netem``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_lab.errors import DdpLabError

__all__ = ["Enter", "ShapedLink", "relay", "shaped"]

_INTERFACE = "eth0"
_MTU = 65000  # bytes of a packet: large ones, so that a relay in Python is not what limits the link
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_AT_ONCE = 16  # packets of one interface before the others have their turn


@dataclass(frozen=True)
class Enter:
    """Moves a rank's process into its namespace; called before it opens a socket."""

    namespaces: tuple[str, ...]

    def __call__(self, rank: int) -> None:
        """Enters the namespace of `rank` for good."""
        _enter(self.namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE


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
            raise DdpLabError("shaping a link needs root and iproute2 (`ip`, `tc`); run it without the option --mbit")
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
            self._in(self._hub, f"ip link add {port} type veth peer name {_INTERFACE} netns {namespace}")
            self._in(self._hub, f"ip link set {port} master bridge0 up")

    def _join_by_relay(self) -> None:
        command = [sys.executable, __file__, str(self._delay), *self.enter.namespaces]
        self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise DdpLabError("a link with a delay needs TUN devices (/dev/net/tun), which could not be created")

    def _shape(self, rank: int, namespace: str) -> None:
        self._in(namespace, "ip link set lo up")
        self._in(namespace, f"ip addr add {_address(rank)}/24 dev {_INTERFACE}")
        if self._delay:
            self._in(namespace, f"ip link set {_INTERFACE} mtu {_MTU} txqueuelen 1000")
        self._in(namespace, f"ip link set {_INTERFACE} up")
        # The bucket of tokens holds 2 ms of sending, but at least a large segment.
        burst = max(128 * 1024, int(self.mbit * 1e6 / 8 * 2e-3))
        shape = f"tc qdisc add dev {_INTERFACE} root tbf rate {self.mbit}mbit burst {burst} latency 200ms"
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


def shaped(ranks: int, mbit: float | None, delay_ms: float = 0.0) -> contextlib.AbstractContextManager[Enter | None]:
    """A `ShapedLink`, or loopback where there is nothing to be shaped to."""
    return ShapedLink(ranks, mbit, delay_ms) if mbit else contextlib.nullcontext()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DdpLabError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _address(index: int) -> str:
    """IPv4 address of the interface in the namespace of this index."""
    return f"10.99.0.{index + 1}"


def _enter(namespace: str) -> None:
    """Moves the calling thread into a network namespace of ``ip netns``."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"entering network namespace {namespace}")
    finally:
        os.close(descriptor)


def _interface(namespace: str) -> int:
    _enter(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", _INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _packets(descriptor: int) -> list[bytes]:
    """What has been sent there, as far as it goes now."""
    found: list[bytes] = []
    while len(found) < _AT_ONCE:
        try:
            found.append(os.read(descriptor, _MTU + 100))
        except BlockingIOError:
            break
    return found


def relay(seconds: str, *namespaces: str) -> None:
    """A link with a delay between network namespaces, until standard input ends.

    In each namespace it makes an interface ``eth0`` (a TUN device: what is sent there comes here as packets, and the
    other way round), and hands each packet to the interface of its destination (10.99.0.1 is the first namespace's)
    that much later. It writes a line when the interfaces are there. Needs root.
    """
    interfaces = [_interface(namespace) for namespace in namespaces]
    by_address = {bytes(map(int, _address(i).split("."))): one for i, one in enumerate(interfaces)}
    print("ready", flush=True)
    _serve(interfaces, by_address, float(seconds))


def _serve(interfaces: Sequence[int], by_address: dict[bytes, int], delay: float) -> None:
    """Hands packets on; the delay is the same for all, so they wait in the order in which they came."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    end = sys.stdin.fileno()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([end, *interfaces], [], [], timeout)
        if end in ready and not os.read(end, 1):
            return
        due = time.monotonic() + delay
        for interface in ready:
            for packet in _packets(interface) if interface != end else ():
                target = by_address.get(packet[16:20])  # where an IPv4 packet is to go; all else is dropped
                if target is not None:
                    waiting.append((due, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            with contextlib.suppress(BlockingIOError):  # its queue is full: TCP sends it again
                os.write(target, packet)


if __name__ == "__main__":
    relay(*sys.argv[1:])
