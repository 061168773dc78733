"""The `mcp` library is an optional part: who needs it and has it not is told how to get it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import DdpLabError

__all__ = ["needed"]

_PARTS = ("mcp", "mcp_types", "pydantic", "httpx2", "uvicorn", "starlette")


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Around imports of modules that use the library.

    Raises:
        DdpLabError: it is missing, or too old.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _PARTS:
            raise
        raise DdpLabError(
            f"assistants need the `mcp` library, 2.3 or later ({error}): run `pip install 'ddp_lab[mcp]'`"
        ) from error
