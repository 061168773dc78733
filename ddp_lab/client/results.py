"""What a cell run leaves: values and outputs by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .lines import Line, TerminalText

__all__ = ["CellResult", "CellStatus", "RemoteValue"]


@dataclass(frozen=True)
class RemoteValue:
    """A value that stayed on its rank: too large to send unasked, or something the client can't load.

    Attributes:
        rank: where it is.
        kind: its type's name.
        text: its `repr` as the rank showed it.
        why: why it can't leave the rank; "" if it was only not sent (`%pull` a variable to get it).
    """

    rank: int
    kind: str
    text: str
    why: str = ""

    def __repr__(self) -> str:
        return f"<{self.kind} on rank {self.rank}: {self.text or self.why}>"


@dataclass(frozen=True)
class CellStatus:
    """How far a cell run is.

    Attributes:
        cell_id: the run's id.
        label: its name.
        ranks: rank -> "running", "done" or "failed".
        seconds: since it was sent, until its end.
    """

    cell_id: str
    label: str
    ranks: Mapping[int, str]
    seconds: float


@dataclass(frozen=True)
class CellResult:
    """What came back from a cell.

    Attributes:
        cell_id: the run's id.
        label: its name.
        values: rank -> value of the last expression (of a function: what it returned). Tensors come as numpy
            arrays. Of a cell, only plain data up to 64 KiB are sent; else a `RemoteValue` stands for it.
        outputs: rank -> every output in order, as notebook output dicts (``output_type`` and its fields).
        seconds: wall time from sending to the last rank's end.
    """

    cell_id: str
    label: str
    values: Mapping[int, Any]
    outputs: Mapping[int, list[dict[str, Any]]]
    seconds: float

    def text(self, rank: int) -> str:
        """All text that rank `rank` printed or displayed, in order, progress bars in their last state."""
        parts: list[str] = []
        streams: dict[str, list[str]] = {}
        for output in self.outputs[rank]:
            if output["output_type"] == "stream":
                streams.setdefault(output["name"], []).append(output["text"])
                parts.append(output["text"])
            elif "data" in output and output["output_type"] != "update_display_data":
                parts.append(str(output["data"].get("text/plain", "")) + "\n")
        text = "".join(parts)
        return text if "\r" not in text and "\x1b[" not in text else _settled(text)

    def __repr__(self) -> str:
        values = ", ".join(f"{rank}: {value!r}" for rank, value in self.values.items())
        return f"<CellResult of {self.label} in {self.seconds:.3f} s, values {{{values}}}>"


def _settled(text: str) -> str:
    """`text` with carriage returns and cursor moves applied."""
    terminal = TerminalText()
    lines: dict[int, Line] = {}
    for part in text.splitlines(keepends=True):
        for line in terminal.feed(part):
            lines.setdefault(id(line), line)
    return "\n".join(line.text for line in lines.values()) + ("\n" if text.endswith("\n") else "")
