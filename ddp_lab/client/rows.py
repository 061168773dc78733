"""Rows of output that several ranks may share, in blocks of text.

[Note: joining equal lines]
Rows are kept in the order in which they first came. A line of a rank joins the first row below the rank's previous
one that has the same text and kind; only when there is none it becomes a row of its own. So every rank's lines stay
in their order, and ranks that print the same share their rows however late one of them is.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .rank_sets import label_of

__all__ = ["Block", "Row", "Rows", "text_of"]

HEAD_LINES = 200
TAIL_LINES = 300
_SLACK_LINES = 100
_JOINABLE_ROWS = 20_000
_LONGEST_LINE = 5_000


@dataclass(eq=False)
class Row:
    """One output of one or several ranks."""

    order: int
    kind: str
    text: str
    ranks: set[int]
    block: Block
    floor: int
    key: tuple[str, str] = ("", "")
    visible: bool = True
    bundle: dict[str, Any] | None = None


@dataclass(eq=False)
class Block:
    """Consecutive rows of text, ended by at most one rich output."""

    index: int
    rows: list[Row] = field(default_factory=list)
    hidden: int = 0
    rich: Row | None = None
    text_dirty: bool = False
    rich_dirty: bool = False
    text_shown: bool = False
    rich_shown: bool = False


class Rows:
    """All rows of a board. See [Note: joining equal lines]."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.dirty = False
        self._order = itertools.count(1)
        self._last: dict[int, int] = {}
        self._last_block: dict[int, int] = {}
        self._joinable: dict[tuple[str, str], list[Row]] = {}
        self._recent: deque[Row] = deque()

    def place(self, rank: int, kind: str, text: str, joins: bool) -> Row:
        """The row for an output of `rank`: an equal one of other ranks if it `joins`, else a new one."""
        floor = self._last.get(rank, 0)
        key = (kind, text)
        row = self._find(rank, key, floor) if joins else None
        if row is None:
            row = self.append(kind, text, {rank})
            if joins:
                self.offer(row, key)
        else:
            row.ranks.add(rank)
            self.touch(row)
            self._note(rank, row)
        return row

    def append(self, kind: str, text: str, ranks: set[int]) -> Row:
        """A new last row."""
        block = self._block_for(ranks)
        floor = max((self._last.get(rank, 0) for rank in ranks), default=0)
        row = Row(next(self._order), kind, text, ranks, block, floor)
        block.rows.append(row)
        if len(block.rows) > HEAD_LINES + TAIL_LINES + _SLACK_LINES:
            cut = block.rows[HEAD_LINES:-TAIL_LINES]
            del block.rows[HEAD_LINES:-TAIL_LINES]
            block.hidden += len(cut)
            for each in cut:
                each.visible = False
        for rank in ranks:
            self._note(rank, row)
        self.touch(row)
        return row

    def settle(self, rank: int, row: Row) -> Row:
        """The row of `rank` for a line that is complete now and was shown while it grew."""
        key = (row.kind, row.text)
        found = self._find(rank, key, row.floor)
        if found is None or found is row:
            self.offer(row, key)
            return row
        self.drop(row)
        found.ranks.add(rank)
        self.touch(found)
        self._note(rank, found)
        return found

    def forget(self, rank: int) -> None:
        """`rank` begins anew: its next output may join any row."""
        self._last.pop(rank, None)
        self._last_block.pop(rank, None)

    def touch(self, row: Row) -> None:
        """Marks a row's block for showing again."""
        if row.visible:
            row.block.text_dirty = self.dirty = True

    def leave(self, row: Row, rank: int) -> None:
        """Takes `rank` off a row; a row without ranks goes."""
        row.ranks.discard(rank)
        if row.ranks:
            self.touch(row)
        else:
            self.drop(row)

    def drop(self, row: Row) -> None:
        """Takes a row out."""
        self.withdraw(row)
        if row.visible:
            row.block.rows.remove(row)
            self.touch(row)
        if row.block.rich is row:
            row.block.rich = None
            row.block.rich_dirty = self.dirty = True
        row.visible = False

    def withdraw(self, row: Row) -> None:
        """No other rank may join this row any more."""
        rows = self._joinable.get(row.key)
        if rows and row in rows:
            rows.remove(row)
            if not rows:
                del self._joinable[row.key]

    def _note(self, rank: int, row: Row) -> None:
        self._last[rank] = max(self._last.get(rank, 0), row.order)
        self._last_block[rank] = max(self._last_block.get(rank, 0), row.block.index)

    def _block_for(self, ranks: set[int]) -> Block:
        """The first block from the ranks' last row on that no rich output ends: the last one, or, for live plots, one
        that a `clear_output` has opened again."""
        begin = max((self._last_block.get(rank, 0) for rank in ranks), default=0)
        for block in self.blocks[begin:]:
            if block.rich is None:
                return block
        self.blocks.append(Block(len(self.blocks)))
        return self.blocks[-1]

    def _find(self, rank: int, key: tuple[str, str], floor: int) -> Row | None:
        rows = self._joinable.get(key)
        if not rows:
            return None
        begin = bisect.bisect_right(rows, floor, key=lambda row: row.order)
        for row in itertools.islice(rows, begin, None):
            if rank not in row.ranks:
                return row
        return None

    def offer(self, row: Row, key: tuple[str, str]) -> None:
        """Lets other ranks join this row with an output of the same kind and text."""
        row.key = key
        bisect.insort(self._joinable.setdefault(key, []), row, key=lambda each: each.order)
        self._recent.append(row)
        if len(self._recent) > _JOINABLE_ROWS:
            self.withdraw(self._recent.popleft())


_GUTTER = {"stderr": "\x1b[31m│\x1b[0m", "value": "→", "rich": "▾"}


def text_of(block: Block) -> str:
    width = max((len(label_of(row.ranks)) for row in block.rows), default=0)
    lines: list[str] = []
    before: set[int] | None = None
    for place, row in enumerate(_by_rank(block.rows)):
        if place == HEAD_LINES and block.hidden:
            lines.append(f"{'':{width}} … {block.hidden:,} lines not shown here; the cell's result has them all …")
            before = None
        label = label_of(row.ranks).rjust(width) if row.ranks != before else " " * width
        gutter = _GUTTER.get(row.kind, "│")
        before = row.ranks
        if row.kind == "rich":
            lines.append(f"\x1b[34m{label_of(row.ranks).rjust(width)}\x1b[0m {gutter}")
            continue
        for number, text in enumerate(row.text.split("\n")):
            head = f"\x1b[34m{label}\x1b[0m" if label.strip() and not number else " " * width
            lines.append(f"{head} {gutter if not number or gutter != '→' else ' '} {_fit(text)}".rstrip())
    return "\n".join(lines)


def _by_rank(rows: list[Row]) -> list[Row]:
    """`rows` with neighbours of different ranks in rank order: which rank was first by a moment says nothing."""
    ordered: list[Row] = []
    window: list[Row] = []
    seen: set[int] = set()
    for row in rows:
        if not seen.isdisjoint(row.ranks):
            ordered += sorted(window, key=lambda each: min(each.ranks))
            window, seen = [], set()
        window.append(row)
        seen |= row.ranks
    return ordered + sorted(window, key=lambda each: min(each.ranks))


def _fit(text: str) -> str:
    if len(text) > _LONGEST_LINE:
        text = f"{text[:_LONGEST_LINE]}… ({len(text):,} characters)"
    return text + "\x1b[0m" if "\x1b" in text else text
