"""All outputs of a cell's ranks, in order: in memory while there are few, else in a log file per rank.

[Note: logs of ranks]
When the ranks of a cell have printed more than a few hundred lines, each gets a log: a text file that can be read while
the cell runs, with everything that this rank has printed, byte for byte, and the plain form of its displays. From then
on memory holds only the position of each output, and displays are in a second file. Only the user can read the files.
They are in the cluster's folder and are deleted with it; a result that still exists can be read further, because it
keeps its files open. If nothing can be written (a full disk), outputs stay in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

__all__ = ["CellOutputs", "RankOutputs"]

Output = dict[str, Any]

LINES_IN_MEMORY = 400
_CHARACTERS_IN_MEMORY = 100_000
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Stored:
    """Where an output is: text of a stream in the log, or (without a name) JSON in the other file."""

    name: str
    begin: int
    end: int


class _File:
    """A file that grows at its end and stays readable when it has been removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._fd)

    def append(self, text: str) -> tuple[int, int]:
        """Writes `text`; returns where it begins and ends. After an OSError nothing has been appended."""
        data = memoryview(text.encode("utf-8", "surrogatepass"))
        begin, done = self.end, 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], begin + done)
        self.end = begin + done
        return begin, self.end

    def read(self, begin: int, end: int) -> str:
        """What is there."""
        parts = []
        while begin < end:
            parts.append(os.pread(self._fd, end - begin, begin))
            begin += len(parts[-1])
        return b"".join(parts).decode("utf-8", "surrogatepass")


class RankOutputs(Sequence[Output]):
    """The outputs of one rank as notebook output dicts, read from its log when they are asked for.

    Args:
        begun: what has come so far.
        path: of the log, a new file.

    Raises:
        OSError: it can't be written; there is no such file then.
    """

    def __init__(self, begun: Sequence[Output], path: Path) -> None:
        self._items: list[Output | _Stored] = []
        self._log = _File(path)
        self._displays: _File | None = None
        try:
            for output in begun:
                self._append(self._stored(output))
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    @property
    def path(self) -> Path:
        """The log."""
        return self._log.path

    def add(self, output: Output) -> str:
        """Takes one more output; returns why the log misses it, "" if it has it."""
        try:
            item = self._stored(output)
        except OSError as error:
            self._items.append(output)
            return str(error)
        self._append(item)
        return ""

    def _stored(self, output: Output) -> _Stored:
        if output["output_type"] == "stream":
            return _Stored(output["name"], *self._log.append(output["text"]))
        if self._displays is None:
            self._displays = _File(self._log.path.with_suffix(".displays"))
        stored = _Stored("", *self._displays.append(json.dumps(output)))
        if output["output_type"] in ("display_data", "execute_result"):
            self._log.append(str(output["data"].get("text/plain", "")) + "\n")
        elif output["output_type"] == "error":
            self._log.append("\n".join(output.get("traceback", ())) + "\n")
        return stored

    def _append(self, item: _Stored) -> None:
        """Takes one more; text that continues a stream is put together with what is there, up to a size."""
        last = self._items[-1] if self._items else None
        if (
            isinstance(last, _Stored)
            and last.name == item.name != ""
            and last.end == item.begin
            and item.end - last.begin <= _CHUNK_BYTES
        ):
            self._items[-1] = _Stored(item.name, last.begin, item.end)
        else:
            self._items.append(item)

    def _output(self, item: Output | _Stored) -> Output:
        if not isinstance(item, _Stored):
            return item
        if item.name:
            return {"output_type": "stream", "name": item.name, "text": self._log.read(item.begin, item.end)}
        assert self._displays is not None
        output: Output = json.loads(self._displays.read(item.begin, item.end))
        return output

    @overload
    def __getitem__(self, index: int) -> Output: ...
    @overload
    def __getitem__(self, index: slice) -> list[Output]: ...
    def __getitem__(self, index: int | slice) -> Output | list[Output]:
        if isinstance(index, slice):
            return [self._output(item) for item in self._items[index]]
        return self._output(self._items[index])

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Output]:
        return (self._output(item) for item in list(self._items))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __repr__(self) -> str:
        return f"<{len(self)} outputs in {self.path}>"


class CellOutputs:
    """The outputs of all ranks of one cell. See [Note: logs of ranks].

    Args:
        ranks: the ranks.
        folder: where logs go; it need not be there yet. None: everything stays in memory.
        cell_id: of the cell run, for the logs' names.
    """

    def __init__(self, ranks: Sequence[int], folder: Path | None, cell_id: str) -> None:
        self._outputs: dict[int, list[Output] | RankOutputs] = {rank: [] for rank in ranks}
        self._folder = folder
        self._cell_id = cell_id
        self._lines = self._characters = 0
        self._problem = ""

    def add(self, rank: int, output: Output) -> None:
        """Takes one output."""
        outputs = self._outputs[rank]
        if isinstance(outputs, RankOutputs):
            self._problem = outputs.add(output) or self._problem
            return
        outputs.append(output)
        if self._folder is None:
            return
        text = output.get("text") or "".join(map(str, output.get("data", {}).values()))
        self._characters += len(text)
        self._lines += text.count("\n")
        if self._lines > LINES_IN_MEMORY or self._characters > _CHARACTERS_IN_MEMORY:
            self._begin_logs(self._folder)

    def by_rank(self) -> dict[int, Sequence[Output]]:
        """rank -> its outputs so far."""
        return {rank: outputs if isinstance(outputs, RankOutputs) else list(outputs) for rank, outputs in self._all()}

    def logs(self) -> dict[int, Path]:
        """rank -> its log; empty if there is little."""
        return {rank: outputs.path for rank, outputs in self._all() if isinstance(outputs, RankOutputs)}

    def where(self) -> str:
        """Says where everything is."""
        if not self.logs():
            return "the cell's result has them all" + (f" ({self._problem})" if self._problem else "")
        missing = f" (without what came after: {self._problem})" if self._problem else ""
        return f"the full text of each rank is in {self._path('*')}{missing}"

    def _all(self) -> Iterator[tuple[int, list[Output] | RankOutputs]]:
        return iter(list(self._outputs.items()))

    def _path(self, rank: int | str) -> Path:
        assert self._folder is not None
        return self._folder / f"cell-{self._cell_id}-rank-{rank}.log"

    def _begin_logs(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._outputs = {rank: RankOutputs(list(outputs), self._path(rank)) for rank, outputs in self._all()}
        except OSError as error:
            self._folder, self._problem = None, f"no log: {error}"
