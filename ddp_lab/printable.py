"""Texts of unknown origin, made safe to show: on a terminal, in a page, in a picture.

[Note: texts are printable from where they come in]
A name may contain characters that control a terminal (ESC and others), that XML forbids, that change the direction of
the text around them, or half a character. Descriptions, journals and saved timelines go through `printable` where they
are read, so code that shows a timeline need not care; paths go through it where they are printed.
"""

from __future__ import annotations

import re
from typing import Any

# C0, DEL and C1 controls, line and paragraph ends, changes of direction, surrogates, non-characters.
_OTHERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    r"""The text, with Python's escapes (``\x1b``) for control characters and others that are not text."""
    return _OTHERS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines, which stay lines; tabs become spaces."""
    return "\n".join(printable(line.expandtabs(4)) for line in text.split("\n"))


def printable_json(value: Any) -> Any:
    """A JSON value with `printable` applied to all its texts, including keys."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_json(one) for one in value]
    if isinstance(value, dict):
        return {printable_json(key): printable_json(one) for key, one in value.items()}
    return value


def what_is_wrong(subject: str, error: Exception) -> str:
    """What is wrong with foreign JSON, whose parsing or use raised this error, in the same words on every Python."""
    if isinstance(error, KeyError):
        return f"{subject} lacks {error}"
    if isinstance(error, RecursionError):
        return f"{subject} contains too deeply nested lists"
    return str(error)


class Dropped:
    """Counts the messages that a thread drops, so that many of them do not fill a log.

    Attributes:
        count: their number.
    """

    def __init__(self) -> None:
        self.count = 0

    def one_more(self) -> bool:
        """Counts one; returns whether to log it: the first, the tenth, the hundredth, ..."""
        self.count += 1
        return str(self.count).strip("0") == "1"
