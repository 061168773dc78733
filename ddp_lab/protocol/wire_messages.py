"""What ranks say over the wire beside event batches: JSON objects, checked before anything relies on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .descriptions import integer, text

__all__ = ["parse"]


def _a(kind: type) -> Callable[[Any, str], None]:
    def checked(value: Any, where: str) -> None:
        if not isinstance(value, kind):
            raise ValueError(f"{where} is a {type(value).__name__}, not a {kind.__name__}")

    return checked


_SESSION = integer(0, 1 << 63)
_FIELDS: dict[str, dict[str, Callable[[Any, str], None]]] = {
    "describe": {"descriptions": _a(list), "session": _SESSION},
    "status": {"status": _a(dict)},
    "flushed": {"cell": text},
    "error": {"text": text},
    "hello": {},
    "bye": {},
    "reply": {"id": integer(0, 1 << 63), "reply": _a(dict)},
}


def parse(frames: list[Any]) -> tuple[int, dict[str, Any]]:
    """The rank that a message comes from, and the message; its last frame is JSON.

    Raises:
        ValueError: it is none that a rank sends; says what is wrong with it.
    """
    if len(frames) != 2:
        raise ValueError(f"a message of {len(frames)} frames, not of 2")
    message = json.loads(bytes(frames[1]))
    if not isinstance(message, dict):
        raise ValueError(f"a message that is a {type(message).__name__}, not an object")
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"a message of type {str(kind)[:40]!r}")
    integer(0, 1 << 31)(message.get("rank"), f"the rank in a message of type {kind!r}")
    for name, one in _FIELDS[kind].items():
        one(message.get(name), f"{name!r} in a message of type {kind!r}")
    rank: int = message["rank"]
    return rank, message
