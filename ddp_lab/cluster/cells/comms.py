"""Widgets that cells make on ranks, in the notebook.

A widget talks to its page through a comm of its kernel. The page knows only the notebook's kernel. So each comm that a
rank opens gets a proxy there, which passes messages on, both ways.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class CommRelay:
    """Passes on what ranks' comms say; used by the wire's thread.

    Args:
        send: sends a rank a message with data.
    """

    def __init__(self, send: Callable[[int, Mapping[str, Any], Sequence[bytes]], None]) -> None:
        self._send = send

    def take(self, rank: int, kind: str, frames: Sequence[bytes]) -> None:
        """Passes a message of a rank on to the page; drops it if there is no notebook.

        Args:
            rank: who says it.
            kind: ``"comm_open"``, ``"comm_msg"`` or ``"comm_close"``.
            frames: content and metadata as JSON, and buffers.
        """
        ipython = sys.modules.get("IPython")  # a notebook has it
        kernel = None if ipython is None else getattr(ipython.get_ipython(), "kernel", None)
        if kernel is None:
            return
        content, metadata, buffers = json.loads(frames[0]), json.loads(frames[1]), list(frames[2:])
        if kind == "comm_open":
            self._open(kernel, rank, content["comm_id"])
        kernel.session.send(
            kernel.iopub_socket,
            kind,
            content=content,
            metadata=metadata,
            buffers=buffers,
            parent=kernel.get_parent("shell"),
        )

    def _open(self, kernel: Any, rank: int, comm_id: str) -> None:
        comm = importlib.import_module("ipykernel.comm").Comm(comm_id=comm_id, primary=False)

        def pass_on(message: Mapping[str, Any]) -> None:
            told = {"type": message["header"]["msg_type"], "content": message["content"]}
            buffers = [bytes(buffer) for buffer in message.get("buffers") or ()]
            self._send(rank, {"op": "comm", **told, "metadata": message.get("metadata") or {}}, buffers)

        comm.on_msg(pass_on)
        comm.on_close(pass_on)
        kernel.comm_manager.register_comm(comm)
