"""How a rank that torch's agent starts finds who watches it."""

from __future__ import annotations

import json
from pathlib import Path

from ..control.wire import Wire

__all__ = ["invite"]


def invite(wire: Wire, folder: Path) -> Path:
    """Writes a file with which a rank can connect to a wire; only this user may read it.

    Args:
        wire: that of this process.
        folder: for the file.
    """
    made = folder / "invitation.json"
    made.touch(mode=0o600)
    made.write_text(json.dumps(wire.endpoint()))
    return made
