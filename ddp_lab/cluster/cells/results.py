"""The state of a cell run: of each of its ranks while it runs, and of all when it has ended."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import RankFailure
from ...formatting import label_of
from ...output.logs import CellOutputs
from ...output.terminal import Line, TerminalText
from ...protocol.messages import CellReport
from . import failures as reports


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


@dataclass
class RankState:
    """The cell on one rank.

    Attributes:
        report: how the rank says that it ended.
        failure: why there will be no report.
        begun_s: when it began, in seconds on the monotonic clock; None if it has not.
        ended_s: when it ended, in seconds on the monotonic clock.
        shown: the text that it showed for the last expression's value.
    """

    report: CellReport | None = None
    failure: RankFailure | None = None
    begun_s: float | None = None
    ended_s: float = 0.0
    shown: str = ""

    @property
    def ended(self) -> bool:
        """Whether the rank has reported how the cell ended, or no longer can."""
        return self.report is not None or self.failure is not None

    @property
    def word(self) -> str:
        """ "queued", "running", "done", "failed" or "interrupted"."""
        if not self.ended:
            return "queued" if self.begun_s is None else "running"
        if self.report is None:
            return "failed"
        if self.report.ok:
            return "done"
        return "interrupted" if self.report.name == reports.INTERRUPTED else "failed"


class RankStates:
    """The states of all ranks of one cell.

    Args:
        ranks: the ranks.
        outputs: where their outputs go.
        on_axis: converts a rank's host time to one common clock; None: all share one.
    """

    def __init__(
        self, ranks: Sequence[int], outputs: CellOutputs, on_axis: Callable[[int, int], int] | None = None
    ) -> None:
        self.outputs = outputs
        self._on_axis = on_axis
        self._states = {rank: RankState() for rank in ranks}

    def __getitem__(self, rank: int) -> RankState:
        return self._states[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def open(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(rank for rank, state in self._states.items() if not state.ended)

    def begin(self, time_s: float) -> None:
        """Assumes from now on that no rank is kept from beginning."""
        for state in self._states.values():
            state.begun_s = time_s

    def begun(self) -> float | None:
        """When the first rank began, in seconds on the monotonic clock; None if none has."""
        return min((state.begun_s for state in self._states.values() if state.begun_s is not None), default=None)

    def finished(self) -> bool:
        """Whether every rank has ended. Its outputs have arrived: a rank replies after them."""
        return all(state.ended for state in self._states.values())

    def take_output(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Keeps an output message."""
        if kind == "execute_result":
            self._states[rank].shown = str(content["data"].get("text/plain", ""))
        self.outputs.add(rank, {"output_type": kind, **content})

    def give_up(self, failure: RankFailure) -> None:
        """Ends a rank that will not answer."""
        state = self._states[failure.rank]
        state.failure = failure
        state.ended_s = time.monotonic()

    def failures(self) -> dict[int, RankFailure]:
        """Failures by rank, causes first (see `failures.in_order`)."""
        found = []
        for rank, state in self._states.items():
            if state.failure is not None:
                found.append(state.failure)
            elif state.report is not None and not state.report.ok:
                made = reports.failure_of(rank, state.report)
                found.append(
                    made if self._on_axis is None else replace(made, time_ns=self._on_axis(rank, made.time_ns))
                )
        return reports.in_order(found)

    def failed_before(self, time_s: float) -> RankFailure | None:
        """The first failure, if it happened before `time_s` on the monotonic clock."""
        if any(state.word in ("failed", "interrupted") and state.ended_s <= time_s for state in self._states.values()):
            return next(iter(self.failures().values()))
        return None

    def words(self) -> dict[int, str]:
        """rank -> "queued", "running", "done", "failed" or "interrupted"."""
        return {rank: state.word for rank, state in self._states.items()}

    def ends(self) -> dict[int, str]:
        """As `words`, with "unblocked" for ranks that failed because another one did."""
        secondary = {rank for rank, failure in self.failures().items() if failure.secondary}
        return {rank: "unblocked" if rank in secondary else word for rank, word in self.words().items()}

    def values(self) -> dict[int, Any]:
        """rank -> value, of the ranks that have reported."""
        reports = {rank: state.report for rank, state in self._states.items() if state.report is not None}
        return {rank: _value_of(rank, report, self._states[rank].shown) for rank, report in reports.items()}


def _value_of(rank: int, report: CellReport, shown: str) -> Any:
    if report.blob is not None:
        return pickle.loads(report.blob)
    return RemoteValue(rank, report.kind, shown, report.unsent) if report.ok else None
