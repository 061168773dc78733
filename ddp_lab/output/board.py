"""The live output of the ranks: labelled by rank, with equal outputs of several ranks shown once.

[Note: what showing costs]
A notebook redraws a whole display at each update. So a board shows a bounded part of the ranks' output (see [Note:
bounded rows], [Note: what a page can draw]), places no more lines of a rank than can be shown (`thinned`), and returns
after each update how long to wait before the next one, so that at most `_CHARACTERS_PER_S` are published.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..formatting import label_of
from .display import BlockDisplay, KernelDisplay, kernel_shell, write_line
from .progress_bars import bar_of, began_as
from .row_text import Look, text_of
from .rows import HEAD_LINES, TAIL_LINES, Block, Row, Rows
from .terminal import Line, TerminalText, plain
from .throttle import Message, thinned

__all__ = ["Board", "LineBoard", "OutputBoard", "SilentBoard", "default_board", "pause_after"]

_CHARACTERS_PER_S = 100_000
_LONGEST_PAUSE_S = 2.0
_LONGEST_LINE = 20_000
_LAST_LINES, _LAST_WIDTH = 100, 300  # of a board's end


class Board:
    """Takes the ranks' output messages and shows them on request. This base class shows nothing."""

    def feed(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Takes one message: its rank, IOPub type and content. Shows nothing yet."""

    def refresh(self, final: bool = False) -> float:
        """Shows the output since the last call; with `final` also incomplete lines.

        Returns:
            Seconds to wait before the next call.
        """
        return 0.0

    def know(self, where: str) -> None:
        """Takes the text that says where the whole output is, for lines that this board does not show."""

    def announce(self, ranks: Iterable[int], text: str, stays: bool = False) -> None:
        """Shows a message about the running cell at once; it is not one of its outputs.

        Args:
            ranks: the ranks that it is about.
            text: the message.
            stays: whether it stays after the end of the cell.
        """

    def end(self, states: Mapping[int, str]) -> None:
        """Takes how each rank ended ("done", "failed", "unblocked", "interrupted"), before the final refresh."""

    def last_lines(self) -> str:
        """The end of the displayed text, without colours; "" where nothing can be displayed again."""
        return ""

    def show_again(self) -> None:
        """Shows everything again, for front ends that missed updates between two cells."""


def default_board(ranks: Sequence[int], quiet: bool = False) -> Board:
    """The board that fits this process: updatable displays in a notebook, prefixed lines elsewhere.

    Args:
        ranks: the ranks of the outputs.
        quiet: show nothing (the cell's result still has the outputs).
    """
    if quiet:
        return SilentBoard()
    shell = kernel_shell()
    return LineBoard() if shell is None else OutputBoard(KernelDisplay(shell))


class SilentBoard(Board):
    """Shows nothing."""


class LineBoard(Board):
    """Lines in the order of arrival, each prefixed with `[rank 0]`: for terminals and logs.

    Args:
        write: called with the stream's name (``"stdout"``, ``"stderr"``) and one line.
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

    def refresh(self, final: bool = False) -> float:
        """See `Board`."""
        if final:
            for (rank, stream), line in self._open.items():
                if line.text.strip():
                    self._take(rank, stream, line.text)
            self._open.clear()
        ready, self._ready = self._ready, []
        for stream, text in ready:
            self._write(stream, text)
        return 0.0

    def announce(self, ranks: Iterable[int], text: str, stays: bool = False) -> None:
        """See `Board`."""
        self._write("stdout", f"[{label_of(ranks)}] {text}")

    def _take(self, rank: int, stream: str, text: str) -> None:
        self._ready.append((stream, f"[rank {rank}] {text}"))


class OutputBoard(Board):
    """Live text and displays of several ranks below one notebook cell.

    Text goes to updatable plain-text displays; a rich output (figure, table) gets its own display with an unchanged
    mime bundle. If there are many lines, the first 100 and the last 400 are shown (200 while the cell runs). Equal
    progress bars of several ranks share a line. See [Note: what showing costs].

    Args:
        display: shows the blocks.
        look: see `Look`.
    """

    def __init__(self, display: BlockDisplay, look: Look | None = None) -> None:
        self._display = display
        self._look = look or Look()
        self._key = f"ddp_lab-{uuid.uuid4().hex[:12]}"
        self._rows = Rows()
        self._texts: dict[tuple[int, str], TerminalText] = {}
        self._handles: dict[tuple[int, str], Row] = {}
        self._clear_next: set[int] = set()
        self._notes: list[Row] = []
        self._unshown: list[Message] = []
        self._where = "the cell's result has them all"
        self._published = 0  # characters since the last refresh

    def feed(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """See `Board`."""
        self._unshown.append((rank, kind, content))

    def know(self, where: str) -> None:
        """See `Board`."""
        if where != self._where:
            self._where = where
            for block in self._rows.blocks:
                block.text_dirty |= block.hidden > 0

    def _place(self) -> None:
        unshown, self._unshown = self._unshown, []
        for rank, kind, content, left_out in thinned(unshown, HEAD_LINES, TAIL_LINES):
            self._take(rank, kind, content)
            if left_out:
                self._rows.hide(rank, left_out)

    def _take(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
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

    def refresh(self, final: bool = False) -> float:
        """See `Board`."""
        self._place()
        if final:
            for rank in list(self._clear_next):
                self._clear_if_asked(rank)
            for row in self._notes:
                self._rows.drop(row)
            self._notes.clear()
            self._rows.arrange()
        self._rows.trim()
        self._published = 0
        if self._rows.dirty or final:
            self._rows.dirty = False
            for block in self._rows.blocks:
                if block.text_dirty or (final and block.shortened):
                    self._show_text(block, final)
                if block.rich_dirty:
                    self._show_rich(block)
        return pause_after(self._published)

    def announce(self, ranks: Iterable[int], text: str, stays: bool = False) -> None:
        """See `Board`; a text that does not stay is shown below the cell until the final refresh."""
        self._place()
        row = self._rows.append("display", text, set(ranks))
        if not stays:
            self._notes.append(row)
        self.refresh()

    def last_lines(self) -> str:
        """The end of the displayed text, without colours: at most 100 lines."""
        lines = [line for block in self._rows.blocks[-3:] for line in self._text_of(block, False).splitlines()]
        return plain("\n".join(line[:_LAST_WIDTH] for line in lines[-_LAST_LINES:]))

    def show_again(self) -> None:
        """See `Board`."""
        for block in self._rows.blocks:
            block.text_dirty = block.text_shown
            block.rich_dirty = block.rich_shown
        self.refresh(final=True)

    def _feed_text(self, rank: int, stream: str, text: str) -> None:
        changed = self._texts.setdefault((rank, stream), TerminalText(_LONGEST_LINE)).feed(text)
        # First the bars that went elsewhere: text printed between bars takes the line of the first.
        for line in changed:
            row, bar = line.tag, bar_of(line)
            if row is None or row.bars is None:
                continue
            if bar is None or not self._rows.is_bar(row, stream, began_as(line, bar)):
                self._rows.leave(row, rank)
                line.tag = None
        for line in changed:
            self._show_line(rank, stream, line)

    def _show_line(self, rank: int, stream: str, line: Line) -> None:
        row, bar = line.tag, bar_of(line)
        if bar is not None:
            if row is not None and row.bars is not None:
                row.bars[rank] = bar
                self._rows.touch(row)
                return
            if row is not None:
                self._rows.leave(row, rank)
            line.tag = self._rows.place_bar(rank, stream, began_as(line, bar), bar)
            return
        text = line.text.rstrip() if line.rewritten else line.text
        if row is None:
            if text or (line.closed and not line.rewritten):
                # A line that was cleared before it was written is what takes the place of a bar, not one itself.
                joins = line.closed and not (line.rewritten and line.first)
                line.tag = self._rows.place(rank, stream, text, joins)
        elif row.ranks != {rank}:
            if row.text != text:
                self._rows.leave(row, rank)
                line.tag = self._rows.append(stream, text, {rank})
        else:
            row.text = text
            self._rows.touch(row)
            if line.closed and not line.rewritten:
                line.tag = self._rows.settle(rank, row)

    def _feed_bundle(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        data, most = content["data"], self._look.rich
        handle = _handle_of(content)
        if not set(data) <= {"text/plain"} and sum(b.rich is not None for b in self._rows.blocks) >= most:
            data = {"text/plain": f"{data.get('text/plain', '')} (not drawn: a cell shows at most {most})"}
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

    def _show_text(self, block: Block, final: bool) -> None:
        block.text_dirty = False
        text = self._text_of(block, final)
        if text or block.text_shown or not self._look.labels:  # without labels it keeps the place before a figure
            self._published += len(text)
            self._display.publish(f"{self._key}-{block.index}", {"text/plain": text}, {}, block.text_shown)
            block.text_shown = True

    def _text_of(self, block: Block, final: bool) -> str:
        return text_of(block, self._where, final, self._look)

    def _show_rich(self, block: Block) -> None:
        block.rich_dirty = False
        bundle = block.rich.bundle if block.rich is not None else None
        if bundle is None and not block.rich_shown:
            return
        data = bundle["data"] if bundle is not None else {"text/plain": ""}
        metadata = (bundle.get("metadata") if bundle is not None else None) or {}
        self._published += sum(len(str(each)) for each in data.values())
        self._display.publish(f"{self._key}-{block.index}-rich", data, metadata, block.rich_shown)
        block.rich_shown = True


def pause_after(characters: int) -> float:
    """Seconds to wait after so many characters were published. See [Note: what showing costs]."""
    return min(characters / _CHARACTERS_PER_S, _LONGEST_PAUSE_S)


def _handle_of(content: Mapping[str, Any]) -> str:
    return str((content.get("transient") or {}).get("display_id") or "")


def _fingerprint(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
