"""The controller's process, without a cluster around it."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from ddp_lab.client.launchers import Controller
from ddp_lab.engine.controller import hold_ports
from tests.leftovers import wait_until


def test_ports_are_held() -> None:
    """Nobody else gets a held port, another holder neither; a listener that reuses addresses, as ZeroMQ's, does."""
    with contextlib.ExitStack() as stack:
        ports, others = ([stack.enter_context(one).getsockname()[1] for one in hold_ports()] for _ in range(2))
        assert len({*ports, *others}) == len(ports) + len(others)
        for port in ports:
            with socket.socket() as plain, pytest.raises(OSError, match="in use"):
                plain.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
                pass


def test_held_ports_suffice(tmp_path: Path) -> None:
    """ipcontroller has no need to look for a port itself; else it says so in its log."""
    controller = Controller(tmp_path)
    controller.start()
    try:
        wait_until(controller.connection, 60, "the controller")
    finally:
        controller.stop()
    assert "xhausted" not in (tmp_path / "controller.log").read_text()
