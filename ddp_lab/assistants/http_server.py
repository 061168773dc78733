"""Tools over HTTP (the protocol's streamable transport) for holders of a token; the socket is the caller's.

Requests without the token get 401. Requests that name another host, or come from a web page (with an origin), get 421
and 403: no page in a browser can reach the tools, not even where somebody forwards a port to the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import AnyHttpUrl

from .answers import Answer
from .protocol import server_of_tools

__all__ = ["HOST", "http_server"]

HOST = "localhost"
_STOP_SECONDS = 1  # for requests in progress


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
        transport_security=TransportSecuritySettings(allowed_hosts=[HOST]),
        auth=AuthSettings(issuer_url=AnyHttpUrl(f"http://{HOST}"), resource_server_url=None),
        token_verifier=_Verifier(known),
    )
    config = uvicorn.Config(
        app, log_config=None, access_log=False, ws="none", lifespan="on", timeout_graceful_shutdown=_STOP_SECONDS
    )
    return _Server(config, ready)
