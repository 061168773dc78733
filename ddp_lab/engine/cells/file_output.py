"""What a rank's process, and processes that it starts, write to its files 1 and 2 becomes text of its streams.

ipykernel reads these files in a thread of its own, of which nobody knows whether it has read all: text that a
process wrote just before a cell's end came too late for the cell. Here the reader can be overtaken: `drain`.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import threading
from collections.abc import Mapping
from typing import Any

_CHUNK = 1 << 16  # bytes


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
    """Reads what is written to the files; made on the main thread, before cells run.

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
