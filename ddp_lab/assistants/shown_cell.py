"""A cell that an assistant runs, as the user sees it: its code, that an assistant ran it, and how it ended."""

from __future__ import annotations

import html
import threading
import uuid
from collections.abc import Sequence

from ..formatting import label_of
from ..output.display import BlockDisplay, FollowedCell, write_line
from ..output.terminal import plain

__all__ = ["ShownCell"]


class ShownCell:
    """A block below the cell that started the server, kept up to date; in a terminal, lines. See `RunView`.

    Args:
        display: shows blocks; None: lines are printed.
        code: the cell.
        ranks: where it runs.
    """

    def __init__(self, display: BlockDisplay | None, code: str, ranks: Sequence[int]) -> None:
        self._display, self._code, self._where = display, code, label_of(ranks)
        self._key = f"ddp_lab-assistant-{uuid.uuid4().hex[:12]}"
        self._lock = threading.Lock()  # the follower shows it, and the tool's thread before it is sent
        self._state = ""

    def show(self, run: FollowedCell) -> None:
        """See `RunView`."""
        with self._lock:
            first, changed = not self._state, run.state != self._state
            self._state = run.state
            if not changed:
                return
            title = f"An assistant runs {run.label} on {self._where}: {run.headline}"
            if run.done:
                title = f"An assistant ran {run.label} on {self._where}: {run.headline}"
            report = plain(run.report)
            if self._display is None:
                self._print(title, report, first)
                return
            text = "\n".join(filter(None, (title, self._code, report)))
            page = f"<p>{html.escape(title)}</p><pre>{html.escape(self._code)}</pre>"
            page += f"<pre>{html.escape(report)}</pre>" if report else ""
            self._display.publish(self._key, {"text/plain": text, "text/html": page}, {}, not first)

    def show_again(self) -> None:
        """See `RunView`: the block stays as it is."""

    def _print(self, title: str, report: str, first: bool) -> None:
        for line in [title, *(self._code.splitlines() if first else ()), *report.splitlines()]:
            write_line("stdout", line)
