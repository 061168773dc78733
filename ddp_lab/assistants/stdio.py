"""`ddp-lab mcp`: what an assistant starts, and talks to through its standard input and output.

It passes calls on to the kernel that serves the cluster, or answers from a recording. The tools are listed without a
kernel: assistants often start before the notebook.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ClusterError
from . import rendezvous
from .library import needed

if TYPE_CHECKING:
    import mcp_types as types
    from mcp.server.lowlevel import Server

__all__ = ["serve_notebook", "serve_recording"]


def serve_recording(path: str | os.PathLike[str]) -> None:
    """Serves a recorded run until the input ends.

    Args:
        path: a folder of `ddp-lab run`, or a file of `Timeline.save`.

    Raises:
        FileNotFoundError: there is nothing at this path.
        ValueError: it is not a recording.
        DdpLabError: the `mcp` library is missing.
    """
    with needed():
        from .protocol import server_of_tools
        from .timeline_tools import Recording, TimelineTools
    _run(server_of_tools(TimelineTools(Recording(Path(path)).read).all()))


def serve_notebook(pid: int | None = None, allow_run: bool = False) -> None:
    """Serves the cluster of a notebook until the input ends.

    Args:
        pid: process id of the notebook's kernel; None if only one serves assistants.
        allow_run: whether to offer the tool that runs a cell. The notebook must allow it, too.

    Raises:
        DdpLabError: the `mcp` library is missing.
    """
    with needed():
        from .cluster_tools import CellTool, ClusterTools
        from .http_transport import call_kernel
        from .protocol import describe, failed, no_such_tool, server_of
        from .timeline_tools import TimelineTools
    tools: list[Any] = [*ClusterTools(_elsewhere).all(), *TimelineTools(_elsewhere).all()]
    if allow_run:
        tools.append(CellTool(_elsewhere, _elsewhere).run_cell)
    offered = [tool.__name__ for tool in tools]

    async def call(name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        if name not in offered:
            return failed(no_such_tool(name, offered, "start the server with `ddp-lab mcp --allow-run`"))
        try:
            return await call_kernel(rendezvous.find(pid), name, arguments)
        except ClusterError as error:
            return failed(str(error))

    _run(server_of(describe(tools), call))


def _elsewhere(*_: Any) -> NoReturn:
    raise AssertionError("the notebook's kernel calls the tools")


def _run(server: Server[Any]) -> None:
    from mcp.server.stdio import stdio_server

    async def main() -> None:
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    asyncio.run(main())
