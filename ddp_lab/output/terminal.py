"""Stream text as the lines a terminal would show: carriage returns, cursor-up and erase sequences applied.

Progress bars rewrite their line with a carriage return, nested ones move the cursor up. Colours pass through.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Line", "TerminalText", "plain"]

_CONTROL = re.compile(r"\r\n|\n|\r|\x08|\x1b\[(\d*)([ABCDGK])")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ESCAPE_BEGUN = re.compile(r"\x1b(?:\[[0-9;]*)?$")
_REACH = 60  # lines above the last one that a cursor-up can still reach


@dataclass(eq=False)
class Line:
    """One line of a stream.

    Attributes:
        text: what a terminal shows, colours included.
        closed: whether a newline ended it.
        rewritten: whether a part of it was overwritten, as a progress bar does.
        first: what it showed when it was first written over since it was last blank: a bar as it began.
        tag: room for the reader's own bookkeeping.
    """

    text: str = ""
    closed: bool = False
    rewritten: bool = False
    first: str = ""
    tag: Any = None


def plain(text: str) -> str:
    """`text` without colour sequences."""
    return _COLOUR.sub("", text)


class TerminalText:
    """The last lines of one stream and the cursor in them.

    Args:
        longest: of a line, only so many characters are kept; None: all.
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest
        self._lines = [Line()]
        self._row = 0
        self._column = 0
        self._held = ""

    def feed(self, text: str) -> list[Line]:
        """Applies `text`; returns the lines that changed, from top to bottom, each once."""
        text = self._held + text
        self._held = ""
        begun = _ESCAPE_BEGUN.search(text)
        if begun:
            text, self._held = text[: begun.start()], text[begun.start() :]
        elif text.endswith("\r"):
            # A "\r\n" may be cut in two: only what follows tells a rewrite from an end of line.
            text, self._held = text[:-1], "\r"
        changed: dict[int, Line] = {}
        position = 0
        for control in _CONTROL.finditer(text):
            self._write(text[position : control.start()], changed)
            self._apply(control, changed)
            position = control.end()
        self._write(text[position:], changed)
        if len(self._lines) > 2 * _REACH:
            cut = len(self._lines) - _REACH
            del self._lines[:cut]
            self._row = max(0, self._row - cut)
        return list(changed.values())

    def _write(self, text: str, changed: dict[int, Line]) -> None:
        if not text:
            return
        line = self._lines[self._row]
        if self._longest is not None:
            text = text[: max(0, self._longest - self._column)]
        if self._column >= len(line.text):
            line.text += " " * (self._column - len(line.text)) + text
        elif "\x1b" in line.text or "\x1b" in text:
            line.text = line.text[: self._column] + text
            line.rewritten = True
        else:
            line.text = line.text[: self._column] + text + line.text[self._column + len(text) :]
            line.rewritten = True
        self._column += len(text)
        changed[id(line)] = line

    def _apply(self, control: re.Match[str], changed: dict[int, Line]) -> None:
        sign = control.group(0)
        line = self._lines[self._row]
        if sign in ("\n", "\r\n"):
            line.closed = True
            changed[id(line)] = line
            self._row += 1
            self._column = 0
            if self._row == len(self._lines):
                self._lines.append(Line())
            return
        if sign == "\r":
            self._column = 0
            line.first = (line.first or line.text) if line.text.strip() else ""
            line.rewritten = True
        elif sign == "\x08":
            self._column = max(0, self._column - 1)
        else:
            self._move(int(control.group(1) or 0), control.group(2), line, changed)

    def _move(self, count: int, command: str, line: Line, changed: dict[int, Line]) -> None:
        if command == "K":
            kept = {0: line.text[: self._column], 1: " " * self._column + line.text[self._column :]}
            line.text = kept.get(count, "")
            line.rewritten = True
            changed[id(line)] = line
            return
        step = max(1, count)
        if command == "A":
            self._row = max(0, self._row - step)
            self._lines[self._row].rewritten = True
        elif command == "B":
            self._row = min(len(self._lines) - 1, self._row + step)
        elif command == "C":
            self._column += step
        elif command == "D":
            self._column = max(0, self._column - step)
        else:
            self._column = step - 1
