"""The progress of a cell run, its result, and the values in it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import RankFailure
from ...formatting import label_of
from ...output.terminal import Line, TerminalText
from ...protocol.messages import CellReport


@dataclass(frozen=True)
class RemoteValue:
    """A value that stayed on its rank: too large to send automatically, or not loadable by the client.

    Attributes:
        rank: where it is.
        kind: its type's name.
        text: its `repr` as the rank showed it.
        why: why it can't be sent; "" if it merely was not sent (`%pull` a variable to get it).
    """

    rank: int
    kind: str
    text: str
    why: str = ""

    def __repr__(self) -> str:
        return f"<{self.kind} on rank {self.rank}: {self.text or self.why}>"


@dataclass(frozen=True)
class CellStatus:
    """The progress of a cell run.

    Attributes:
        cell_id: the run's id.
        label: its name.
        state: "queued" (earlier cells run first), "running", "done", "failed", "interrupted" or "not run" (a cell for
            which it waited has failed or was interrupted).
        ranks: rank -> "queued", "running", "done", "failed" or "interrupted".
        seconds: from when it was sent until its end, or until now.
    """

    cell_id: str
    label: str
    state: str
    ranks: Mapping[int, str]
    seconds: float


@dataclass(frozen=True)
class CellResult:
    """The result of a cell.

    Attributes:
        cell_id: the run's id.
        label: its name.
        values: rank -> what the function returned, as `Cluster.pull` would return it; or the value of the cell's last
            expression: only plain data up to 64 KiB, tensors as numpy arrays. A `RemoteValue` replaces what can't be
            sent, or was not.
        outputs: rank -> every output in order, as notebook output dicts (``output_type`` and its fields); for ranks
            that printed much, read from their logs.
        seconds: wall time from sending to the last rank's end.
        failures: rank -> failure, the first cause first; empty unless the cell failed.
        logs: rank -> the file with everything it printed, kept while the cluster runs; empty if it printed little.
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


def value_of(rank: int, report: CellReport, shown: str) -> Any:
    """The value that a rank reports; `shown` is the text that it displayed for it."""
    if report.blob is not None:
        return pickle.loads(report.blob)
    return RemoteValue(rank, report.kind, shown, report.unsent) if report.ok else None
