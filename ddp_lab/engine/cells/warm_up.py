"""Pays the price of the first traceback before somebody waits for it.

The first traceback through `torch.distributed` costs 0.15 s, in which its source is parsed; a rank that waited for one
that failed would keep its peers' cell open for that long. So each rank formats one when it first has nothing to do.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch.distributed as dist
from IPython.core import ultratb

from . import cell

__all__ = ["start"]

_IDLE_SECONDS = 0.25


def start() -> threading.Thread:
    """Starts the thread that waits for an idle moment; it ends after its one traceback."""
    thread = threading.Thread(target=_run, name="ddp_lab-warm-up", daemon=True)
    thread.start()
    return thread


def _run() -> None:
    idle = 0
    while idle < 2:
        threading.Event().wait(_IDLE_SECONDS)
        idle = idle + 1 if cell.running() is None else 0
    formatter: Any = ultratb.AutoFormattedTB
    nothing: Any = None
    try:
        dist.all_reduce(nothing)
    except TypeError:  # raised before any collective is entered
        formatter(mode="Context").structured_traceback(*sys.exc_info())
