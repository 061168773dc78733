"""A text summary of a timeline: a few sentences, with every number computed from the events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..analysis.findings import Facts as Judged
from ..analysis.findings import Finding
from ..analysis.findings.ranks import varying_rank
from ..analysis.step_metrics import TypicalStep, typical
from ..analysis.step_parts import PARTS, StepParts
from ..analysis.stragglers import LatePlace
from ..formatting import counted, enumeration, ms, names, step_range
from .clocks import HostClock
from .records import Kept, ReducerInfo

__all__ = ["CHANGE", "NOTHING", "UNTOLD", "Facts", "Sentences", "incomplete", "losses", "median_of"]
__all__ += ["parameters_of", "summary"]

CHANGE = "Main finding"
"""The first words of the sentence about the first finding."""

NOTHING = (
    "No events yet. Wrap the model in ddp_lab.DistributedDataParallel and run some steps in a %%distributed cell. "
    "Recording is on unless ddp_lab.recording.disable() was called."
)
UNTOLD = "with this backend nothing tells when a rank waits"
_MOST_NAMES = 2
_MOST_PARTS = 5
_NAMED = 0.99
_OTHER_MEAN = 0.1  # of the median step: by more than that the mean one differs
_IN_THE_FIRST_SENTENCE = ("forward", "alone", "hidden", "exposed")
_WORTH_TELLING = 2.0  # percent of the step
_LEAST_COST = 0.5  # percent of the step: as for findings
_LEAST_OF_STEP = 0.005


class Sentences(Protocol):
    """What a kind of model says of itself; it is a `ModelKind`."""

    def communication(self, facts: Facts) -> str:
        """How much there is, and how much is overlapped."""

    def waiting(self, facts: Facts) -> list[str]:
        """What is exposed most, and why."""


@dataclass(frozen=True)
class Facts:
    """The input of the sentences: names, and columns of `Timeline`'s tables for the analysed steps."""

    kind: Sentences
    info: ReducerInfo
    steps: Mapping[str, npt.NDArray[Any]]
    spans: Mapping[str, npt.NDArray[Any]]
    sync: Mapping[str, npt.NDArray[Any]]
    late: Sequence[LatePlace]
    assignment: dict[str, Any] | None
    dropped: int
    findings: Sequence[Finding] = ()
    kept: Kept | None = None
    clocks: Sequence[HostClock] = ()
    parts: StepParts | None = None
    judged: Judged | None = None

    @property
    def typical(self) -> TypicalStep | None:
        """One of the steps as they usually are; None if exposed communication is not known."""
        one = self.judged.typical if self.judged is not None else None
        return one if one is not None and one.ranks else None


def incomplete(info: ReducerInfo, dropped: int) -> str:
    """Returns the summary of a model without a complete step."""
    return f"No step of {info.module} is complete yet. {losses(dropped)}"


def summary(facts: Facts) -> str:
    """Returns the sentences, one per line."""
    lines = [_cost(facts), _parts(facts), facts.kind.communication(facts)]
    if len(facts.info.ranks) > 1 and len(facts.sync["step"]):
        lines += facts.kind.waiting(facts)
        lines += [_late(facts, one) for one in facts.late[:2] if one.cost_percent >= _LEAST_COST]
    lines += [_largest(facts.findings), losses(facts.dropped), str(facts.kept or "")]
    lines += [f"{clock}." for clock in facts.clocks]
    return "\n".join(line for line in lines if line)


def _cost(facts: Facts) -> str:
    steps = facts.steps
    where = f"{facts.info.module} on {counted(len(facts.info.ranks), 'rank')}"
    span = step_range(np.unique(steps["step"]).tolist())
    if facts.typical is not None:
        one = facts.typical
        whole = f"{ms(one.total_ms)} per {'step' if one.is_whole else 'forward and backward'}"
        named = [(name, value) for name, value in one.named() if value >= _LEAST_OF_STEP * one.total_ms]
        told = [f"{ms(value)} {name}" for name, value in named if len(named) > 1]
    else:  # what ranks wait is not known
        total, backward = (typical(steps["step"], steps[name]) for name in ("step_ms", "backward_ms"))
        whole = f"{ms(total)} per step" if total == total else f"{ms(backward)} per backward"
        told = []
    of_which = f", of which {enumeration(told)}" if told else ""
    return f"{where}, {span}: {whole} (median){of_which}."


def _parts(facts: Facts) -> str:
    """Where the rest of the step goes: what is neither forward nor backward nor communication."""
    parts = facts.parts
    mean = parts.mean if parts is not None else {}
    rest = {part: one for part, one in mean.items() if part not in _IN_THE_FIRST_SENTENCE and part != "unnamed"}
    largest = sorted(rest, key=lambda part: -rest[part])[:_MOST_PARTS]
    if parts is None or not largest:
        return ""
    told = [f"{PARTS[part]} {ms(1e3 * rest[part])} ({100 * rest[part] / parts.total:.0f} %)" for part in largest]
    lines = [(place, sum(by_rank.values()) / len(parts.by_rank)) for place, by_rank in parts.lines("code")]
    longest = f" The longest other line: {lines[0][0]}, {ms(1e3 * lines[0][1])}." if lines else ""
    left = f"; unaccounted: {100 * (1 - parts.named):.0f} %" if parts.named < _NAMED else ""
    median = typical(facts.steps["step"], facts.steps["step_ms"])
    differs = abs(1e3 * parts.total - median) > _OTHER_MEAN * median
    whole = f"; the mean step takes {ms(1e3 * parts.total)}" if differs else ""
    of = f"means of {counted(parts.steps, 'step')}{whole}"
    return f"Besides forward, backward and communication ({of}): {enumeration(told)}{left}.{longest}"


def _late(facts: Facts, one: LatePlace) -> str:
    if one.where == "varying":
        return varying_rank(one.rank, one.share, one.delay_ms) + f" It costs {one.cost_percent:.0f} % of a step."
    cost = f" ({one.pattern}; it costs {one.cost_percent:.0f} % of a step)"
    when = f"by {ms(one.delay_ms)} in {100 * one.share:.0f} % of the steps{cost}"
    if one.words:
        return f"Rank {one.rank} is late {one.words}, {when}."
    if one.where == "everywhere":
        return f"Rank {one.rank} is slower than the others throughout its backward, {when}."
    if one.parameter is not None:
        where = f" (bucket {one.bucket})" if one.bucket is not None else ""
        return f"Rank {one.rank} falls behind when it computes the gradient of {one.parameter}{where}, {when}."
    if one.bucket is not None:
        return f"Rank {one.rank} falls behind in bucket {one.bucket}{parameters_of(facts, one.bucket)}, {when}."
    return f"Rank {one.rank} starts its backward late, {when}. Check its input data and its forward."


def _largest(findings: Sequence[Finding]) -> str:
    if not findings or findings[0].gain_percent < _WORTH_TELLING:
        return ""
    first = findings[0]
    return f"{CHANGE}, about {first.gain_percent:.0f} % of the step: {first.title} {first.remedy}"


def losses(dropped: int) -> str:
    """Returns a sentence about events that were overwritten before they were drained."""
    if not dropped:
        return "No event was dropped."
    return f"{dropped:,} events were dropped: spans may be missing, and the numbers leave these events out."


def parameters_of(facts: Facts, bucket: int) -> str:
    """Some parameters of a bucket, in brackets; "" if they are not known."""
    assignment = facts.assignment
    if assignment is None or bucket >= len(assignment["buckets"]):
        return ""
    held = [assignment["parameters"][index]["name"] for index in assignment["buckets"][bucket]["parameters"]]
    return f" ({names(held, _MOST_NAMES)})"


def median_of(values: npt.NDArray[Any]) -> float | None:
    """The median of what is known, None if nothing is."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None
