"""Calls a tool in the kernel that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx2
import mcp_types as types
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from ..errors import ClusterError
from .http_server import HOST
from .rendezvous import Invitation

__all__ = ["call_kernel", "http_client"]

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 3900.0  # longer than a cell may take; a shorter limit is the assistant's own


def http_client(invitation: Invitation) -> httpx2.AsyncClient:
    """A client that reaches the kernel's socket with the kernel's token."""
    return httpx2.AsyncClient(
        transport=httpx2.AsyncHTTPTransport(
            uds=invitation.socket, verify=False
        ),  # no TLS: loading its certificates takes 80 ms
        trust_env=False,  # no proxy may get the token
        headers={"Authorization": f"Bearer {invitation.token}"},
        timeout=httpx2.Timeout(_CONNECT_SECONDS, read=_ANSWER_SECONDS),
    )


async def call_kernel(invitation: Invitation, name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
    """The result of a tool, as the kernel gives it.

    Args:
        invitation: which kernel.
        name: the tool.
        arguments: its arguments.

    Raises:
        ClusterError: the kernel does not answer, or refuses.
    """
    request = types.CallToolRequest(params=types.CallToolRequestParams(name=name, arguments=dict(arguments)))
    try:
        async with (
            http_client(invitation) as http,
            Client(streamable_http_client(f"http://{HOST}/mcp", http_client=http)) as client,
        ):
            # The assistant checks the result against the tool's description; the client's own check would ask for it.
            return await client.session.send_request(request, types.CallToolResult)
    except Exception as error:
        first = _first(error)
        said = f"the notebook of process {invitation.pid} does not answer ({type(first).__name__}: {first})"
        raise ClusterError(f"{said}: run `%cluster mcp` there again") from error


def _first(error: BaseException) -> BaseException:
    """The error itself, out of the groups that tasks wrap it in."""
    parts: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return _first(parts[0]) if parts else error
