"""An assistant for tests: the official client of the Model Context Protocol, over the real transports."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import mcp_types as types
from mcp import Client, StdioServerParameters

__all__ = ["Assistant", "text_of"]

_Result = TypeVar("_Result")


class Assistant:
    """Starts `ddp-lab mcp` for each question, as an assistant does.

    Args:
        options: of `ddp-lab mcp`.
    """

    def __init__(self, *options: str) -> None:
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), **os.environ}
        command = [sys.executable, "-m", "ddp_lab", "mcp", *options]
        self._server = StdioServerParameters(command=command[0], args=command[1:], env=environment)

    def tools(self) -> dict[str, types.Tool]:
        """Name -> description of each tool that is offered."""
        listed = self.with_client(lambda client: client.list_tools())
        return {tool.name: tool for tool in listed.tools}

    def call(self, name: str, **arguments: Any) -> types.CallToolResult:
        """The result of a tool; the client has checked its facts against the tool's schema."""
        return self.with_client(lambda client: client.call_tool(name, arguments))

    def with_client(self, do: Callable[[Client], Awaitable[_Result]]) -> _Result:
        """What `do` returns for a connected client."""

        async def main() -> _Result:
            async with Client(self._server) as client:
                return await do(client)

        return asyncio.run(main())


def text_of(result: types.CallToolResult) -> str:
    """What the assistant reads."""
    return "\n".join(part.text for part in result.content if isinstance(part, types.TextContent))
