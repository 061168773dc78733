"""The output of one cell with each rank's by itself, for pages that show it so, besides the merged output.

[Note: views of a cell's output]
A notebook stores the merged output as ordinary displays: every reader can show it, and its cost does not depend on
other views. Once two ranks have said something, the cell also displays a *place*: an empty HTML element that names the
kernel and the cell. One widget of the kernel (`ddp_lab.dashboard.output_views`) draws a switch there. Without it, in
saved notebooks, exported pages and other readers, the element stays empty. Only when a page asks for a cell's output by
rank, that is built from the messages that this module has kept; then changes are sent while the cell runs. A cell that
nobody looks at by rank costs the element, and references to its messages.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .board import Board, OutputBoard, pause_after
from .row_text import Look
from .terminal import plain
from .throttle import Message

__all__ = ["VIEWS", "KeptCells", "OutputByRank", "SwitchableBoard"]

VIEWS = ("merged", "tabs", "side-by-side")

_LIVE_LINES = 400  # of all ranks together, while the cell runs
_FEWEST_LIVE_LINES = 20  # of each rank
_RICH = 200  # figures and tables of all ranks together
_FEWEST_RICH = 8  # of each rank
_MOST_CELLS = 200
_MOST_CHARACTERS = 50_000_000  # of all cells together
_WAITING = 4_000_000  # characters of messages that are kept as they came while the cell runs
_WAITING_ENDED = 200_000  # and when it has ended
_MESSAGE = 100  # characters that a message takes besides its text
Send = Callable[[dict[str, Any]], None]


class _Sheet:
    """The blocks that one rank's board displays: a `BlockDisplay`."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[str, Any]] = {}
        self._changed: set[str] = set()

    def publish(self, key: str, data: Mapping[str, Any], metadata: Mapping[str, Any], update: bool) -> None:
        """See `BlockDisplay`."""
        self.blocks[key] = {"data": dict(data), "metadata": dict(metadata)}
        self._changed.add(key)

    def take(self, whole: bool) -> dict[int, dict[str, Any]]:
        """Place -> block, of the blocks that have changed since the last call, or of all."""
        changed, self._changed = self._changed, set()
        return {place: block for place, (key, block) in enumerate(self.blocks.items()) if whole or key in changed}


class OutputByRank(Board):
    """Each rank's output of one cell, bounded as the merged output is. See [Note: views of a cell's output].

    Args:
        ranks: the ranks of the cell.

    Attributes:
        speakers: the ranks that have printed or displayed something, or failed.
        size: about how many characters it keeps, once the cell has ended.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._sheets: dict[int, _Sheet] = {}
        self._boards: dict[int, OutputBoard] = {}
        self._waiting: list[Message] = []
        self._waiting_size = 0
        self._where = ""
        self._states: dict[int, str] = {}  # of the ranks that did not finish
        self._lock = threading.Lock()  # a page may ask on another thread than that of the cell
        self._send: Send | None = None
        self._ended = False
        self.speakers: set[int] = set()
        self.size = 0

    def feed(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """See `Board`."""
        with self._lock:
            if kind == "error":
                said = content["ename"] != "KeyboardInterrupt"
                lines = [line for line in content["traceback"] if plain(line).strip("-")]  # without the rule above it
                text = "\n".join(lines)
                data = {"application/vnd.jupyter.stderr": text, "text/plain": plain(text)}
                kind, content = "display_data", {"data": data}
            else:
                said = kind in ("stream", "display_data", "execute_result")
            if said:
                self.speakers.add(rank)
            self._waiting.append((rank, kind, content))
            self._waiting_size += _size(content)

    def announce(self, ranks: Iterable[int], text: str, stays: bool = False) -> None:
        """See `Board`."""
        with self._lock:
            self._place()
            for rank in set(ranks).intersection(self._ranks):
                self._board(rank).announce([rank], text, stays)

    def know(self, where: str) -> None:
        """See `Board`."""
        self._where = where

    def end(self, states: Mapping[int, str]) -> None:
        """See `Board`."""
        self._states = {rank: state for rank, state in states.items() if state != "done"}

    def refresh(self, final: bool = False) -> float:
        """See `Board`; sends what has changed if a page has asked for it."""
        with self._lock:
            self._ended |= final
            pause = self._tell(self._send, whole=False) if self._send is not None else 0.0
            if self._waiting_size > (_WAITING_ENDED if final else _WAITING):
                self._place()
            if final:
                blocks = [block for sheet in self._sheets.values() for block in sheet.blocks.values()]
                self.size = self._waiting_size + sum(map(_size, blocks))
            return pause

    def open(self, send: Send) -> None:
        """Sends everything, and from then on what changes; on any thread."""
        with self._lock:
            self._send = send
            self._tell(send, whole=True)

    def close(self) -> None:
        """Sends nothing more."""
        with self._lock:
            self._send = None

    def _board(self, rank: int) -> OutputBoard:
        if rank not in self._boards:
            live = max(_FEWEST_LIVE_LINES, _LIVE_LINES // len(self._ranks))
            look = Look(False, live // 4, live - live // 4, max(_FEWEST_RICH, _RICH // len(self._ranks)))
            self._sheets[rank] = _Sheet()
            self._boards[rank] = OutputBoard(self._sheets[rank], look)
        return self._boards[rank]

    def _place(self) -> None:
        """Passes the messages on to the ranks' boards, which keep a bounded part of them."""
        for rank, kind, content in self._waiting:
            self._board(rank).feed(rank, kind, content)
        self._waiting, self._waiting_size = [], 0
        for board in self._boards.values():
            board.know(self._where)
            board.refresh(final=self._ended)

    def _tell(self, send: Send, whole: bool) -> float:
        """Returns the seconds until the next call."""
        self._place()
        groups = self._groups()
        blocks = {group[0]: self._sheets[group[0]].take(whole) for group in groups}
        changed = {rank: found for rank, found in blocks.items() if found}
        if not whole and not changed and not self._ended:
            return 0.0
        send({"ended": self._ended, "groups": groups, "states": self._states, "blocks": changed, "whole": whole})
        return pause_after(sum(_size(block) for found in changed.values() for block in found.values()))

    def _groups(self) -> list[list[int]]:
        """Ranks with something to show, once the cell has ended those with the same together."""
        groups: dict[Any, list[int]] = {}
        for rank in sorted(self._sheets):
            same = [block["data"] for block in self._sheets[rank].blocks.values()]
            groups.setdefault(repr(same) if self._ended else rank, []).append(rank)
        return list(groups.values())


def _size(content: Mapping[str, Any]) -> int:
    """About how many characters a message or a block takes."""
    texts = [content.get("text", ""), *content.get("data", {}).values()]
    return _MESSAGE + sum(len(text) for text in texts if isinstance(text, str))


class KeptCells:
    """The latest cells whose output can be shown by rank.

    Attributes:
        token: names this kernel in the places of its cells.
    """

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex[:12]
        self._cells: dict[str, OutputByRank] = {}
        self._lock = threading.Lock()  # cells may run in the background

    def add(self, cell: OutputByRank) -> str:
        """Keeps a cell, and no more of the oldest ones than there is room for; returns its name."""
        name = uuid.uuid4().hex[:12]
        with self._lock:
            self._cells[name] = cell
            total = sum(each.size for each in self._cells.values())
            while len(self._cells) > _MOST_CELLS or (total > _MOST_CHARACTERS and len(self._cells) > 1):
                total -= self._cells.pop(next(iter(self._cells))).size
        return name

    def get(self, name: str) -> OutputByRank | None:
        """The cell of that name; None if it is not kept."""
        return self._cells.get(name)


class SwitchableBoard(Board):
    """The merged output, and once two ranks have said something, a switch to the output by rank.

    Args:
        merged: shows the merged output.
        by_rank: keeps the output of each rank.
        place: displays the place of the switch; called once, if at all.
    """

    def __init__(self, merged: OutputBoard, by_rank: OutputByRank, place: Callable[[OutputByRank], None]) -> None:
        self._merged, self._by_rank = merged, by_rank
        self._place = place
        self._placed = False

    def feed(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """See `Board`."""
        self._merged.feed(rank, kind, content)
        self._by_rank.feed(rank, kind, content)

    def refresh(self, final: bool = False) -> float:
        """See `Board`."""
        if not self._placed and len(self._by_rank.speakers) > 1:
            self._placed = True
            self._place(self._by_rank)
        return max(self._merged.refresh(final), self._by_rank.refresh(final))

    def know(self, where: str) -> None:
        """See `Board`."""
        self._merged.know(where)
        self._by_rank.know(where)

    def announce(self, ranks: Iterable[int], text: str, stays: bool = False) -> None:
        """See `Board`."""
        about = tuple(ranks)
        self._merged.announce(about, text, stays)
        self._by_rank.announce(about, text, stays)

    def end(self, states: Mapping[int, str]) -> None:
        """See `Board`."""
        self._by_rank.end(states)

    def last_lines(self) -> str:
        """See `Board`."""
        return self._merged.last_lines()

    def show_again(self) -> None:
        """See `Board`."""
        self._merged.show_again()
