"""What tools answer: a text to read, and the same facts as records, which become JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Answer", "CellOutcome", "Findings", "Hang", "Model", "Prediction", "Report", "Status", "Summary"]

_Facts = TypeVar("_Facts")


@dataclass(frozen=True)
class Answer(Generic[_Facts]):
    """The answer of a tool.

    Attributes:
        text: for reading.
        facts: one of the records below; it has only text, finite numbers, lists and records.
    """

    text: str
    facts: _Facts


@dataclass(frozen=True)
class Model:
    """A model whose gradients the ranks synchronise; `newest_step` is -1 before its first step."""

    model: int
    module: str
    ranks: list[int]
    newest_step: int


@dataclass(frozen=True)
class RankState:
    """A rank now; times in seconds."""

    rank: int
    state: str
    cell: str | None
    cell_seconds: float | None
    silent_seconds: float | None
    in_flight: str
    device: str
    host: str
    pid: int
    exit_code: int | None


@dataclass(frozen=True)
class Status:
    """A cluster now."""

    cluster: str
    running: bool
    ranks: list[RankState]
    pending_cells: list[str]
    models: list[Model]


@dataclass(frozen=True)
class RankActivity:
    """What a rank does, and the user's own frames of its stack, the innermost last."""

    rank: int
    doing: str
    cell_seconds: float
    in_flight: str
    stack: list[str]


@dataclass(frozen=True)
class Hang:
    """A hang diagnosis; `stuck`: ranks wait for something that will not happen by itself."""

    kind: str
    stuck: bool
    cause: str
    suggested_fix: str
    processes: list[str]
    ranks: list[RankActivity]


@dataclass(frozen=True)
class Summary:
    """A model's training; `step_ms`: typical time of a step in milliseconds, null if it is not known."""

    model: int | None
    module: str
    step_ms: float | None
    summary: str
    models: list[Model]
    notices: list[str]


@dataclass(frozen=True)
class Found:
    """One thing to change; `saving_percent`: estimated saving in percent of the step."""

    kind: str
    title: str
    evidence: str
    suggested_fix: str
    saving_percent: float
    rank: int | None
    bucket: int | None
    parameter: str | None


@dataclass(frozen=True)
class Findings:
    """What to change, the largest saving first."""

    headline: str
    findings: list[Found]


@dataclass(frozen=True)
class Prediction:
    """A predicted step next to the present one; milliseconds.

    `change_percent` is negative for a faster step. The step is forward + compute + exposed + other.
    """

    present_step_ms: float
    step_ms: float
    change_percent: float
    forward_ms: float
    compute_ms: float
    hidden_ms: float
    exposed_ms: float
    other_ms: float
    buckets: int
    world_size: int
    bandwidth_gb_s: float | None
    latency_us: float


@dataclass(frozen=True)
class Report:
    """An HTML page; the path is on the machine that serves the tools."""

    path: str


@dataclass(frozen=True)
class RankOutcome:
    """A cell on one rank: `value` is the repr of its last expression, `error` the traceback; long texts are cut."""

    rank: int
    state: str
    value: str
    output: str
    error: str


@dataclass(frozen=True)
class CellOutcome:
    """How a cell ended."""

    label: str
    state: str
    seconds: float
    ranks: list[RankOutcome]
