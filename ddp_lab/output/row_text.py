"""A block of rows as the text that a notebook shows: labels of ranks, a gutter, lines of bounded length.

[Note: what a page can draw]
A notebook redraws the whole text at each update, on the thread that also responds to the user: a thousand lines take 50
to 100 ms, and 50 % longer with a colour in each line. So of many lines fewer are shown while the cell runs than at the
end, and text with many colours loses them. Labels have no colours, because exported notebooks would show them as escape
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..formatting import label_of
from .progress_bars import merged
from .rows import ROW_LINES, Block, Row
from .terminal import plain

__all__ = ["Look", "text_of"]

_GUTTER = {"stderr": "┃", "value": "→", "rich": "▾"}
_LONGEST_LINE = 5_000
_SHORTEST_LINE = 120
_MOST_COLOURS = 200  # changes of colour: each is an element of the page
_MOST_CHARACTERS = 100_000  # of all lines together, unless each is cut to the shortest


@dataclass(frozen=True)
class Look:
    """How a board shows its rows.

    Attributes:
        labels: whether the ranks are in front of their lines.
        live_head: first lines that are shown while the cell runs.
        live_tail: last lines that are shown then.
        rich: figures, tables, widgets of one cell; further ones are shown as plain text.
    """

    labels: bool = True
    live_head: int = 50
    live_tail: int = 150
    rich: int = 100


def text_of(block: Block, where: str, final: bool = True, look: Look | None = None) -> str:
    """The block's text; sets `block.shortened`.

    Args:
        block: the block.
        where: the text that says where the omitted lines are.
        final: show every row; otherwise only as many as can be redrawn often.
        look: see `Look`.
    """
    look = look or Look()
    rows, hidden, hidden_to = list(_by_rank(block.rows)), block.hidden, block.hidden_to
    block.shortened = not final and len(rows) > look.live_head + look.live_tail
    if block.shortened:
        between = rows[look.live_head : -look.live_tail]
        rows = rows[: look.live_head] + rows[-look.live_tail :]
        hidden += sum(row.lines * len(row.ranks) for row in between)
        hidden_to = max(row.order for row in between)
        where = f"more of them are shown when the cell has ended; {where}"
    labels = [label_of(row.ranks) for row in rows]
    texts = [_text_of(row) for row in rows]
    width = max(map(len, labels), default=0)
    longest = _longest(sum(map(len, texts)), sum(row.lines for row in rows))
    indent, of_all = (" " * width + " ", " (of all ranks together)") if look.labels else ("", "")
    note = f"{indent}… {hidden:,} lines not shown here{of_all}; {where} …" if hidden else ""
    lines: list[str] = []
    before: set[int] | None = None
    for row, label, text in zip(rows, labels, texts, strict=True):
        if note and row.order > hidden_to:
            lines.append(note)
            note, before = "", None
        if look.labels:
            lines += _lines_of(row, label.rjust(width), text, longest, labelled=row.ranks != before)
        elif row.kind != "rich":
            lines += _lines_of_one(row, text, longest)
        before = row.ranks
    shown = "\n".join([*lines, note] if note else lines)
    return plain(shown) if shown.count("\x1b[") > _MOST_COLOURS else shown


def _lines_of(row: Row, label: str, text: str, longest: int, labelled: bool) -> Iterator[str]:
    gutter, blank = _GUTTER.get(row.kind, "│"), " " * len(label)
    if row.kind == "rich":
        yield f"{label} {gutter}"
        return
    for number, line in enumerate(_bounded(text)):
        if not number:
            yield f"{label if labelled else blank} {gutter} {_fit(line, longest)}".rstrip()
        else:
            yield f"{blank} {' ' if gutter == '→' else gutter} {_fit(line, longest)}".rstrip()


def _lines_of_one(row: Row, text: str, longest: int) -> Iterator[str]:
    """Without labels; only errors' text has a gutter."""
    for line in _bounded(text):
        yield f"{'┃ ' if row.kind == 'stderr' else ''}{_fit(line, longest)}".rstrip()


def _text_of(row: Row) -> str:
    return merged(row.bars) if row.bars else row.text


def _bounded(text: str) -> list[str]:
    """The lines of a row, the middle left out of many."""
    lines, some = text.split("\n"), ROW_LINES // 2
    if len(lines) <= 2 * some:
        return lines
    return [*lines[:some], f"… {len(lines) - 2 * some + 1:,} lines of this output not shown …", *lines[1 - some :]]


def _longest(characters: int, lines: int) -> int:
    """The longest line such that all lines together are not too long."""
    if characters <= _MOST_CHARACTERS:
        return _LONGEST_LINE
    return max(_SHORTEST_LINE, min(_LONGEST_LINE, _MOST_CHARACTERS // max(1, lines)))


def _by_rank(rows: list[Row]) -> list[Row]:
    """`rows` with neighbours of different ranks in rank order, because small differences in time mean nothing."""
    ordered: list[Row] = []
    window: list[Row] = []
    seen: set[int] = set()
    for row in rows:
        if row.kind == "rich" or not seen.isdisjoint(row.ranks):
            ordered += sorted(window, key=lambda each: min(each.ranks))
            window, seen = [], set()
        window.append(row)
        seen |= row.ranks
    return ordered + sorted(window, key=lambda each: min(each.ranks))


def _fit(text: str, longest: int) -> str:
    if len(text) > longest:
        text = f"{text[:longest]}… ({len(text):,} characters)"
    return text + "\x1b[0m" if "\x1b" in text else text
