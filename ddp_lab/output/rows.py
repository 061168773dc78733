"""Rows of output that several ranks may share, in blocks of text.

[Note: joining equal lines]
Rows are kept in the order of first arrival. A line of a rank joins the first row with the same text and kind below the
rank's last shared row; if there is none, it becomes a row of its own. Rows that only this rank has had meanwhile move
above the row that it joins. So every rank's lines stay in order, and ranks that print the same lines share their rows
even if one of them is late.

[Note: bars]
A progress bar joins the first bar of other ranks that began alike, wherever that is, and stays there: bars and lines
are printed to two streams, whose relative order means little.

[Note: bounded rows]
Of all blocks together, the first `HEAD_LINES` and the last `TAIL_LINES` lines are kept, and the last few progress bars
between them, which may still change; the rest is removed before each refresh. Removed rows are remembered for a while,
so that other ranks can join them, and counted in their block.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .progress_bars import Bar, Began

__all__ = ["HEAD_LINES", "ROW_LINES", "TAIL_LINES", "Block", "Row", "Rows"]

HEAD_LINES = 100
TAIL_LINES = 400
ROW_LINES = 100  # of one value or display that are shown
_SLACK_LINES = 2_000
_STREAMS = ("stdout", "stderr")
_KEPT_BARS = 16
_JOINABLE_ROWS = 20_000
_JOINABLE_CHARACTERS = 4_000_000
_MOVABLE_ROWS = 200
_GAP = 1 << 256  # between the orders of two rows: room to move rows between them


@dataclass(eq=False)
class Row:
    """One output of one or several ranks.

    Attributes:
        bars: rank -> its state of the progress bar that this row is.
    """

    order: int
    kind: str
    text: str
    ranks: set[int]
    block: Block
    key: tuple[str, str] = ("", "")
    visible: bool = True
    bundle: dict[str, Any] | None = None
    bars: dict[int, Bar] | None = None

    @property
    def lines(self) -> int:
        """Lines of text that it takes."""
        return 1 if self.kind in _STREAMS else min(ROW_LINES, 1 + self.text.count("\n"))


@dataclass(eq=False)
class Block:
    """Consecutive rows of text, ended by at most one rich output.

    Attributes:
        hidden: number of omitted lines, counted for each rank.
        hidden_to: order of the last omitted row.
        shortened: whether fewer lines are shown than the block has.
    """

    index: int
    rows: list[Row] = field(default_factory=list)
    hidden: int = 0
    hidden_to: int = 0
    rich: Row | None = None
    text_dirty: bool = False
    rich_dirty: bool = False
    text_shown: bool = False
    shortened: bool = False
    rich_shown: bool = False


@dataclass(eq=False)
class _Progress:
    """The position of a rank: its last shared row (or rich output), its own rows below that, and its last block."""

    anchor: int = 0
    own: list[Row] = field(default_factory=list)
    block: int = 0


class Rows:
    """All rows of a board. See [Note: joining equal lines], [Note: bounded rows]."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.dirty = False
        self._orders = itertools.count(_GAP, _GAP)
        self._ranks: dict[int, _Progress] = {}
        self._joinable: dict[tuple[str, str], list[Row]] = {}
        self._recent: deque[tuple[Row, int]] = deque()
        self._recent_characters = 0
        self._lines = 0  # shown, besides the labels of rich outputs

    def place(self, rank: int, kind: str, text: str, joins: bool) -> Row:
        """The row for an output of `rank`: an equal one of other ranks if it `joins`, else a new one."""
        key = (kind, text)
        progress = self._progress(rank)
        found = self._find(rank, key, progress.own) if joins else None
        if found is not None:
            self._join(rank, found, progress.own)
            progress.own = []
            return found
        row = self.append(kind, text, {rank})
        if joins:
            self.offer(row, key)
        return row

    def place_bar(self, rank: int, kind: str, began: Began, bar: Bar) -> Row:
        """The row for a progress bar of `rank`: the first of other ranks that began alike, else a new one."""
        key = _bar_key(kind, began)
        rows = self._joinable.get(key, [])
        row = next((each for each in rows if rank not in each.ranks and each.visible), None)
        if row is None:
            row = self.append(kind, "", {rank}, bars={})
            self.offer(row, key)
        row.ranks.add(rank)
        row.bars = {**(row.bars or {}), rank: bar}
        self.touch(row)
        return row

    def is_bar(self, row: Row, kind: str, began: Began) -> bool:
        """Whether a row is the progress bar that began like this."""
        return row.key == _bar_key(kind, began)

    def append(self, kind: str, text: str, ranks: set[int], bars: dict[int, Bar] | None = None) -> Row:
        """A new last row; a progress bar's row does not order the lines of its ranks."""
        block = self._block_for(ranks)
        row = Row(next(self._orders), kind, text, ranks, block, bars=bars)
        block.rows.append(row)
        if kind != "rich":
            self._lines += row.lines
        if self._lines > HEAD_LINES + TAIL_LINES + _SLACK_LINES:
            self.trim()
        for rank in ranks:
            progress = self._progress(rank)
            progress.block = max(progress.block, block.index)
            if bars is not None:
                continue
            if kind == "rich" or len(ranks) > 1 or len(progress.own) >= _MOVABLE_ROWS:
                progress.anchor, progress.own = row.order, []
            else:
                progress.own.append(row)
        self.touch(row)
        return row

    def settle(self, rank: int, row: Row) -> Row:
        """The row of `rank` for a line that is complete now and was shown while it grew."""
        key = (row.kind, row.text)
        progress = self._progress(rank)
        place = progress.own.index(row) if row in progress.own else None
        found = None
        if place is not None:
            before, after = progress.own[:place], progress.own[place + 1 :]
            found = self._find(rank, key, before)
            if found is not None and all(each.order > found.order for each in after):
                self.drop(row)
                self._join(rank, found, before)
                progress.own = after
                return found
        self.offer(row, key)
        return row

    def forget(self, rank: int) -> None:
        """Resets `rank`: its next output may join any row."""
        self._ranks.pop(rank, None)

    def arrange(self) -> None:
        """Puts rich outputs of different ranks that follow each other in rank order."""
        for run in _disjoint_runs([block for block in self.blocks if block.rich is not None]):
            ordered = sorted((block.rows[-1] for block in run), key=lambda row: min(row.ranks))
            for block, row in zip(run, ordered, strict=True):
                if block.rich is not row:
                    block.rows[-1] = block.rich = row
                    row.block = block
                    block.text_dirty = block.rich_dirty = self.dirty = True

    def touch(self, row: Row) -> None:
        """Marks a row's block for showing again."""
        if row.visible:
            row.block.text_dirty = self.dirty = True

    def leave(self, row: Row, rank: int) -> None:
        """Removes `rank` from a row, and the row if it has no ranks left."""
        row.ranks.discard(rank)
        if row.bars is not None:
            row.bars.pop(rank, None)
        if row.ranks:
            self.touch(row)
        else:
            self.drop(row)

    def drop(self, row: Row) -> None:
        """Removes a row."""
        self.withdraw(row)
        if row.visible:
            row.block.rows.remove(row)
            self._lines -= row.lines if row.kind != "rich" else 0
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

    def _progress(self, rank: int) -> _Progress:
        return self._ranks.setdefault(rank, _Progress())

    def _block_for(self, ranks: set[int]) -> Block:
        """The first block from the ranks' last row on that no rich output ends: the last one, or, for live plots, one
        that a `clear_output` has opened again."""
        begin = max((self._progress(rank).block for rank in ranks), default=0)
        for block in self.blocks[begin:]:
            if block.rich is None:
                return block
        self.blocks.append(Block(len(self.blocks)))
        return self.blocks[-1]

    def _find(self, rank: int, key: tuple[str, str], before: list[Row]) -> Row | None:
        """An equal row below the rank's last shared one, above which its rows `before` can be moved."""
        rows = self._joinable.get(key)
        if not rows:
            return None
        begin = bisect.bisect_right(rows, self._progress(rank).anchor, key=lambda row: row.order)
        for row in itertools.islice(rows, begin, None):
            below = [each for each in before if each.order > row.order]
            movable = all(each.ranks == {rank} and each.block is row.block and each.visible for each in below)
            if rank not in row.ranks and (not below or (movable and row.visible)):
                return row
        return None

    def _join(self, rank: int, row: Row, before: list[Row]) -> None:
        """Adds `rank` to a row; its own rows `before` that are below it move above it."""
        rows = row.block.rows
        moved = [each for each in before if each.order > row.order]
        if moved:
            for each in moved:
                rows.remove(each)
            place = rows.index(row)
            above = rows[place - 1].order if place else 0
            rows[place:place] = moved
            for number, each in enumerate(moved, start=1):
                self._reorder(each, above + (row.order - above) * number // (len(moved) + 1))
        for other in row.ranks:
            progress = self._progress(other)
            if row in progress.own:
                progress.anchor = row.order
                progress.own = progress.own[progress.own.index(row) + 1 :]
        row.ranks.add(rank)
        if not row.visible:
            row.block.hidden += row.lines
            row.block.text_dirty = self.dirty = True
        progress = self._progress(rank)
        progress.anchor = row.order
        progress.block = max(progress.block, row.block.index)
        self.touch(row)

    def _reorder(self, row: Row, order: int) -> None:
        joinable = row in self._joinable.get(row.key, ())
        if joinable:
            self.withdraw(row)
        row.order = order
        if joinable:
            self.offer(row, row.key)

    def hide(self, rank: int, lines: int) -> None:
        """Counts lines of `rank` after its last row that are not even placed."""
        progress = self._progress(rank)
        last = progress.own[-1].order if progress.own else progress.anchor
        block = self._block_for({rank})
        block.hidden += lines
        block.hidden_to = max(block.hidden_to, last)
        progress.own = []
        block.text_dirty = self.dirty = True

    def trim(self) -> None:
        """Removes the lines between the first and the last ones. See [Note: bounded rows]."""
        if self._lines <= HEAD_LINES + TAIL_LINES:
            return
        rows = [row for block in self.blocks for row in block.rows if row is not block.rich]
        between = rows[_reaching(rows, HEAD_LINES) : len(rows) - _reaching(rows[::-1], TAIL_LINES)]
        bars = [row for row in between if row.bars][-_KEPT_BARS:]
        for row in between:
            if row not in bars:
                row.visible = False
                row.block.hidden += row.lines * len(row.ranks)
                row.block.hidden_to = max(row.block.hidden_to, row.order)
                row.block.text_dirty = True
        for block in self.blocks:
            block.rows = [row for row in block.rows if row.visible]
        self._lines = sum(row.lines for row in rows if row.visible)

    def offer(self, row: Row, key: tuple[str, str]) -> None:
        """Lets other ranks join this row with an output of the same kind and text."""
        row.key = key
        bisect.insort(self._joinable.setdefault(key, []), row, key=lambda each: each.order)
        self._recent.append((row, len(key[1])))
        self._recent_characters += len(key[1])
        while len(self._recent) > _JOINABLE_ROWS or self._recent_characters > _JOINABLE_CHARACTERS:
            oldest, characters = self._recent.popleft()
            self._recent_characters -= characters
            self.withdraw(oldest)


def _bar_key(kind: str, began: Began) -> tuple[str, str]:
    return (f"bar on {kind}", "\n".join(began))


def _reaching(rows: list[Row], lines: int) -> int:
    """How many of the first rows take at most this many lines."""
    for place, row in enumerate(rows):
        lines -= row.lines
        if lines < 0:
            return place
    return len(rows)


def _disjoint_runs(blocks: list[Block]) -> list[list[Block]]:
    """Rich outputs of different ranks with nothing between them."""
    runs: list[list[Block]] = []
    seen: set[int] = set()
    for block in blocks:
        ranks = block.rows[-1].ranks
        if not runs or len(block.rows) > 1 or not seen.isdisjoint(ranks):
            runs.append([])
            seen = set()
        runs[-1].append(block)
        seen |= ranks
    return runs
