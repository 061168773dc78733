"""What is done to ipyparallel's client below its documented surface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["drop_late_replies", "registered"]


def registered(client: Any) -> dict[int, str]:
    """Engine id -> the uuid by which the controller knows it."""
    return {engine: client._engines[engine] for engine in client.ids}


def drop_late_replies(client: Any) -> None:
    """Lets the client ignore what comes of requests that it has given up, where ipyparallel would print it.

    They come when the link to a host that was lost is whole again, before its ranks have been ended.
    """
    handle = client._queue_handlers["apply_reply"]

    def unless_late(message: Mapping[str, Any]) -> None:
        if message["parent_header"].get("msg_id") in client.outstanding:
            handle(message)

    client._queue_handlers["apply_reply"] = unless_late
