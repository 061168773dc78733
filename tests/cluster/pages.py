"""What a notebook page shows: of a board in this process, and of a real Jupyter kernel."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from ddp_lab.output.terminal import plain
from tests.waiting import DEADLINE_S, wait_until
from tests.zygotes import offered


class Page:
    """Displays in the order in which they were made, each in its last state."""

    def __init__(self) -> None:
        self.blocks: dict[str, Mapping[str, Any]] = {}
        self.updates = 0

    def publish(self, key: str, data: Mapping[str, Any], metadata: Mapping[str, Any], update: bool) -> None:
        self.blocks[key] = data
        self.updates += update

    @property
    def text(self) -> str:
        """All plain text, without colours."""
        return plain("\n".join(str(data.get("text/plain", "")) for data in self.blocks.values()))


@dataclass
class Shown:
    """One executed cell as its notebook shows it.

    Attributes:
        switches: the places of the switch between the views of its output.
    """

    status: str = ""
    streams: str = ""
    page: Page = field(default_factory=Page)
    results: list[Mapping[str, Any]] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)
    error: tuple[str, str, str] = ("", "", "")
    seconds_after_interrupt: float = 0.0

    @property
    def text(self) -> str:
        """Streams, displays and results as plain text."""
        results = "\n".join(str(data.get("text/plain", "")) for data in self.results)
        return plain("\n".join(part for part in (self.streams, self.page.text, results) if part))


@contextlib.contextmanager
def notebook_with_cluster(options: str = "-n 2", before: Sequence[str] = ()) -> Iterator[tuple[Notebook, Shown]]:
    """A kernel with a running cluster, and what its start showed.

    Args:
        options: of `%cluster start`.
        before: cells that run before the extension is loaded.
    """
    kernel = Notebook()
    try:
        for cell in (*before, "%load_ext ddp_lab"):
            kernel.run(cell)
        started = kernel.run(f"%cluster start {options}")
        assert started.status == "ok", started.error
        yield kernel, started
        kernel.run("%cluster stop")
    finally:
        kernel.close()


def beside(manager: KernelManager) -> BlockingKernelClient:
    """A client of the same kernel with an identity of its own, as another part of the page has."""
    client = BlockingKernelClient(connection_file=manager.connection_file)
    client.load_connection_file()
    client.start_channels()
    client.wait_for_ready(timeout=DEADLINE_S)
    return client


class Notebook:
    """A Jupyter kernel that runs cells as a notebook does.

    Args:
        kernel: name of its specification.
        folder: the notebook's.
    """

    def __init__(self, kernel: str = "python3", folder: Path | None = None) -> None:
        self.manager = KernelManager(kernel_name=kernel)
        self.manager.start_kernel(cwd=None if folder is None else str(folder), env={**os.environ, **offered({})})
        self._client = self.manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=DEADLINE_S)
        self._answers: deque[str] = deque()
        self.asked: list[str] = []

    def begin(self, code: str) -> str:
        """Sends a cell; returns the request's id."""
        return str(self._client.execute(code))

    def run(self, code: str, interrupt_when: str = "", presses: int = 1, answers: Sequence[str] = ()) -> Shown:
        """Runs a cell to its end; interrupts the kernel as soon as the page shows `interrupt_when`.

        Args:
            code: the cell.
            interrupt_when: text that is waited for.
            presses: how often the kernel is interrupted, a fifth of a second apart.
            answers: what is typed into the page's input line whenever it asks; the prompts are added to `asked`.
        """
        self._answers.extend(answers)
        return self.finish(self.begin(code), interrupt_when, presses)

    def finish(self, message_id: str, interrupt_when: str = "", presses: int = 1) -> Shown:
        """Follows a cell that was sent to its end."""
        shown, interrupted = Shown(), 0.0
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=0.05)
            except Empty:
                message = {"parent_header": {}}
            if message["parent_header"].get("msg_id") == message_id and self._take(message, shown):
                break
            self._type()
            waited = time.monotonic() - interrupted > 0.2
            if interrupt_when and presses and waited and interrupt_when in shown.text + "".join(self.asked):
                presses -= 1
                interrupted = time.monotonic()
                self.manager.interrupt_kernel()
        else:
            raise AssertionError(f"the cell did not end; it shows: {shown.text}")
        shown.status = self._reply(message_id)["status"]
        shown.seconds_after_interrupt = time.monotonic() - interrupted if interrupted else 0.0
        return shown

    def watch(self, message_id: str, shown: Shown, until: Callable[[], Any]) -> Shown:
        """Follows what still comes for a cell that has ended, until `until()` is true."""

        def taken() -> Any:
            while not (found := until()) and self._client.iopub_channel.msg_ready():
                message = self._client.get_iopub_msg(timeout=0)
                if message["parent_header"].get("msg_id") == message_id:
                    self._take(message, shown)
            return found

        wait_until(taken, lambda: f"what is waited for; the cell shows: {shown.text}")
        return shown

    def _type(self) -> None:
        if not self._client.stdin_channel.msg_ready():
            return
        self.asked.append(self._client.get_stdin_msg(timeout=DEADLINE_S)["content"]["prompt"])
        if self._answers:
            self._client.input(self._answers.popleft())

    def complete(self, code: str) -> list[str]:
        """What Tab offers at the end of `code`."""
        return list(self._reply(self._client.complete(code, len(code)))["matches"])

    def inspect(self, code: str, detail: int = 0) -> str:
        """What Shift-Tab shows at the place of `|` in `code`; "" if it finds nothing."""
        content = self._reply(self._client.inspect(code.replace("|", ""), code.index("|"), detail))
        return plain(content["data"]["text/plain"]) if content["found"] else ""

    def _reply(self, message_id: str) -> Mapping[str, Any]:
        """The content of the answer to a request."""
        while True:
            reply = self._client.get_shell_msg(timeout=DEADLINE_S)
            if reply["parent_header"].get("msg_id") == message_id:
                return dict(reply["content"])

    def _take(self, message: Mapping[str, Any], shown: Shown) -> bool:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            shown.streams += content["text"]
        elif kind == "display_data" and "<ddp-lab-output" in content["data"].get("text/html", ""):
            shown.switches.append(content["data"]["text/html"])
        elif kind in ("display_data", "update_display_data"):
            key = content.get("transient", {}).get("display_id") or f"own-{len(shown.page.blocks)}"
            update = kind == "update_display_data"
            picture = "<img" in content["data"].get("text/html", "")
            if not (update and picture and key not in shown.page.blocks):  # that of another cell, whose view is live
                shown.page.publish(key, content["data"], {}, update)
        elif kind == "execute_result":
            shown.results.append(content["data"])
        elif kind == "error":
            shown.error = (content["ename"], content["evalue"], plain("\n".join(content["traceback"])))
        return kind == "status" and content["execution_state"] == "idle"

    def close(self) -> None:
        """Ends the kernel."""
        self._client.stop_channels()
        self.manager.shutdown_kernel()
