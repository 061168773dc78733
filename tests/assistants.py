"""An assistant for tests: the official client of the Model Context Protocol, over the real transports."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mcp_types as types
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, StdioServerParameters

__all__ = ["Assistant", "assistant", "data_of", "text_of"]


@contextmanager
def assistant(*options: str) -> Iterator[Assistant]:
    """Starts `ddp-lab mcp` with these options, as an assistant does, and ends it."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **os.environ}
    command = ["-m", "ddp_lab", "mcp", *options]
    server = StdioServerParameters(command=sys.executable, args=command, env=environment)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Client(server)) as client:
        yield Assistant(portal, client)


@dataclass(frozen=True)
class Assistant:
    """A client that is connected to `ddp-lab mcp`."""

    _portal: BlockingPortal
    _client: Client

    def tools(self) -> dict[str, types.Tool]:
        """Name -> description of each tool that is offered."""
        return {tool.name: tool for tool in self._portal.call(self._client.list_tools).tools}

    def call(self, name: str, **arguments: Any) -> types.CallToolResult:
        """The result of a tool; the client has checked its facts against the tool's schema."""
        return self._portal.call(partial(self._client.call_tool, name, arguments))


def text_of(result: types.CallToolResult) -> str:
    """What the assistant reads."""
    return "\n".join(part.text for part in result.content if isinstance(part, types.TextContent))


def data_of(result: types.CallToolResult) -> dict[str, Any]:
    """The facts, which must be there."""
    assert result.structured_content is not None, text_of(result)
    return result.structured_content
