"""Rank side of push and pull: sets and reads names of the rank's namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import values

__all__ = ["read", "write"]


def write(names: Sequence[str], *objects: Any) -> None:
    """Binds names in the rank's namespace to objects."""
    from IPython import get_ipython

    get_ipython().push(dict(zip(names, objects, strict=True)))


def read(expression: str) -> dict[str, Any]:
    """The value of a variable or expression, for a client without torch.

    Returns:
        ``state``: "ok", "unknown" (a name or attribute that is not there) or "kept" (it can't leave the rank);
        ``blob``: the pickled value; ``why``, and ``kind`` (its type's name) where it is kept.
    """
    from IPython import get_ipython

    try:
        value = eval(expression, get_ipython().user_ns)
    except (NameError, AttributeError) as error:
        return {"state": "unknown", "why": str(error)}
    try:
        return {"state": "ok", "blob": values.to_bytes(value)}
    except values.NotPortableError as error:
        return {"state": "kept", "why": str(error), "kind": type(value).__name__}
