"""Cells arrive over the client's wire; their outputs and results return over it.

[Note: one wire]
The control thread receives a cell and schedules it in the kernel's event loop, behind the lock that ipykernel's own
requests take: so cells and ipyparallel's (`%%px`) take turns on the main thread, in the order in which they arrived.
While a cell runs, the kernel's parent message is one of ours. What the kernel publishes with this parent (text,
displays, questions) goes to the wire, on the thread that publishes; everything else goes to ipyparallel, as before. A
forked process writes its text to the files that the rank reads. A rank sends all that it says over one socket: its
reply comes after all outputs and events.

What a rank says of a cell, by kind: ``"begun"``; an output's IOPub type, with the content as JSON; ``"reply"``, with a
`CellReport` or a `RequestFailure`. Messages of a widget's comm that a cell has opened have content and
metadata as JSON, and buffers, also after the cell.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import contextvars
import importlib
import io
import json
import logging
import os
import pickle
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timezone
from typing import Any, TypeVar

from ...protocol.entry_points import RankFunction
from ...protocol.messages import Call, Cell, CellReport, CommMessage, RequestFailure, report_frames
from ..telemetry import Telemetry
from . import cell
from .stdin import QUESTION

_PARENT = "ddp_lab_cell"  # type of the message that a cell's outputs refer to
_OUTPUTS = {"stream", "display_data", "execute_result", "update_display_data", "clear_output", "error", QUESTION}
_DELIMITER = b"<IDS|MSG>"
_FLUSH_S = 10.0  # at most, as ipykernel's own
_AGAIN_S = 0.1
_CHUNK = 1 << 16  # bytes

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Delivery:
    """Runs the cells that the client sends; made and installed on the rank's main thread.

    Args:
        kernel: this engine's.
        telemetry: connection to the client.
    """

    def __init__(self, kernel: Any, telemetry: Telemetry) -> None:
        self._kernel, self._telemetry = kernel, telemetry
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # one for all cells: a context variable keeps its value
        self._pid = os.getpid()
        self._publisher = kernel.iopub_socket  # and its thread
        self._publish = self._publisher.send_multipart
        self._comms: set[str] = set()  # that cells have opened; the publisher's thread
        self._streams: dict[int, Any] = {1: sys.stdout, 2: sys.stderr}
        self._files = FileOutput(self._streams)

    def install(self) -> None:
        """Begins to take cells, and their outputs."""
        self._publisher.send_multipart = self._send
        self._telemetry.on_control(Cell, lambda message: self._take(self._run, message))
        self._telemetry.on_control(Call, lambda message: self._take(self._call, message))
        self._telemetry.on_control(CommMessage, lambda message: self._take(self._comm, message))

    # Cells

    def _take(self, run: Callable[[_T], None], message: _T) -> None:
        """On the control thread."""
        asyncio.run_coroutine_threadsafe(self._in_turn(run, message), self._loop).add_done_callback(_log_failure)

    async def _in_turn(self, run: Callable[[_T], None], message: _T) -> None:
        async with self._kernel._main_asyncio_lock:
            self._context.run(run, message)

    def _call(self, call: Call) -> None:
        """Calls a function between two cells."""
        report: CellReport | RequestFailure
        try:
            function, args, kwargs = _called(call.function, call.frames)
            report = CellReport(ok=True, blob=pickle.dumps(function(*args, **kwargs)))
        except BaseException as error:  # noqa: BLE001  the client waits for a reply, whatever happens
            report = _failure(error)
        _with_memory(lambda: self._reply(call.id, report))

    def _comm(self, message: CommMessage) -> None:
        """Gives a widget what the page says."""
        self._kernel.set_parent([], _parent(""))
        said = {
            "header": {"msg_type": message.type},
            "msg_type": message.type,
            "parent_header": {},
            "buffers": list(message.frames),
            "content": message.content,
            "metadata": message.metadata,
        }
        getattr(self._kernel.comm_manager, message.type)(None, [], said)

    def _run(self, told: Cell) -> None:
        self._kernel.set_parent([], _parent(told.id))
        self._telemetry.send_cell(told.id, "begun")
        report: CellReport | RequestFailure
        try:
            called = () if told.function is None else _called(told.function, told.frames)
            report = cell.run(told, *called)
        except BaseException as error:  # noqa: BLE001  the client waits for a reply, whatever happens
            failure = error
            _log.warning("cell %s: the request failed", told.id, exc_info=True)
            report = _with_memory(lambda: _failure(failure))
        for send in (self._files.drain, self._flush, lambda: self._reply(told.id, report)):
            _with_memory(send)

    def _flush(self) -> None:
        """Sends the text of both streams. Their own `flush` would wait for the publisher's thread once for each."""
        sent = threading.Event()
        for send in (*(stream._flush for stream in self._streams.values()), sent.set):
            self._publisher.schedule(send)
        sent.wait(_FLUSH_S)

    def _reply(self, cell_id: str, report: CellReport | RequestFailure) -> None:
        self._telemetry.send_cell(cell_id, "reply", *report_frames(report))

    # Outputs

    def _send(self, frames: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        """In the place of the publisher's `send_multipart`."""
        if threading.current_thread() is self._publisher.thread:
            self._route(frames, *args, **kwargs)
        else:  # a signal to the main thread must not hit the wire's sending
            self._publisher.schedule(lambda: self._route(frames, *args, **kwargs))

    def _route(self, frames: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        """On the publisher's thread, or in a forked process."""
        said = self._of_a_cell([bytes(frame) for frame in frames])
        if said is None:
            self._publish(frames, *args, **kwargs)
        elif os.getpid() == self._pid:
            self._telemetry.send_cell(*said)
        elif said[1] == "stream":
            text = json.loads(said[2])
            os.write(1 if text["name"] == "stdout" else 2, text["text"].encode(errors="replace"))

    def _of_a_cell(self, frames: Sequence[bytes]) -> tuple[Any, ...] | None:
        """Cell, kind and data of a published message if it is a cell's; else None."""
        _, header, parent, metadata, content, *buffers = frames[frames.index(_DELIMITER) + 1 :]
        refers, kind = json.loads(parent), json.loads(header)["msg_type"]
        ours = refers.get("msg_type") == _PARENT
        if kind.startswith("comm_"):
            comm_id = json.loads(content)["comm_id"]
            if ours and kind == "comm_open":
                self._comms.add(comm_id)
            return ("", kind, content, metadata, *buffers) if comm_id in self._comms else None
        return (refers["msg_id"], kind, content) if ours and kind in _OUTPUTS else None


def _with_memory(call: Callable[[], _T]) -> _T:
    """Calls a part of a reply, for which the client waits; where there is no memory left, once there is."""
    while True:
        try:
            return call()
        except MemoryError:
            time.sleep(_AGAIN_S)


def _parent(cell_id: str) -> dict[str, Any]:
    """The message to which the outputs of a cell refer."""
    header = {
        "msg_id": cell_id,
        "msg_type": _PARENT,
        "username": "",
        "session": "",
        "date": datetime.now(timezone.utc).isoformat(),
        "version": "5.3",
    }
    return {"header": header, "parent_header": {}, "metadata": {}, "content": {}}


def _called(named: RankFunction, frames: Sequence[bytes]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A function that the client names, its arguments and keyword arguments."""
    function = getattr(importlib.import_module(named.module), named.name)
    args, kwargs = pickle.loads(frames[0], buffers=frames[1:])
    return function, args, kwargs


def _log_failure(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        _log.error("a message of the client was not answered", exc_info=error)


def _failure(error: BaseException) -> RequestFailure:
    return RequestFailure(type(error).__name__, cell.text_of(error), "".join(traceback.format_exception(error)))


class _File:
    """One of the files: its stream, and where else its text goes."""

    def __init__(self, number: int, stream: Any) -> None:
        self.stream = stream
        try:
            self._copy = int(stream.fileno())  # where the file led before ipykernel read it
        except io.UnsupportedOperation:  # it does not
            self._copy = os.dup(number)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.reader, writer = os.pipe()
        os.dup2(writer, number)
        os.close(writer)
        os.set_blocking(self.reader, False)

    def read(self) -> bool:
        """Passes a chunk on; whether there was one."""
        try:
            data = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return False
        self.stream.write(self._decoder.decode(data))
        with contextlib.suppress(OSError):  # e.g. a full disk: the text is shown all the same
            os.write(self._copy, data)
        return True


class FileOutput:
    """Makes text of the streams of what this process, and processes that it starts, write to its files 1 and 2.

    ipykernel reads these files in a thread of its own, of which nobody knows whether it has read all: text that a
    process wrote just before a cell's end came too late for the cell. Here the reader can be overtaken: `drain`. It is
    made on the main thread, before cells run.

    Args:
        streams: file number -> ipykernel's stream, which shows its text.
    """

    def __init__(self, streams: Mapping[int, Any]) -> None:
        self._lock = threading.Lock()  # held while text is neither in a pipe nor in its stream
        self._files = [_File(number, stream) for number, stream in streams.items()]
        threading.Thread(target=self._read_for_ever, name="ddp_lab-files", daemon=True).start()

    def drain(self) -> None:
        """Returns when all that has been written is text of the streams."""
        with self._lock:
            for file in self._files:
                while file.read():
                    pass

    def _read_for_ever(self) -> None:
        poller = select.poll()
        of_reader = {file.reader: file for file in self._files}
        for reader in of_reader:
            poller.register(reader, select.POLLIN)
        while True:
            for reader, _ in poller.poll():
                with self._lock:
                    of_reader[reader].read()
