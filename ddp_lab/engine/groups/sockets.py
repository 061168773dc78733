"""This process's sockets as the kernel lists them, and sealing of torch's ports against other users.

[Note: a sealed port]
torch's store and Gloo do not authenticate their peers, and keep listening when all ranks are connected. From then on no
connection is needed: a filter on the listening socket drops packets that would open one. Existing connections have
sockets of their own and continue; those to the store that another user of this machine opened before are shut down. So
such a user has only the moments in which ranks start, rejoin or make a group. If the kernel refuses the filter, as in
some containers, the ports stay open, and the start of the cluster reports it.

See [Note: a reused descriptor] in `ddp_lab.engine.groups.registry`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

Socket = tuple[int, int]  # descriptor, inode

_SO_ATTACH_FILTER = 26  # of Linux; Python does not name it
_TAKE_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF: return 0
_ESTABLISHED = "01"
_BYTES_MOVED = struct.Struct("=120xQQ")  # of Linux's struct tcp_info: bytes acknowledged, bytes received
_EPOLL_CTL_MOD = 3
_EPOLL_EVENT = struct.Struct("=LQ" if platform.machine() == "x86_64" else "=L4xQ")
_WATCHED = re.compile(r"tfd: *(\d+) events: *\w+ data: *(\w+) +pos:\w+ ino:(\w+)")
_ACCEPT_SECONDS = 1.0  # until an established connection is a socket of this process


def all_sockets(descriptors: Iterable[int] | None = None) -> Iterator[Socket]:
    """This process's sockets, or those among some descriptors."""
    for entry in os.listdir("/proc/self/fd") if descriptors is None else descriptors:
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # closed since it was listed
            continue
        if target.startswith("socket:["):
            yield int(entry), int(target[len("socket:[") : -1])


def connection_ports(one: Socket) -> tuple[int, ...]:
    """Own and peer's port of a connected TCP socket; nothing for others."""
    with _tcp(one) as copy:
        if copy is not None:
            with contextlib.suppress(OSError):  # listening
                return copy.getsockname()[1], copy.getpeername()[1]
    return ()


def close_beside(connections: Iterable[Socket]) -> str:
    """Closes the loop that serves these connections to new ones: Gloo's, and no other of this process.

    See [Note: a sealed port]. Earlier connections stay: Gloo does not serve unexpected ones.

    Returns:
        Why it could not be done; empty if it was.
    """
    why = ""
    descriptors, beside = {descriptor for descriptor, _ in connections}, set[int]()
    for _, watched in _watched():
        beside |= watched.keys() - descriptors if watched.keys() & descriptors else set()
    for one in all_sockets(sorted(beside)):
        if _listening_port(one) is not None:
            why = _drop_all(one) or why
    return why


def bytes_moved(connections: Iterable[Socket]) -> int:
    """The number of bytes through these connections in both directions, as far as their peers acknowledged them."""
    total = 0
    for one in connections:
        with _duplicate(one) as copy:
            if copy is not None:
                total += sum(
                    _BYTES_MOVED.unpack(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_MOVED.size))
                )
    return total


def stop_polling(connections: Iterable[Socket]) -> int:
    """Stops the notifications of incoming data on these connections for the threads that poll them.

    Gloo's loop leaves data that no work expects in the socket, and is notified of it again at once. The descriptors
    stay valid: Gloo will close them.

    Returns:
        How many there were.
    """
    inodes, count = {inode for _, inode in connections}, 0
    for poll, watched in _watched():
        for descriptor, (inode, data) in watched.items():
            if inode in inodes:
                event = _EPOLL_EVENT.pack(select.EPOLLET, data)
                ctypes.CDLL(None).epoll_ctl(poll, _EPOLL_CTL_MOD, descriptor, event)  # fails if it is closed by now
                count += 1
    return count


def _watched() -> Iterator[tuple[int, dict[int, tuple[int, int]]]]:
    """Each epoll of this process: a descriptor of our own, and descriptor -> (inode, data) of what it watches."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            if os.readlink(f"/proc/self/fd/{entry}") == "anon_inode:[eventpoll]":
                copy = os.dup(int(entry))
                try:
                    found = _WATCHED.findall(Path(f"/proc/self/fdinfo/{copy}").read_text())
                    yield copy, {int(one): (int(inode, 16), int(data, 16)) for one, data, inode in found}
                finally:
                    os.close(copy)


def _listening_port(one: Socket) -> int | None:
    """The port of a TCP socket that listens; None for others."""
    with _tcp(one) as copy:
        if copy is not None and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return int(copy.getsockname()[1])
    return None


def shut_down(one: Socket, how: int = socket.SHUT_RDWR) -> None:
    """Shuts a socket down, if the descriptor still is that one."""
    with _duplicate(one) as copy, contextlib.suppress(OSError):  # the peer closed it first
        if copy is not None:
            copy.shutdown(how)


def seal(port: int) -> str:
    """Closes this port of this process to new connections, and shuts down those of other users.

    See [Note: a sealed port]. Does nothing for a port on which this process does not listen.

    Returns:
        Why it could not be done; empty if it was.
    """
    listening = [one for one in all_sockets() if _listening_port(one) == port]
    refused = [why for one in listening if (why := _drop_all(one))]
    if refused:
        return refused[0]
    deadline = time.monotonic() + _ACCEPT_SECONDS
    while listening and (strangers := _strangers(port)) and time.monotonic() < deadline:
        for one in all_sockets():
            with _tcp(one) as copy:
                if copy is not None and copy.family == socket.AF_INET and _ends(copy) in strangers:
                    shut_down(one)
        time.sleep(0.005)
    return ""


def _drop_all(one: Socket) -> str:
    """Attaches the filter; returns why it could not."""
    program = ctypes.create_string_buffer(_TAKE_NOTHING, len(_TAKE_NOTHING))
    with _duplicate(one) as copy:
        if copy is not None:
            described = struct.pack("@HP", 1, ctypes.addressof(program))
            try:
                copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
            except PermissionError as error:
                return error.strerror or str(error)
    return ""


def _strangers(port: int) -> set[tuple[str, str]]:
    """Both ends (ours, theirs) of connections of other users of this machine to this port, as the kernel has them."""
    found = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, theirs, ours, state, _, _, _, user, *_ = line.split()
        if state == _ESTABLISHED and int(user) != os.getuid() and int(ours.partition(":")[2], 16) == port:
            found.add((ours, theirs))
    return found


def _ends(connection: socket.socket) -> tuple[str, str]:
    try:
        ends = connection.getsockname(), connection.getpeername()
    except OSError:  # listening
        return "", ""
    ours, theirs = (f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}" for host, port in ends)
    return ours, theirs


@contextlib.contextmanager
def _duplicate(one: Socket) -> Iterator[socket.socket | None]:
    """A socket object of our own for the descriptor; None if it is no longer the socket with this inode."""
    descriptor, inode = one
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as made:
        yield made


@contextlib.contextmanager
def _tcp(one: Socket) -> Iterator[socket.socket | None]:
    """The same, None also for other than TCP sockets."""
    with _duplicate(one) as copy:
        tcp = copy is not None and copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        yield copy if tcp else None
