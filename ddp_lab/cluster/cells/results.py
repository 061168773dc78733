"""What a cell run leaves: values and outputs by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import RankFailure
from ...formatting import label_of
from ...output.terminal import Line, TerminalText

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
        state: "queued" (earlier cells run first), "running", "done", "failed", "interrupted" or "not run" (a cell for
            which it waited has failed or was interrupted).
        ranks: rank -> "queued", "running", "done", "failed" or "interrupted".
        seconds: since it was sent, until its end.
    """

    cell_id: str
    label: str
    state: str
    ranks: Mapping[int, str]
    seconds: float


@dataclass(frozen=True)
class CellResult:
    """What came back from a cell.

    Attributes:
        cell_id: the run's id.
        label: its name.
        values: rank -> what the function returned, as `Cluster.pull` would bring it; or the value of the cell's last
            expression: only plain data up to 64 KiB, tensors as numpy arrays. For what can't be sent, or is not, a
            `RemoteValue` stands.
        outputs: rank -> every output in order, as notebook output dicts (``output_type`` and its fields); of ranks that
            printed much, read from their logs.
        seconds: wall time from sending to the last rank's end.
        failures: rank -> failure, the first cause first; empty unless it failed.
        logs: rank -> the file with all that it printed, there as long as the cluster runs; empty if that is little.
    """

    cell_id: str
    label: str
    values: Mapping[int, Any]
    outputs: Mapping[int, Sequence[dict[str, Any]]]
    seconds: float
    failures: Mapping[int, RankFailure] = field(default_factory=dict)
    logs: Mapping[int, Path] = field(default_factory=dict)

    def text(self, rank: int) -> str:
        """All text that rank `rank` printed or displayed, in order, progress bars in their last state."""
        parts: list[str] = []
        for output in self.outputs[rank]:
            if output["output_type"] == "stream":
                parts.append(output["text"])
            elif "data" in output and output["output_type"] != "update_display_data":
                parts.append(str(output["data"].get("text/plain", "")) + "\n")
        text = "".join(parts)
        return text if "\r" not in text and "\x1b[" not in text else _settled(text)

    def __repr__(self) -> str:
        values = ", ".join(f"{rank}: {value!r}" for rank, value in self.values.items() if rank not in self.failures)
        failed = f", failed on {label_of(self.failures)}" if self.failures else ""
        return f"<CellResult of {self.label} in {self.seconds:.3f} s{failed}, values {{{values}}}>"


def _settled(text: str) -> str:
    """`text` with carriage returns and cursor moves applied."""
    terminal = TerminalText()
    lines: dict[int, Line] = {}
    for part in text.splitlines(keepends=True):
        for line in terminal.feed(part):
            lines.setdefault(id(line), line)
    return "\n".join(line.text for line in lines.values()) + ("\n" if text.endswith("\n") else "")
