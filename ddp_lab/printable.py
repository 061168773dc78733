"""Texts that somebody else has written, as they may be shown: on a terminal, in a page, in a picture.

[Note: texts are printable from where they come in]
A name may hold what a terminal obeys (ESC and other control characters), what XML forbids, what changes the direction
of the text around it, or half a character. Descriptions, journals and saved timelines go through `printable` where
they come in, so whatever shows a timeline has nothing left to do; paths go through it where they are printed.
"""

from __future__ import annotations

import re
from typing import Any

# C0, DEL and C1 controls, line and paragraph ends, changes of direction, surrogates, no characters.
_OTHERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    r"""The text, with escapes as Python writes them (``\x1b``) in place of what does not show as a character."""
    return _OTHERS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def printable_lines(text: str) -> str:
    """The same of a text of several lines, which stay lines."""
    return "\n".join(printable(line) for line in text.split("\n"))


def printable_json(value: Any) -> Any:
    """A JSON value with all its texts, keys among them, as `printable` makes them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_json(one) for one in value]
    if isinstance(value, dict):
        return {printable_json(key): printable_json(one) for key, one in value.items()}
    return value


class Dropped:
    """Counts the messages that one thread drops: a flood of them must not become a flood of lines in a log.

    Attributes:
        count: how many.
    """

    def __init__(self) -> None:
        self.count = 0

    def one_more(self) -> bool:
        """Counts one; returns whether it is to be logged: the first, the tenth, the hundredth, ..."""
        self.count += 1
        return str(self.count).strip("0") == "1"
