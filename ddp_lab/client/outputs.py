"""What the ranks print and display, shown as it comes: labelled by rank, equal outputs of several ranks once.

[Note: joining equal lines]
Rows are kept in the order in which they first came. A line of a rank joins the first row below the rank's previous
one that has the same text and kind; only when there is none it becomes a row of its own. So every rank's lines stay
in their order, and ranks that print the same share their rows however late one of them is.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .displays import BlockDisplay, KernelDisplay, kernel_shell, write_line
from .lines import Line, TerminalText

__all__ = ["Board", "LineBoard", "OutputBoard", "SilentBoard", "default_board", "label_of"]

HEAD_LINES = 200
TAIL_LINES = 300
_SLACK_LINES = 100
_JOINABLE_ROWS = 20_000
_LONGEST_LINE = 5_000


class Board(Protocol):
    """Takes the ranks' output messages and shows them when told to."""

    dirty: bool

    def feed(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Takes one message: its rank, IOPub type and content. Shows nothing yet."""

    def refresh(self, final: bool = False) -> None:
        """Shows what came since the last call; `final` also what was still incomplete."""


def label_of(ranks: Iterable[int]) -> str:
    """`"rank 0"`, `"ranks 0–3"` or `"ranks 0, 2–3"`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    parts = []
    for _, run in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(f"{members[0]}–{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return "ranks " + ", ".join(parts)


def default_board(ranks: Sequence[int], quiet: bool = False) -> Board:
    """The board that fits this process: updatable displays in a notebook, prefixed lines elsewhere.

    Args:
        ranks: the ranks whose outputs will come.
        quiet: show nothing (the outputs still are in the cell's result).
    """
    if quiet:
        return SilentBoard()
    shell = kernel_shell()
    return LineBoard() if shell is None else OutputBoard(KernelDisplay(shell))


class SilentBoard:
    """Shows nothing."""

    dirty = False

    def feed(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """See `Board`."""

    def refresh(self, final: bool = False) -> None:
        """See `Board`."""


class LineBoard:
    """Lines as they come, each with `[rank 0]` before it: for terminals and logs.

    Args:
        write: takes the stream's name (``"stdout"``, ``"stderr"``) and one line.
    """

    def __init__(self, write: Callable[[str, str], None] = write_line) -> None:
        self.dirty = False
        self._write = write
        self._texts: dict[tuple[int, str], TerminalText] = {}
        self._open: dict[tuple[int, str], Line] = {}
        self._ready: list[tuple[str, str]] = []

    def feed(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """See `Board`."""
        if kind == "stream":
            key = (rank, str(content["name"]))
            for line in self._texts.setdefault(key, TerminalText()).feed(str(content["text"])):
                if line.closed and line.tag is None:
                    line.tag = "written"
                    self._open.pop(key, None)
                    self._take(rank, key[1], line.text)
                elif not line.closed:
                    self._open[key] = line
        elif kind in ("display_data", "execute_result"):
            for text in str(content["data"].get("text/plain", "")).splitlines():
                self._take(rank, "stdout", text)

    def refresh(self, final: bool = False) -> None:
        """See `Board`."""
        if final:
            for (rank, stream), line in self._open.items():
                if line.text.strip():
                    self._take(rank, stream, line.text)
            self._open.clear()
        ready, self._ready, self.dirty = self._ready, [], False
        for stream, text in ready:
            self._write(stream, text)

    def _take(self, rank: int, stream: str, text: str) -> None:
        self._ready.append((stream, f"[rank {rank}] {text}"))
        self.dirty = True


@dataclass(eq=False)
class _Row:
    """One output of one or several ranks."""

    order: int
    kind: str
    text: str
    ranks: set[int]
    block: _Block
    floor: int
    key: tuple[str, str]
    visible: bool = True
    bundle: dict[str, Any] | None = None


@dataclass(eq=False)
class _Block:
    """Consecutive rows of text, ended by at most one rich output."""

    index: int
    rows: list[_Row] = field(default_factory=list)
    hidden: int = 0
    rich: _Row | None = None
    text_dirty: bool = False
    rich_dirty: bool = False
    text_shown: bool = False
    rich_shown: bool = False


class OutputBoard:
    """Text and displays of several ranks below one notebook cell, live.

    Text goes to updatable plain-text displays, a rich output (figure, table, widget) to a display of its own with
    its mime bundle unchanged. A long text shows its first 200 and last 300 lines.

    Args:
        display: where blocks are shown.
    """

    def __init__(self, display: BlockDisplay) -> None:
        self.dirty = False
        self._display = display
        self._key = f"ddp_lab-{uuid.uuid4().hex[:12]}"
        self._blocks: list[_Block] = []
        self._order = itertools.count(1)
        self._last: dict[int, int] = {}
        self._texts: dict[tuple[int, str], TerminalText] = {}
        self._joinable: dict[tuple[str, str], list[_Row]] = {}
        self._recent: deque[_Row] = deque()
        self._handles: dict[tuple[int, str], _Row] = {}
        self._clear_next: set[int] = set()
        self._free: dict[int, deque[_Block]] = {}
        self._placeholder: _Row | None = None

    def feed(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """See `Board`."""
        if kind == "clear_output":
            self._clear_next.add(rank)
            if not content.get("wait"):
                self._clear_if_asked(rank)
        elif kind == "stream":
            self._clear_if_asked(rank)
            self._feed_text(rank, str(content["name"]), str(content["text"]))
        elif kind in ("display_data", "execute_result"):
            self._clear_if_asked(rank)
            self._feed_bundle(rank, kind, content)
        elif kind == "update_display_data":
            row = self._handles.get((rank, _handle_of(content)))
            if row is not None:
                self._replace(row, content)

    def refresh(self, final: bool = False) -> None:
        """See `Board`."""
        if final:
            for rank in list(self._clear_next):
                self._clear_if_asked(rank)
            if self._placeholder is not None:
                self._drop(self._placeholder)
        self.dirty = False
        for block in self._blocks:
            if block.text_dirty:
                self._show_text(block)
            if block.rich_dirty:
                self._show_rich(block)

    def announce(self, ranks: Iterable[int], text: str) -> None:
        """Shows `text` at once until the final refresh: claims the place below the cell for what comes later."""
        self._placeholder = self._append("display", text, set(ranks), floor=0)
        self.refresh()

    # -- text

    def _feed_text(self, rank: int, stream: str, text: str) -> None:
        feed = self._texts.setdefault((rank, stream), TerminalText())
        for line in feed.feed(text):
            row = line.tag
            if row is None:
                if not line.closed and not line.text:
                    continue
                line.tag = self._place(rank, stream, line.text, joins=line.closed and not line.rewritten)
                continue
            if row.ranks != {rank}:
                if row.text != line.text:
                    self._leave(row, rank)
                    line.tag = self._append(stream, line.text, {rank}, floor=self._last.get(rank, 0))
                continue
            row.text = line.text
            self._touch(row)
            if line.closed and not line.rewritten:
                line.tag = self._settle(rank, row)

    def _place(self, rank: int, kind: str, text: str, joins: bool) -> _Row:
        floor = self._last.get(rank, 0)
        key = (kind, text)
        row = self._find(rank, key, floor) if joins else None
        if row is None:
            row = self._append(kind, text, {rank}, floor)
            if joins:
                self._offer(row, key)
        else:
            row.ranks.add(rank)
            self._touch(row)
        self._last[rank] = max(floor, row.order)
        return row

    def _settle(self, rank: int, row: _Row) -> _Row:
        """A row that was shown while its line grew: joins an equal one or may be joined from now on."""
        key = (row.kind, row.text)
        found = self._find(rank, key, row.floor)
        if found is None or found is row:
            self._offer(row, key)
            return row
        self._drop(row)
        found.ranks.add(rank)
        self._touch(found)
        self._last[rank] = max(self._last.get(rank, 0), found.order)
        return found

    def _find(self, rank: int, key: tuple[str, str], floor: int) -> _Row | None:
        rows = self._joinable.get(key)
        if not rows:
            return None
        for row in itertools.islice(rows, bisect.bisect_right(rows, floor, key=lambda row: row.order), None):
            if rank not in row.ranks:
                return row
        return None

    def _offer(self, row: _Row, key: tuple[str, str]) -> None:
        row.key = key
        bisect.insort(self._joinable.setdefault(key, []), row, key=lambda each: each.order)
        self._recent.append(row)
        if len(self._recent) > _JOINABLE_ROWS:
            self._withdraw(self._recent.popleft())

    def _withdraw(self, row: _Row) -> None:
        rows = self._joinable.get(row.key)
        if rows and row in rows:
            rows.remove(row)
            if not rows:
                del self._joinable[row.key]

    # -- rows and blocks

    def _append(self, kind: str, text: str, ranks: set[int], floor: int) -> _Row:
        if not self._blocks or self._blocks[-1].rich is not None:
            self._blocks.append(_Block(len(self._blocks)))
        block = self._blocks[-1]
        row = _Row(next(self._order), kind, text, ranks, block, floor, ("", ""))
        block.rows.append(row)
        if len(block.rows) > HEAD_LINES + TAIL_LINES + _SLACK_LINES:
            cut = block.rows[HEAD_LINES:-TAIL_LINES]
            del block.rows[HEAD_LINES:-TAIL_LINES]
            block.hidden += len(cut)
            for each in cut:
                each.visible = False
        for rank in ranks:
            self._last[rank] = max(self._last.get(rank, 0), row.order)
        self._touch(row)
        return row

    def _touch(self, row: _Row) -> None:
        if row.visible:
            row.block.text_dirty = self.dirty = True

    def _leave(self, row: _Row, rank: int) -> None:
        row.ranks.discard(rank)
        if row.ranks:
            self._touch(row)
        else:
            self._drop(row)

    def _drop(self, row: _Row) -> None:
        self._withdraw(row)
        if row.visible and row in row.block.rows:
            row.block.rows.remove(row)
            self._touch(row)
        row.visible = False

    # -- rich outputs

    def _feed_bundle(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        data = dict(content["data"])
        handle = _handle_of(content)
        if set(data) <= {"text/plain"}:
            style = "value" if kind == "execute_result" else "display"
            row = self._place(rank, style, str(data.get("text/plain", "")), joins=not handle)
        else:
            row = self._place_rich(rank, dict(content), joins=not handle)
        if handle:
            self._handles[rank, handle] = row

    def _place_rich(self, rank: int, content: dict[str, Any], joins: bool) -> _Row:
        free = self._free.get(rank)
        if free:
            block = free.popleft()
            assert block.rich is not None
            block.rich.ranks.add(rank)
            block.rows.append(block.rich)
            block.rich.visible = True
            self._replace(block.rich, content)
            return block.rich
        row = self._place(rank, "rich", _fingerprint(content["data"]), joins)
        if row.bundle is None:
            row.bundle = content
            row.block.rich = row
            row.block.rich_dirty = self.dirty = True
        return row

    def _replace(self, row: _Row, content: Mapping[str, Any]) -> None:
        if row.bundle is None:
            row.text = str(content["data"].get("text/plain", ""))
            self._touch(row)
        else:
            self._withdraw(row)
            row.bundle = dict(content)
            row.block.text_dirty = row.block.rich_dirty = self.dirty = True

    def _clear_if_asked(self, rank: int) -> None:
        if rank not in self._clear_next:
            return
        self._clear_next.discard(rank)
        for key in [key for key in self._texts if key[0] == rank]:
            del self._texts[key]
        for block in self._blocks:
            for row in [row for row in block.rows if rank in row.ranks]:
                self._leave(row, rank)
                if row is block.rich and not row.ranks:
                    self._free.setdefault(rank, deque()).append(block)
                    block.rich_dirty = self.dirty = True

    # -- showing

    def _show_text(self, block: _Block) -> None:
        block.text_dirty = False
        text = _text_of(block)
        if text or block.text_shown:
            self._display.publish(f"{self._key}-{block.index}", {"text/plain": text}, {}, block.text_shown)
            block.text_shown = True

    def _show_rich(self, block: _Block) -> None:
        block.rich_dirty = False
        row = block.rich
        if row is None or row.bundle is None:
            return
        data, metadata = row.bundle["data"], row.bundle.get("metadata") or {}
        if not row.ranks:
            data, metadata = {"text/plain": ""}, {}
        self._display.publish(f"{self._key}-{block.index}-rich", data, metadata, block.rich_shown)
        block.rich_shown = True


_GUTTER = {"stderr": "\x1b[31m│\x1b[0m", "value": "→", "rich": "▾"}


def _text_of(block: _Block) -> str:
    width = max((len(label_of(row.ranks)) for row in block.rows), default=0)
    lines: list[str] = []
    before: set[int] | None = None
    for place, row in enumerate(block.rows):
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


def _fit(text: str) -> str:
    if len(text) > _LONGEST_LINE:
        text = f"{text[:_LONGEST_LINE]}… ({len(text):,} characters)"
    return text + "\x1b[0m" if "\x1b" in text else text


def _handle_of(content: Mapping[str, Any]) -> str:
    return str((content.get("transient") or {}).get("display_id") or "")


def _fingerprint(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
