"""A link with a delay, between network namespaces; its arguments are the delay in seconds and the namespaces.

In each namespace it makes an interface ``eth0`` (a TUN device: what is sent there comes here as packets, and the other
way round), hands each packet to the interface of its destination (10.99.0.1 is the first namespace's) that much later,
and ends when its standard input does. It writes a line when the interfaces are there. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

__all__ = ["INTERFACE", "MTU", "address", "enter", "main"]

INTERFACE = "eth0"
MTU = 65000
"""Bytes of a packet: large ones, so that a relay in Python is not what limits the link."""

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_AT_ONCE = 16  # packets of one interface before the others have their turn


def address(index: int) -> str:
    """IPv4 address of the interface in the namespace of this index."""
    return f"10.99.0.{index + 1}"


def enter(namespace: str) -> None:
    """Moves the calling thread into a network namespace of ``ip netns``."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"entering network namespace {namespace}")
    finally:
        os.close(descriptor)


def _interface(namespace: str) -> int:
    enter(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _packets(descriptor: int) -> list[bytes]:
    """What has been sent there, as far as it goes now."""
    found: list[bytes] = []
    while len(found) < _AT_ONCE:
        try:
            found.append(os.read(descriptor, MTU + 100))
        except BlockingIOError:
            break
    return found


def main(seconds: str, *namespaces: str) -> None:
    """Relays until standard input ends."""
    interfaces = [_interface(namespace) for namespace in namespaces]
    by_address = {bytes(map(int, address(i).split("."))): one for i, one in enumerate(interfaces)}
    print("ready", flush=True)
    serve(interfaces, by_address, float(seconds))


def serve(interfaces: Sequence[int], by_address: dict[bytes, int], delay: float) -> None:
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
    main(*sys.argv[1:])
