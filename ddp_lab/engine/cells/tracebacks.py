"""A rendered traceback without the wall of library frames between the user's own.

A backward has four frames of torch, and a forward six for each module, including ours; the user's frames and the last
one matter. Only IPython's rendering with context is folded: other modes (``%xmode Verbose``) are an explicit choice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ...diagnosis.stacks import is_users

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"Cell |File (.+?):\d+(?:, in |\n|$)")
_FEWEST = 2  # omitted frames: a single one is as short as the line on it


def folded(rendered: Sequence[str], mode: str = "Context") -> list[str]:
    """The parts of a traceback with the user's frames and the innermost one of each exception, the others counted.

    Args:
        rendered: IPython's: headings, frames and messages, a part for each.
        mode: of the rendering.
    """
    if mode != "Context":
        return list(rendered)
    made: list[str] = []
    run: list[str] = []  # library frames in a row
    for number, part in enumerate(rendered):
        frame = _FRAME.match(_ANSI.sub("", part))
        following = rendered[number + 1] if number + 1 < len(rendered) else ""
        innermost = _FRAME.match(_ANSI.sub("", following)) is None
        if frame is None or innermost or frame[1] is None or is_users(os.path.expanduser(frame[1])):
            made += _left_out(run)
            run = []
            made.append(part)
        else:
            run.append(part)
    return made


def _left_out(run: Sequence[str]) -> list[str]:
    return list(run) if len(run) < _FEWEST else [f"… {len(run)} library frames\n"]
