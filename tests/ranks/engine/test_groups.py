"""Which sockets belong to a process group."""

from __future__ import annotations

import os
import socket

from ddp_lab.engine.groups import registry


def test_the_port_of_an_earlier_store_is_an_ordinary_port() -> None:
    """After a rejoin a group's connection may get the port of the store before; it still belongs to the group."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            found = connection.fileno(), os.fstat(connection.fileno()).st_ino
            registry.exclude_port(port)
            assert not registry._is_connection(found)
            registry.exclude_port(port + 1)
            assert registry._is_connection(found)
