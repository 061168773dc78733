"""The requests of JupyterLab's debugger, spoken over a kernel's control channel as the browser does."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ipykernel.compiler import murmur2_x86
from jupyter_client.manager import KernelManager

from tests.cluster.pages import beside
from tests.waiting import DEADLINE_S, wait_until


class FrontEnd:
    """A debugger's front end beside the notebook page of the same kernel."""

    def __init__(self, manager: KernelManager) -> None:
        self._client = beside(manager)
        self._numbers = itertools.count(1)
        self.events: list[Mapping[str, Any]] = []

    def close(self) -> None:
        """Leaves the kernel."""
        self._client.stop_channels()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The response to a request, which must come."""
        content = {"type": "request", "seq": next(self._numbers), "command": command, "arguments": arguments}
        message = self._client.session.msg("debug_request", content)
        self._client.control_channel.send(message)
        while True:
            reply = self._client.get_control_msg(timeout=DEADLINE_S)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    def body(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The body of a response that reports success."""
        reply = self.ask(command, **arguments)
        assert reply.get("success", True), (command, arguments, reply)
        return dict(reply.get("body") or {})

    def turn_on(self) -> None:
        """As JupyterLab when the bug in the toolbar is pressed."""
        self.body("initialize", clientID="jupyterlab", adapterID="python3", linesStartAt1=True, pathFormat="path")
        self.body("attach")
        assert self.body("debugInfo")["isStarted"]

    def turn_off(self) -> None:
        """As JupyterLab when it is pressed again."""
        self.ask("disconnect", restart=False, terminateDebuggee=False)

    def break_at(self, cell: str, *lines: int) -> str:
        """Sets breakpoints in a cell, by the lines of the notebook; returns the cell's path."""
        known = self.body("debugInfo")
        path = self.body("dumpCell", code=cell)["sourcePath"]
        number = murmur2_x86(cell, known["hashSeed"])
        assert path == f"{known['tmpFilePrefix']}{number}{known['tmpFileSuffix']}", "the browser's name of the cell"
        made = self.body(
            "setBreakpoints",
            source={"path": path},
            breakpoints=[{"line": line} for line in lines],
            sourceModified=False,
        )
        assert [(one["verified"], one["line"]) for one in made["breakpoints"]] == [(True, line) for line in lines]
        self.body("configurationDone")
        return path

    def event(self, kind: str) -> Mapping[str, Any]:
        """The next event of this kind."""

        def next_one() -> Mapping[str, Any] | None:
            while self._client.iopub_channel.msg_ready():
                message = self._client.get_iopub_msg(timeout=0)
                if message["msg_type"] == "debug_event":
                    self.events.append(message["content"])
            return next((event for event in self.events if event["event"] == kind), None)

        found = wait_until(next_one, lambda: f"event {kind} (there were {[one['event'] for one in self.events]})")
        assert found is not None
        self.events.remove(found)
        return dict(found.get("body") or {})

    def stopped(self) -> tuple[int, list[dict[str, Any]]]:
        """Waits for the next stop: the thread, and its frames from the innermost on."""
        thread = self.event("stopped")["threadId"]
        assert any(one["id"] == thread for one in self.body("threads")["threads"])
        return thread, self.frames(thread)

    def frames(self, thread: int) -> list[dict[str, Any]]:
        """The stopped thread's frames."""
        return list(self.body("stackTrace", threadId=thread)["stackFrames"])

    def variables(self, frame: Mapping[str, Any]) -> dict[str, str]:
        """Name -> value of what the frame's first scope shows."""
        scope = self.body("scopes", frameId=frame["id"])["scopes"][0]
        found = self.body("variables", variablesReference=scope["variablesReference"])["variables"]
        return {one["name"]: one["value"] for one in found}

    def evaluate(self, expression: str, frame: Mapping[str, Any]) -> str:
        """As typed into the debugger's console."""
        return str(self.body("evaluate", expression=expression, frameId=frame["id"], context="repl")["result"])
