"""Where a diagnosis is explained: a lesson of this project, and a heading in it."""

from __future__ import annotations

__all__ = ["HANGS", "hang_lesson"]

HANGS = "tutorials/11_why_does_my_cell_hang.ipynb"
_BUSY, _ENDED, _CALLS = "A rank that is busy", "A rank that has ended", "Different calls"
_HEADINGS = {
    **dict.fromkeys(("busy", "paused", "silent", "stopped", "peer"), _BUSY),
    **dict.fromkeys(("ended", "subset", "unused"), _ENDED),
    **dict.fromkeys(("mismatch", "sizes", "root", "ahead", "group", "groups", "making", "crossed", "backward"), _CALLS),
    "order": _CALLS,
    "dead": "A rank that is gone",
    "slow": "A link that is slow",
    "unknown": "Who is asked",
}


def hang_lesson(kind: str) -> str:
    """E.g. ``'tutorials/11_why_does_my_cell_hang.ipynb, "Different calls"'``; "" for a kind that is no trouble.

    Args:
        kind: of a `Diagnosis`.
    """
    heading = _HEADINGS.get(kind)
    return f'{HANGS}, "{heading}"' if heading else ""
