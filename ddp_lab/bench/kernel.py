"""A Jupyter kernel driven as a notebook drives it, and the time its cells take."""

from __future__ import annotations

import time

from jupyter_client.manager import KernelManager

from ..errors import DdpLabError

__all__ = ["Kernel"]

_LIMIT_S = 120.0


class Kernel:
    """A fresh Python kernel that is up; a context manager."""

    def __init__(self) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel()
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_LIMIT_S)

    def run(self, code: str) -> float:
        """Runs a cell; returns its seconds until the kernel is idle again.

        Raises:
            DdpLabError: the cell failed.
        """
        begin = time.perf_counter()
        message_id = self._client.execute(code)
        error = ""
        while True:
            message = self._client.get_iopub_msg(timeout=_LIMIT_S)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            if message["msg_type"] == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        seconds = time.perf_counter() - begin
        if error:
            raise DdpLabError(f"the cell {code.splitlines()[0]!r} failed: {error}")
        return seconds

    def close(self) -> None:
        """Ends the kernel."""
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._manager.cleanup_resources()

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
