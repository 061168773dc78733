"""The visual debugger of this rank: takes the client's messages, one `Session` at a time, and holds group timeouts.

A rank is an ipykernel, so its `Debugger` answers what concerns the namespace and what pydevd reports. Only its way to
pydevd is another one; see [Note: a debugger without a port] in `tracing`.

One client at a time debugs a rank. Its `Session` has a thread with an event loop, which owns all of its state. It ends
when the client says so, when another client begins one, or `_ALONE_SECONDS` after the client has disconnected. Then
a stopped thread continues, whatever the reason.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import logging
import os
import re
import socket
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Coroutine, Mapping
from importlib.util import find_spec
from typing import Any

from ipykernel.compiler import get_tmp_hash_seed, murmur2_x86
from IPython.core.inputtransformer2 import TransformerManager

from ...parallel.live import breakpoints
from ...protocol.messages import (
    CloseDebugger,
    DebuggerState,
    DebugReply,
    DebugRequest,
    GetDebugger,
    HoldDebugTimeouts,
    OpenDebugger,
    plain,
)
from ..cells import cell, sources
from ..telemetry import Telemetry
from . import tracing

__all__ = ["RankDebugger", "lines_of_code"]

_log = logging.getLogger(__name__)
_LET_GO_SECONDS = 0.5
_ALONE_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_END_SECONDS = 2.0
_LENGTH = b"Content-Length:"
# Their frames are below each cell, or answer for the rank: a step leads past them.
_PASSED = ("IPython", "ipykernel", "ipyparallel", "tornado", "traitlets", "zmq", "ddp_lab")


class RankDebugger:
    """Takes the client's messages on the control thread; made and installed on the rank's main thread.

    Args:
        kernel: this engine's.
        telemetry: connection to the client.
    """

    def __init__(self, kernel: Any, telemetry: Telemetry) -> None:
        self._kernel, self._telemetry = kernel, telemetry
        self._main = asyncio.get_running_loop()
        self._session: Session | None = None  # the control thread's; others take a copy
        self._holds_for = 0  # the number of the client for which group timeouts are held; 0: for none

    def install(self) -> None:
        """Begins to take messages."""
        self._telemetry.on_control(OpenDebugger, self._open)
        self._telemetry.on_control(DebugRequest, self._ask)
        self._telemetry.on_control(HoldDebugTimeouts, self._hold_or_not)
        self._telemetry.on_control(GetDebugger, lambda asked: DebuggerState(is_open=self._is_open(asked.name)))
        self._telemetry.on_control(CloseDebugger, self._close)
        cell.before_cell.append(self._before_cell)
        sources.on_named.append(self._on_named)

    @property
    def stopped(self) -> bool:
        """Whether a thread of this rank is stopped; from any thread."""
        session = self._session
        return session is not None and session.stopped

    def let_go(self) -> None:
        """Continues a stopped rank, and lets it pass breakpoints until its next cell; not on the main thread."""
        session = self._session
        if session is not None:
            session.let_go(_LET_GO_SECONDS)

    # The control thread

    def _open(self, asked: OpenDebugger) -> DebuggerState:
        if problem := tracing.available():
            return DebuggerState(problem)
        self._end()
        self._session = Session(self._kernel, self._telemetry, asked.name, asked.prefix, self._main)
        self._session.start()
        return DebuggerState(is_open=True)

    def _ask(self, asked: DebugRequest) -> None:
        if self._session is not None and self._is_open(asked.name):
            self._session.ask(asked.number, dict(asked.request))

    def _hold_or_not(self, asked: HoldDebugTimeouts) -> DebuggerState:
        self._hold(asked.on)
        return DebuggerState(is_open=self._session is not None)

    def _close(self, asked: CloseDebugger) -> DebuggerState:
        if self._is_open(asked.name):
            self._end()
        return DebuggerState()

    def _is_open(self, name: str) -> bool:
        return self._session is not None and self._session.name == name

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.end()

    def _hold(self, on: bool) -> None:
        self._holds_for = self._telemetry.clients if on else 0
        (breakpoints.hold_timeouts if on else breakpoints.restore_timeouts)()

    def _before_cell(self, cell_id: str, label: str) -> None:
        """On the main thread."""
        if self._holds_for:
            self._hold(self._holds_for == self._telemetry.clients)  # of groups that are new since, or for nobody
        session = self._session
        if session is not None:
            session.before_cell()

    def _on_named(self, name: str) -> None:
        """On the main thread, before a cell's code is compiled."""
        session = self._session
        if session is not None:
            session.name_cell(name)


class Session:
    """One client's debugger on this rank.

    Args:
        kernel: this engine's, whose debugger answers.
        telemetry: takes the replies and events.
        name: the client's name of it.
        prefix: what the client's front end puts before a cell's hash.
        main: the event loop of the main thread.
    """

    def __init__(
        self, kernel: Any, telemetry: Telemetry, name: str, prefix: str, main: asyncio.AbstractEventLoop
    ) -> None:
        self.name = name
        self.stopped = False  # whether a thread is; the session's thread writes it
        self._kernel, self._telemetry, self._prefix, self._main = kernel, telemetry, prefix, main
        self._debugger: Any = None  # ipykernel's
        self._dumped: dict[str, str] = {}  # path -> text of the notebook's cells
        self._passing = False  # an interrupted cell stops at no breakpoint
        self._connection = Connection(self._on_event)
        self._stopped_thread: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="ddp_lab-debugger", daemon=True)

    # Any thread

    def start(self) -> None:
        """Starts its thread."""
        tracing.leave_out(self._thread).start()
        self._ready.wait()

    def ask(self, number: int, request: dict[str, Any]) -> None:
        """Takes a request; its reply is sent as ``"debug_reply"`` with this number."""
        if not self._call(self._answer(number, request)):
            self._send("debug_reply", plain(DebugReply(number, _failure(request, "the rank's debugger has ended"))))

    def end(self) -> None:
        """Ends it; a stopped thread continues. Waits for that for some seconds at most."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_END_SECONDS)

    def let_go(self, seconds: float) -> None:
        """Continues a stopped thread and lets it pass breakpoints until the next cell; waits for it."""
        self._passing = True
        deadline = time.monotonic() + seconds
        if self.stopped:
            self._call(self._continue())
        while self.stopped and time.monotonic() < deadline:
            time.sleep(0.005)

    # The main thread

    def before_cell(self) -> None:
        """A cell begins: breakpoints count again."""
        self._passing = False
        tracing.renew()

    def name_cell(self, name: str) -> None:
        """Makes breakpoints of the notebook's cell those of its code."""
        text = sources.notebooks_text(name)
        if text:
            tracing.name_cell(name, self._path(text))

    # Its own thread

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except Exception:  # noqa: BLE001  the thread's top: the client notices that no reply comes
            _log.exception("the visual debugger failed")
        finally:
            self._ready.set()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        self._debugger = tracing.answering(self._kernel, self._publish, self._connection)
        stops = asyncio.create_task(self._report_stops())
        try:
            await self._until_ended()
        finally:
            stops.cancel()
            await self._finish()

    async def _until_ended(self) -> None:
        alone_since, client = None, self._telemetry.clients
        while not self._ended.is_set():
            try:
                await asyncio.wait_for(self._ended.wait(), _LOOK_SECONDS)
            except (TimeoutError, asyncio.TimeoutError):
                now = time.monotonic()
                if self._telemetry.clients != client:
                    return
                alone_since = None if self._telemetry.attached else alone_since or now
                if alone_since is not None and now - alone_since > _ALONE_SECONDS:
                    return

    async def _report_stops(self) -> None:
        while True:
            await self._debugger.handle_stopped_event()

    def _call(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs this on the session's thread; returns at once, whether that thread lives."""

        def begin() -> None:
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop = self._loop
        if loop is None or loop.is_closed():
            work.close()
            return False
        loop.call_soon_threadsafe(begin)
        return True

    async def _answer(self, number: int, request: dict[str, Any]) -> None:
        try:
            reply = await self._reply(request)
        except Exception as error:  # noqa: BLE001  sent to the client, whatever it is
            reply = _failure(request, f"{type(error).__name__}: {error}")
        self._send("debug_reply", plain(DebugReply(number, reply)))

    async def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        command = request["command"]
        if command == "initialize" and not tracing.begun():
            await self._begin()
        if command == "attach":
            return await self._attach(request)
        if command == "dumpCell":
            text = request["arguments"]["code"]
            path = self._path(text)
            self._dumped[path] = text
            self._name_dumped(path)
            return _success(request, {"sourcePath": path})
        if command == "setBreakpoints":
            request = self._on_lines_of_code(request)
        if command == "source" and (text := self._dumped.get(request["arguments"]["source"].get("path", ""), "")):
            return _success(request, {"content": text})
        if command == "disconnect":
            await self._finish()
            return _success(request, {})
        reply: dict[str, Any] = await self._debugger.process_request(request)
        if command == "debugInfo":
            reply["body"]["tmpFilePrefix"] = self._prefix
        return reply

    def _name_dumped(self, path: str) -> None:
        """pydevd refuses breakpoints in a cell that has not been run, unless it has a name."""
        known = {self._path(sources.notebooks_text(name)) for name in sources.named()}
        if path not in known:
            tracing.name_cell(f"<cell {path}>", path)

    def _on_lines_of_code(self, request: dict[str, Any]) -> dict[str, Any]:
        """Moves breakpoints from lines without code, as pydevd does in files: to the line above that has some."""
        arguments = request["arguments"]
        lines = lines_of_code(self._dumped.get(arguments["source"].get("path", ""), ""))
        if not lines:
            return request
        moved = []
        for point in arguments.get("breakpoints", ()):
            above = [line for line in lines if line <= point["line"]]
            moved.append({**point, "line": above[-1] if above else lines[0]})
        return {**request, "arguments": {**arguments, "breakpoints": moved}}

    async def _begin(self) -> None:
        await self._connection.open(tracing.begin())
        self._debugger.is_started = True
        for name in sources.named():
            self.name_cell(name)

    async def _attach(self, request: dict[str, Any]) -> dict[str, Any]:
        """pydevd is attached at once; it waits for the configuration to be done."""
        rules = [{"path": pattern, "include": False} for pattern in passed_files()]
        given = {**request.get("arguments", {}), "justMyCode": False, "rules": rules}
        reply = await self._connection.send_dap_request({**request, "arguments": given})
        await self._connection.send_dap_request({"type": "request", "command": "configurationDone"})
        return reply

    async def _finish(self) -> None:
        """Ends the tracing; a stopped thread continues."""
        if tracing.begun():
            disconnect = {"type": "request", "command": "disconnect", "arguments": {"terminateDebuggee": False}}
            try:
                await asyncio.wait_for(self._connection.send_dap_request(disconnect), _END_SECONDS)
            except (TimeoutError, asyncio.TimeoutError, ConnectionError):
                _log.warning("the debugger did not end in time; its threads are continued with its end")
            tracing.end()
            self._main.call_soon_threadsafe(tracing.clear_main_thread)
        if self.stopped:
            self._on_event({"type": "event", "event": "continued", "seq": 0, "body": self._continued()})
        await self._connection.close()
        self._reset()

    def _reset(self) -> None:
        debugger = self._debugger
        debugger.is_started, debugger.breakpoint_list, debugger.stopped_threads = False, {}, set()
        self._dumped, self.stopped = {}, False

    async def _continue(self) -> None:
        arguments = {"threadId": self._stopped_thread}
        await self._connection.send_dap_request({"type": "request", "command": "continue", "arguments": arguments})

    def _continued(self) -> dict[str, Any]:
        return {"threadId": self._stopped_thread, "allThreadsContinued": True}

    def _on_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "stopped":
            self.stopped, self._stopped_thread = True, event["body"]["threadId"]
            if self._passing:
                self._call(self._continue())
                return
        elif kind == "continued":
            self.stopped = False
        elif kind in ("module", "process", "terminated"):
            return  # the front end has no use for them, and there are hundreds of modules
        self._debugger._handle_event(event)

    def _publish(self, event: dict[str, Any]) -> None:
        self._send("debug_event", event)

    def _send(self, kind: str, content: Mapping[str, Any]) -> None:
        self._telemetry.send_cell(self.name, kind, json.dumps(content, default=repr).encode())

    def _path(self, text: str) -> str:
        """The front end's name of a cell with this text."""
        number = murmur2_x86(text, get_tmp_hash_seed())  # type: ignore[no-untyped-call]
        return f"{self._prefix}{number}.py"


def _success(request: Mapping[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    return {**_head(request), "success": True, "body": body}


def _failure(request: Mapping[str, Any], why: str) -> dict[str, Any]:
    return {**_head(request), "success": False, "message": why, "body": {}}


def _head(request: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "response", "request_seq": request.get("seq", 0), "command": request["command"]}


class Connection:
    """One connection to pydevd, over the debug adapter protocol; owned by the event loop of the thread that makes it.

    pydevd answers some requests on the thread that they are about, so responses can arrive in another order than
    requests.

    Args:
        on_event: called with each event.
    """

    def __init__(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, connected: socket.socket) -> None:
        """Takes over a connected socket."""
        reader, self._writer = await asyncio.open_connection(sock=connected)
        self._reading = asyncio.create_task(self._read(reader))

    async def send_dap_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request and returns its response.

        Raises:
            ConnectionError: the debugger has ended.
        """
        if self._writer is None:
            raise ConnectionError("the debugger is not running")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        data = json.dumps({**request, "seq": number}, default=repr).encode()
        self._writer.write(b"%s %d\r\n\r\n%s" % (_LENGTH, len(data), data))
        response = await answer
        return {**response, "request_seq": request.get("seq", number)}

    def get_host_port(self) -> tuple[str, str]:
        """For ipykernel's debugger: there is no address."""
        return "", "0"

    async def close(self) -> None:
        """Ends the connection and all requests that wait."""
        writer, self._writer = self._writer, None
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if writer is not None:
            writer.close()
        self._give_up()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.startswith(_LENGTH))
                message = json.loads(await reader.readexactly(int(length.removeprefix(_LENGTH))))
                if message["type"] == "response":
                    waiting = self._waiting.pop(int(message["request_seq"]), None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                elif message["type"] == "event":
                    self._on_event(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._give_up()

    def _give_up(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the debugger has ended"))


def passed_files() -> list[str]:
    """Files that a step leads past: what runs below each cell, between its statements, and the standard library."""
    folders = [os.path.dirname(found.origin) for one in _PASSED if (found := find_spec(one)) and found.origin]
    library = sysconfig.get_paths()["stdlib"]
    for inside in os.scandir(library):
        if inside.is_dir() and inside.name not in ("site-packages", "dist-packages"):
            folders.append(inside.path)
    return [os.path.join(library, "*.py"), *(os.path.join(folder, "**") for folder in folders)]


def lines_of_code(text: str) -> list[int]:
    """The numbers of the lines of a `%%distributed` cell at which a rank can stop; empty if it is not Python."""
    above = re.match(r"\s*%%[^\n]*\n", text)
    body = text[above.end() :] if above is not None else text
    shift = text.count("\n", 0, above.end()) if above is not None else 0
    shift += body.count("\n", 0, len(body) - len(body.lstrip()))
    try:
        code = TransformerManager().transform_cell(body)  # type: ignore[no-untyped-call]
        todo = [compile(code, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)]
    except (SyntaxError, ValueError):
        return []
    found: set[int] = set()
    while todo:
        one = todo.pop()
        found.update(line + shift for _, _, line in one.co_lines() if line)
        todo += [inner for inner in one.co_consts if isinstance(inner, types.CodeType)]
    return sorted(found)
