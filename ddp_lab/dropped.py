"""Messages that were dropped, because they were none or could not be handled: how many, and when that is said."""

from __future__ import annotations

__all__ = ["Dropped"]


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
