"""A progress line: updated in place in a notebook and in a terminal, printed once elsewhere."""

from __future__ import annotations

import sys
import time
import uuid

from .display import KernelDisplay, kernel_shell

__all__ = ["ProgressLine"]

_WIDTH = 24
_INTERVAL_S = 0.05
_EIGHTHS = " ▏▎▍▌▋▊▉"


class ProgressLine:
    """A bar with a title and the current stage; call it from the main thread.

    Args:
        title: what is in progress.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._key = f"ddp_lab-{uuid.uuid4().hex[:12]}"
        shell = kernel_shell()
        self._display = KernelDisplay(shell) if shell is not None else None
        self._shown = False
        self._shown_s = 0.0
        self._begin_s = time.monotonic()
        self._last = ""

    def show(self, fraction: float, text: str) -> None:
        """Shows a fraction from 0 to 1 and a text, at most 20 times a second."""
        fraction = min(1.0, max(0.0, fraction))
        whole, rest = divmod(round(fraction * _WIDTH * 8), 8)
        bar = ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(_WIDTH)
        self._last = text or self._last
        now = time.monotonic()
        if self._shown and now - self._shown_s < _INTERVAL_S:
            return
        self._shown_s = now
        self._write(f"{self._title} ▕{bar}▏ {text}".rstrip(), final=False)

    def close(self, text: str) -> None:
        """Replaces the bar with a final text."""
        self._write(text, final=True)

    def fail(self) -> None:
        """Replaces the bar with the stage at which it failed."""
        seconds = time.monotonic() - self._begin_s
        self._write(f"✗ {self._title} failed after {seconds:.1f} s, while {self._last or 'starting'}", final=True)

    def _write(self, text: str, final: bool) -> None:
        if self._display is not None:
            self._display.publish(self._key, {"text/plain": text}, {}, self._shown)
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if final and text else ""))
            sys.stderr.flush()
        elif final and text:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        self._shown = True
