"""Lines on stderr, of `ddp-lab run` and of its ranks."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["tell"]


def tell(line: str) -> None:
    """Says a line on stderr."""
    with contextlib.suppress(OSError, ValueError):  # stderr is full or closed: there is nobody to tell
        print(f"ddp-lab: {line}", file=sys.stderr, flush=True)
