"""Tools over HTTP (the protocol's streamable transport), for holders of a token; the socket is the caller's.

Requests without the token get 401. Requests that name another host, or come from a web page (with an origin), get 421
and 403: no page in a browser can reach the tools, not even where somebody forwards a port to the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx2
import mcp_types as types
import uvicorn
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import AnyHttpUrl

from ..errors import ClusterError
from .answers import Answer
from .protocol import server_of_tools
from .rendezvous import Invitation

__all__ = ["call_kernel", "http_server"]

_HOST = "localhost"
_STOP_SECONDS = 1  # for requests in progress
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 3900.0  # longer than a cell may take; a shorter limit is the assistant's own


class _Verifier:
    """Knows the token."""

    def __init__(self, known: Callable[[str], bool]) -> None:
        self._known = known

    async def verify_token(self, token: str) -> AccessToken | None:
        """The token, if it is the right one."""
        return AccessToken(token=token, client_id="assistant", scopes=[]) if self._known(token) else None


class _Server(uvicorn.Server):
    """Reports when it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Begins to answer."""
        await super().startup(sockets)
        self._ready()


def http_server(
    tools: Sequence[Callable[..., Answer[Any]]], known: Callable[[str], bool], ready: Callable[[], None]
) -> uvicorn.Server:
    """A server for `run(sockets=[...])` on a thread; `should_exit = True` ends it.

    Args:
        tools: see `server_of_tools`.
        known: whether a token is the right one, in constant time.
        ready: called when it answers.
    """
    app = server_of_tools(tools).streamable_http_app(
        json_response=True,
        stateless_http=True,
        transport_security=TransportSecuritySettings(allowed_hosts=[_HOST]),
        auth=AuthSettings(issuer_url=AnyHttpUrl(f"http://{_HOST}"), resource_server_url=None),
        token_verifier=_Verifier(known),
    )
    config = uvicorn.Config(
        app, log_config=None, access_log=False, ws="none", lifespan="on", timeout_graceful_shutdown=_STOP_SECONDS
    )
    return _Server(config, ready)


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
            Client(streamable_http_client(f"http://{_HOST}/mcp", http_client=http)) as client,
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
