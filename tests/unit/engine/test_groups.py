"""What a rank's groups use: sockets of this process, and the GPU that the default group is given."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest
import torch
from torch.distributed import distributed_c10d

from ddp_lab.engine.groups.registry import bound_to, sockets
from ddp_lab.engine.groups.sockets import Socket
from tests.waiting import wait_until

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def _known(one: socket.socket) -> Socket:
    return one.fileno(), os.fstat(one.fileno()).st_ino


def test_bytes_both_ways_are_counted(pair: Pair) -> None:
    """What was acknowledged and what came; a descriptor that is another socket by now counts for nothing."""
    one, other = pair
    before = sockets.bytes_moved([_known(one)])
    one.sendall(b"x" * 1000)
    assert other.recv(1000, socket.MSG_WAITALL)
    other.sendall(b"y" * 500)
    wait_until(lambda: sockets.bytes_moved([_known(one)]) == before + 1500, "both ways")
    assert sockets.bytes_moved([(one.fileno(), _known(one)[1] + 1)]) == 0


def test_a_socket_that_is_not_polled_wakes_nobody(pair: Pair) -> None:
    """Though something has come in; its neighbour is reported as before."""
    one, other = pair
    with select.epoll() as poll:
        poll.register(one, select.EPOLLIN)
        poll.register(other, select.EPOLLIN)
        one.sendall(b"x")
        other.sendall(b"x")
        wait_until(lambda: len(poll.poll(0)) == 2, "both")
        assert sockets.stop_polling([_known(one)]) == 1
        assert [descriptor for descriptor, _ in poll.poll(0.1)] == [other.fileno()]
        poll.unregister(one)  # which fails for one that it does not know any more


@pytest.mark.parametrize(
    ("device", "backend", "setting", "by_nccl2"),
    [
        ("cuda:1", "cpu:gloo,cuda:nccl", None, True),
        ("cuda:1", "nccl", "1", True),
        ("cuda:1", "nccl", "0", False),
        ("cuda:1", "gloo", None, False),
        ("cpu", "cpu:gloo,cuda:nccl", None, False),
    ],
)
def test_device_of_a_group(
    device: str, backend: str, setting: str | None, by_nccl2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nccl2 is told the rank's GPU, by a torch that builds it; no other backend is told anything."""
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if setting is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", setting)
    told = by_nccl2 and hasattr(distributed_c10d, "_nccl2_device")
    assert bound_to(torch.device(device), backend) == ({"device_id": torch.device(device)} if told else {})
