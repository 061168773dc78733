"""What the ranks print and display, shown as it comes: labelled by rank, equal outputs of several ranks once."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from .displays import BlockDisplay, KernelDisplay, kernel_shell, write_line
from .lines import Line, TerminalText
from .rank_sets import label_of
from .rows import Block, Row, Rows, text_of

__all__ = ["Board", "LineBoard", "OutputBoard", "SilentBoard", "default_board"]


class Board(Protocol):
    """Takes the ranks' output messages and shows them when told to."""

    def feed(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Takes one message: its rank, IOPub type and content. Shows nothing yet."""

    def refresh(self, final: bool = False) -> None:
        """Shows what came since the last call; `final` also what was still incomplete."""

    def announce(self, ranks: Iterable[int], text: str) -> None:
        """Shows `text` at once; it is about the running cell, not one of its outputs."""


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

    def feed(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """See `Board`."""

    def refresh(self, final: bool = False) -> None:
        """See `Board`."""

    def announce(self, ranks: Iterable[int], text: str) -> None:
        """See `Board`."""


class LineBoard:
    """Lines as they come, each with `[rank 0]` before it: for terminals and logs.

    Args:
        write: takes the stream's name (``"stdout"``, ``"stderr"``) and one line.
    """

    def __init__(self, write: Callable[[str, str], None] = write_line) -> None:
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
        ready, self._ready = self._ready, []
        for stream, text in ready:
            self._write(stream, text)

    def announce(self, ranks: Iterable[int], text: str) -> None:
        """See `Board`."""
        self._write("stdout", f"[{label_of(ranks)}] {text}")

    def _take(self, rank: int, stream: str, text: str) -> None:
        self._ready.append((stream, f"[rank {rank}] {text}"))


class OutputBoard:
    """Text and displays of several ranks below one notebook cell, live.

    Text goes to updatable plain-text displays, a rich output (figure, table, widget) to a display of its own with
    its mime bundle unchanged. Of a long text the first 60 and last 140 lines are shown.

    Args:
        display: where blocks are shown.
    """

    def __init__(self, display: BlockDisplay) -> None:
        self._display = display
        self._key = f"ddp_lab-{uuid.uuid4().hex[:12]}"
        self._rows = Rows()
        self._texts: dict[tuple[int, str], TerminalText] = {}
        self._handles: dict[tuple[int, str], Row] = {}
        self._clear_next: set[int] = set()
        self._notes: list[Row] = []

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
            for row in self._notes:
                self._rows.drop(row)
            self._notes.clear()
            self._rows.arrange()
        if not self._rows.dirty:
            return
        self._rows.dirty = False
        for block in self._rows.blocks:
            if block.text_dirty:
                self._show_text(block)
            if block.rich_dirty:
                self._show_rich(block)

    def announce(self, ranks: Iterable[int], text: str) -> None:
        """See `Board`; the text goes with the final refresh, and until then claims the place below the cell."""
        self._notes.append(self._rows.append("display", text, set(ranks)))
        self.refresh()

    def show_again(self) -> None:
        """Updates every block once more, for front ends that missed what came between two cells."""
        for block in self._rows.blocks:
            block.text_dirty = block.text_shown
            block.rich_dirty = block.rich_shown
        self._rows.dirty = True
        self.refresh()

    def _feed_text(self, rank: int, stream: str, text: str) -> None:
        feed = self._texts.setdefault((rank, stream), TerminalText())
        for line in feed.feed(text):
            row = line.tag
            if row is None:
                if not line.closed and not line.text:
                    continue
                line.tag = self._rows.place(rank, stream, line.text, joins=line.closed and not line.rewritten)
                continue
            if row.ranks != {rank}:
                if row.text != line.text:
                    self._rows.leave(row, rank)
                    line.tag = self._rows.append(stream, line.text, {rank})
                continue
            row.text = line.text
            self._rows.touch(row)
            if line.closed and not line.rewritten:
                line.tag = self._rows.settle(rank, row)

    def _feed_bundle(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        data = dict(content["data"])
        handle = _handle_of(content)
        if set(data) <= {"text/plain"}:
            style = "value" if kind == "execute_result" else "display"
            row = self._rows.place(rank, style, str(data.get("text/plain", "")), joins=not handle)
        else:
            row = self._place_rich(rank, dict(content), joins=not handle)
        if handle:
            self._handles[rank, handle] = row

    def _place_rich(self, rank: int, content: dict[str, Any], joins: bool) -> Row:
        row = self._rows.place(rank, "rich", _fingerprint(content["data"]), joins)
        if row.bundle is None:
            row.bundle = content
            row.block.rich = row
            row.block.rich_dirty = self._rows.dirty = True
        return row

    def _replace(self, row: Row, content: Mapping[str, Any]) -> None:
        if row.bundle is None:
            row.text = str(content["data"].get("text/plain", ""))
            self._rows.touch(row)
        else:
            self._rows.withdraw(row)
            row.bundle = dict(content)
            row.block.text_dirty = row.block.rich_dirty = self._rows.dirty = True

    def _clear_if_asked(self, rank: int) -> None:
        if rank not in self._clear_next:
            return
        self._clear_next.discard(rank)
        for key in [key for key in self._texts if key[0] == rank]:
            del self._texts[key]
        self._rows.forget(rank)
        for block in self._rows.blocks:
            for row in [row for row in block.rows if rank in row.ranks]:
                self._rows.leave(row, rank)

    def _show_text(self, block: Block) -> None:
        block.text_dirty = False
        text = text_of(block)
        if text or block.text_shown:
            self._display.publish(f"{self._key}-{block.index}", {"text/plain": text}, {}, block.text_shown)
            block.text_shown = True

    def _show_rich(self, block: Block) -> None:
        block.rich_dirty = False
        bundle = block.rich.bundle if block.rich is not None else None
        if bundle is None and not block.rich_shown:
            return
        data = bundle["data"] if bundle is not None else {"text/plain": ""}
        metadata = (bundle.get("metadata") if bundle is not None else None) or {}
        self._display.publish(f"{self._key}-{block.index}-rich", data, metadata, block.rich_shown)
        block.rich_shown = True


def _handle_of(content: Mapping[str, Any]) -> str:
    return str((content.get("transient") or {}).get("display_id") or "")


def _fingerprint(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
