"""The messages between the client and its ranks: one frozen record for each, the same on both sides.

The client sends with ``Wire.send`` and ``Wire.request``; a rank gives each type to what answers it
(``Telemetry.on_control``). On the way a message is JSON, with its data in frames behind. `decode` refuses what is none.

| message | sent by | answered by, with |
|---|---|---|
| ``Cell`` | ``cluster.cells.run`` | ``engine.cells.delivery``: outputs, then a ``CellReport`` or ``RequestFailure`` |
| ``Call`` (of a function between cells) | ``cluster.processes.startup`` | the same |
| ``CommMessage`` (of a widget) | ``cluster.cells.front_end`` | ``engine.cells.delivery``: nothing |
| ``InputAnswer`` (to a ``Question``) | ``cluster.cells.front_end`` | ``engine.cells.stdin``: nothing |
| ``Interrupt``, ``Unblock``, ``PeerFailed`` | ``cluster.membership`` | ``engine.agent``: nothing but a ``Status`` |
| ``Settle`` | ``cluster.membership`` | ``engine.agent``: ``Settled`` |
| ``Ping`` | ``cluster.membership``, tuning | ``engine.agent``; in scripts ``engine.telemetry``: ``Activity`` |
| ``GetHealth`` | ``cluster.membership`` | ``engine.agent``: ``Health`` |
| ``Examine`` | ``diagnosis.sources`` | ``engine.agent``, ``diagnosis.on_rank.script``: ``Examination`` |
| ``FindCallSite`` | the same | ``diagnosis.on_rank.examine``: ``CallSite`` |
| ``GetTime`` | ``control.wire``, for clocks | ``engine.telemetry``: ``HostTime`` |
| ``DescribeRank``, ``GetLastCell`` | ``cluster.session`` | ``engine.cells.last_cell``: ``RankDescription`` |
| ``Complete``, ``LookUp`` | ``notebook.completion`` | ``engine.cells.name_lookup``: ``Completions``, ``Page`` |
| ``OpenDebugger`` … ``CloseDebugger`` | ``notebook.debugger`` | ``engine.debugger.rank_debugger``: ``DebuggerState`` |
| ``InspectGradients``, ``MeasureEventCost`` | ``cluster.views`` | ``engine.rank``: a description; ``EventCost`` |
| ``CheckChange`` … ``Resume``, of training models | ``control.training`` | ``engine.model_control`` |
"""

from __future__ import annotations

import functools
import json
import pickle
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from ..faults import Fault
from ..faults import from_dict as fault_from_dict
from ..faults import to_dict as fault_to_dict
from .entry_points import RankFunction

R = TypeVar("R")
_T = TypeVar("_T")
_PIECE = 32 << 20  # bytes of a frame; the client refuses larger ones
_SHOWN = 60  # characters of a wrong value in an error


class Refused(Exception):
    """A rank can't do what it is asked for, for a reason of the user's: the reply says why, and nothing is logged."""


class Message:
    """What the client sends to a rank: a frozen dataclass of values that have an equal in JSON; lists arrive as tuples.

    Attributes:
        frames: data that is not JSON.
    """

    frames: Sequence[bytes] = ()
    reply: ClassVar[type[Any] | None] = None
    """The type of the reply to a request; None: there is none."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__name__ in _KINDS and _KINDS[cls.__name__].__module__ != cls.__module__:
            raise TypeError(f"there are two messages {cls.__name__}")
        given = [get_args(base) for base in cls.__dict__.get("__orig_bases__", ())]
        if not any(isinstance(one, TypeVar) for arguments in given for one in arguments):
            _KINDS[cls.__name__] = cls
            cls.reply = given[0][0] if given and given[0] else cls.reply

    def to_json(self) -> dict[str, Any]:
        """Its fields but `frames`."""
        return {name: value for name, value in _plain(self).items() if name != "frames"}

    @classmethod
    def from_json(cls: type[_T], made: Mapping[str, Any]) -> _T:
        """The inverse of `to_json`.

        Raises:
            ValueError: a field is missing, unknown or of another type; the message names it.
        """
        return read(cls, made)


_KINDS: dict[str, type[Message]] = {}


class Request(Message, Generic[R]):
    """A message whose sender waits for a reply of type `R`."""


@dataclass(frozen=True)
class Done:
    """The reply that says only that the request was carried out."""


class Replies(dict[int, R], Generic[R]):
    """rank -> its reply to a request; filled as they arrive.

    Attributes:
        errors: rank -> why it has no reply, of those that answered with an error.
        received_ns: rank -> when its answer arrived, on this host's monotonic clock.
    """

    def __init__(self, ranks: Iterable[int], kind: type[R]) -> None:
        super().__init__()
        self.errors: dict[int, str] = {}
        self.received_ns: dict[int, int] = {}
        self._kind = kind
        self.missing = set(ranks)

    def take(self, rank: int, message: Mapping[str, Any], now_ns: int) -> None:
        """Takes an answer.

        Raises:
            ValueError: it is malformed; then it counts as an error of the rank.
        """
        self.missing.discard(rank)
        self.received_ns[rank] = now_ns
        if (error := message.get("error")) is not None:
            self.errors[rank] = str(error)
            return
        try:
            self[rank] = read(self._kind, message["reply"])
        except ValueError as wrong:
            self.errors[rank] = f"its reply is malformed: {wrong}"
            raise


def encode(message: Message, number: int | None = None) -> list[bytes]:
    """The frames of a message.

    Args:
        message: the message.
        number: of the request, which the reply repeats; None: no reply is expected.
    """
    envelope = {"op": type(message).__name__, "id": number, "fields": message.to_json()}
    return [json.dumps(envelope).encode(), *message.frames]


def decode(frames: Sequence[bytes]) -> tuple[Message | ValueError, int | None]:
    """The inverse of `encode`; an error in place of a message that is unknown or malformed, but says which it is.

    Raises:
        ValueError: it is not even the envelope of a message.
    """
    envelope = json.loads(frames[0])
    sound = isinstance(envelope, dict) and isinstance(envelope.get("op"), str)
    if not sound or not isinstance(envelope.get("id"), int | None):
        raise ValueError(f"not a message: {_shown(frames[0])}")
    op, number = envelope["op"], envelope["id"]
    kind = _KINDS.get(op)
    if kind is None:
        return ValueError(f"there is no message {_shown(op)}"), number
    try:
        message = kind.from_json(envelope.get("fields", {}))
    except ValueError as error:
        return error, number
    if len(frames) > 1:
        if "frames" not in kind.__dataclass_fields__:  # type: ignore[attr-defined]
            return ValueError(f"the message {op} has no data, and came with {len(frames) - 1} frames"), number
        message = replace(message, frames=tuple(frames[1:]))  # type: ignore[type-var]
    return message, number


def plain(record: Any) -> dict[str, Any]:
    """A reply, or another record of this module, as JSON has it."""
    made: dict[str, Any] = _plain(record)
    return made


def read(kind: type[_T], made: Any, *, strict: bool = True) -> _T:
    """The inverse of `plain`: a record of this type.

    Args:
        kind: a dataclass.
        made: what JSON has.
        strict: whether other entries are an error.

    Raises:
        ValueError: a field is missing, unknown or of another type; the message names it.
    """
    if not isinstance(made, Mapping):
        raise ValueError(f"{kind.__name__} is {_shown(made)}, not an object")
    values: dict[str, Any] = {}
    hints = _hints(kind)  # type: ignore[arg-type]
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name in made:
            values[one.name] = _built(hints[one.name], made[one.name], f"{kind.__name__}.{one.name}")
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    unknown = [str(name) for name in made if name not in known] if strict else []
    if unknown:
        raise ValueError(f"{kind.__name__} has no {unknown[0][:_SHOWN]!r}")
    try:
        return kind(**values)
    except TypeError:
        missing = [one.name for one in fields(kind) if one.name not in made]  # type: ignore[arg-type]
        raise ValueError(f"{kind.__name__} lacks {', '.join(missing)}") from None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _plain(value: Any) -> Any:
    if isinstance(value, Fault):
        return fault_to_dict(value)
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value) if one.name != "frames"}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple | set | frozenset) else value


def _built(hint: Any, value: Any, where: str) -> Any:
    """The value of a field of this type."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return value
    if kind in (Union, types.UnionType):
        return _one_of(inner, value, where)
    if kind is Fault and isinstance(value, dict):
        try:
            return fault_from_dict(value)
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from None
    if is_dataclass(kind):
        return read(kind, value)  # type: ignore[arg-type]
    if kind is tuple and inner[-1] is not Ellipsis and isinstance(value, list) and len(value) == len(inner):
        return tuple(_built(one, entry, where) for one, entry in zip(inner, value, strict=True))
    if kind in (Sequence, tuple) and isinstance(value, list) and (kind is Sequence or inner[-1] is Ellipsis):
        return tuple(_built(inner[0], entry, where) for entry in value)
    if kind is Mapping and isinstance(value, dict):
        return {_key(inner[0], name, where): _built(inner[1], entry, where) for name, entry in value.items()}
    if kind is float and type(value) is int:
        return value
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{where} is {_shown(value)}, not {getattr(kind, '__name__', kind)}")


def _one_of(hints: Sequence[Any], value: Any, where: str) -> Any:
    """The value as the first type that fits."""
    if value is None and type(None) in hints:
        return None
    errors = []
    for hint in hints:
        if hint is not type(None):
            try:
                return _built(hint, value, where)
            except ValueError as error:
                errors.append(error)
    raise errors[0]


def _key(hint: Any, name: str, where: str) -> Any:
    if hint is not int:
        return name
    try:
        return int(name)
    except ValueError:
        raise ValueError(f"{where} has the key {_shown(name)}, not a number") from None


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN]


# ---- cells ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellText:
    """A cell's text and its place in the notebook.

    Attributes:
        text: the text below the line of the magic.
        first_line: line number of the text's first line in the cell, for tracebacks.
        name: under which the cell's result is kept; "" for none.
        above: the notebook's cell above the text, by which a debugger knows the cell; "" if unknown.
    """

    text: str
    first_line: int = 1
    name: str = ""
    above: str = ""


@dataclass(frozen=True)
class Cell(Message):
    """Run a cell's text, or call a function as a cell.

    Attributes:
        id: of the cell run; a rank refuses one that it has run.
        label: the cell's name in tracebacks, e.g. ``"%%distributed [3]"``.
        text: what to run; None: the function.
        function: which the rank imports; its pickled arguments are in `frames`, see `arguments`.
        after: id -> label of cells that may run before it. If one of them fails on a rank, this one is not run there.
        sources: file name -> text, for tracebacks of a function that was defined on the client.
        frames: see `function`.
    """

    id: str
    label: str
    text: CellText | None = None
    function: RankFunction | None = None
    after: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    frames: tuple[bytes, ...] = ()


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, ...]:
    """A function's arguments as a `Cell` or a `Call` has them in its frames."""
    buffers: list[pickle.PickleBuffer] = []
    called = pickle.dumps((tuple(args), dict(kwargs)), protocol=5, buffer_callback=buffers.append)
    return called, *map(bytes, buffers)


@dataclass(frozen=True)
class Call(Message):
    """Call a function between two cells.

    Attributes:
        id: what the report refers to.
        function: which the rank imports.
        frames: its pickled arguments.
    """

    id: str
    function: RankFunction
    frames: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class CommMessage(Message):
    """What a page says to a widget of the rank.

    Attributes:
        type: ``"comm_msg"`` or ``"comm_close"``.
        content: Jupyter's.
        metadata: Jupyter's.
        frames: buffers.
    """

    type: str
    content: Mapping[str, Any]
    metadata: Mapping[str, Any]
    frames: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Question:
    """A rank's `input()`, among the outputs of its cell.

    Attributes:
        number: which the answer repeats.
        prompt: shown to the user.
        secret: whether what is typed stays hidden.
    """

    number: int
    prompt: str
    secret: bool


@dataclass(frozen=True)
class InputAnswer(Message):
    """The answer to a `Question`.

    Attributes:
        number: the question's.
        text: what the user has typed.
        error: why there is no answer; "" if there is one.
    """

    number: int
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class CellReport:
    """How a cell, or a call, ended on a rank.

    Attributes:
        ok: whether it succeeded.
        kind: the type's name of its value.
        blob: the pickled value; None: not sent.
        unsent: why the value can't be sent; "" otherwise.
        name: the exception's class, of one that failed.
        message: the exception's.
        traceback: its lines.
        brief: the same without the frames of libraries in between.
        time_ns: when it was raised, on the host's monotonic clock.
        consequence: whether it only followed another rank's failure.
        waited_in: what the rank waited in when its collective failed, in words.
        broke_backward: whether a model's backward was in progress.
    """

    ok: bool
    kind: str = ""
    blob: bytes | None = None
    unsent: str = ""
    name: str = ""
    message: str = ""
    traceback: Sequence[str] = ()
    brief: Sequence[str] = ()
    time_ns: int = 0
    consequence: bool = False
    waited_in: str = ""
    broke_backward: bool = False


@dataclass(frozen=True)
class RequestFailure:
    """A cell or call of which not the user's code failed but what runs it: the exception."""

    name: str
    message: str
    traceback: str


def report_frames(report: CellReport | RequestFailure) -> list[bytes]:
    """The frames of a rank's last word on a cell or call."""
    blob = memoryview(b"")
    if isinstance(report, CellReport):
        blob, report = memoryview(report.blob or b""), replace(report, blob=None)
    pieces = [bytes(blob[start : start + _PIECE]) for start in range(0, len(blob), _PIECE)]
    return [json.dumps({type(report).__name__: _plain(report)}).encode(), *pieces]


def report_of(frames: Sequence[bytes]) -> CellReport | RequestFailure:
    """The inverse of `report_frames`.

    Raises:
        ValueError: it is malformed.
    """
    made = json.loads(frames[0])
    if isinstance(made, dict) and RequestFailure.__name__ in made:
        return read(RequestFailure, made[RequestFailure.__name__])
    report = read(CellReport, made.get(CellReport.__name__) if isinstance(made, dict) else made)
    return replace(report, blob=b"".join(frames[1:]) or None)


# ---- what ranks do ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interrupt(Message):
    """End these cells, or do not begin them."""

    cells: Sequence[str]


@dataclass(frozen=True)
class Unblock(Message):
    """Shut the process groups down: a rank has failed that they wait for.

    Attributes:
        by: the rank that failed.
        cell: during which; None for whichever runs.
    """

    by: int
    cell: str | None


@dataclass(frozen=True)
class PeerFailed(Message):
    """A cell has failed on a rank that others may wait for.

    Attributes:
        cell: which.
        by: the rank.
        entered: group -> how many collectives it had entered: more of them can't end.
    """

    cell: str
    by: int
    entered: Mapping[str, int]


@dataclass(frozen=True)
class Status:
    """What a rank says of itself whenever it changes.

    Attributes:
        state: ``"running"`` a cell, ``"idle"``, or ``"unblocked"``: its groups were shut down.
        cell: the id of the cell that runs.
        ended: the last cell whose own code ended here, and whether it failed.
        entered: of one that failed: group -> how many collectives this rank has entered.
        unblocked: the cell during which its groups were shut down.
        whole: whether its groups are intact.
    """

    state: str
    cell: str | None = None
    ended: tuple[str, bool] | None = None
    entered: Mapping[str, int] = field(default_factory=dict)
    unblocked: str | None = None
    whole: bool = True


@dataclass(frozen=True)
class Settled:
    """Whether a rank's groups are intact, and how far it is.

    Attributes:
        whole: whether they are.
        cell: id of the running cell.
        sequences: group -> how many collectives it has entered.
        in_flight: how many of them have not ended.
    """

    whole: bool
    cell: str | None
    sequences: Mapping[str, int]
    in_flight: int


@dataclass(frozen=True)
class Settle(Request[Settled]):
    """A cell (None: each) has ended on all ranks: shut no group down for it any more."""

    cell: str | None = None


@dataclass(frozen=True)
class Activity:
    """What a rank does.

    Attributes:
        state: as `Status.state`.
        cell: id of the running cell; of a rank that runs a script, ``"script"``.
        last: id of the cell that ended last.
        broken_by: why its groups were shut down: it ``"failed"``, was ``"interrupted"``, or ``"rank 1"`` failed; "" if
            they were not.
        stack: of its main thread, if that was asked for.
    """

    state: str
    cell: str | None
    last: str | None = None
    broken_by: str = ""
    stack: Sequence[str] = ()


SCRIPT = "script"
"""In the place of a cell's id: the rank runs a script."""


@dataclass(frozen=True)
class Ping(Request[Activity]):
    """Say what you do; with your main thread's stack."""

    stack: bool = False


@dataclass(frozen=True)
class OldestFlight:
    """The oldest collective in flight of a rank.

    Attributes:
        name: e.g. ``"all_reduce"``.
        number: on its group.
        bytes: of its tensors.
        seconds: since it was launched.
        bucket: which bucket it carries, in words; "" if none.
    """

    name: str
    number: int
    bytes: int
    seconds: float
    bucket: str


@dataclass(frozen=True)
class InFlight:
    """How many collectives of a rank have not ended, and the oldest of them."""

    count: int = 0
    oldest: OldestFlight | None = None


@dataclass(frozen=True)
class GpuUse:
    """Use of a rank's whole GPU, by all processes; None: the driver does not report it.

    Attributes:
        used: bytes.
        total: bytes.
        percent: share of about the last second in which it was busy.
    """

    used: int | None
    total: int | None
    percent: int | None


@dataclass(frozen=True)
class Health(Activity):
    """An `Activity` with what a table of the ranks shows.

    Attributes:
        label: of the running cell.
        seconds: since it began.
        in_flight: its collectives in flight.
        gpu: None without one.
    """

    label: str | None = None
    seconds: float | None = None
    in_flight: InFlight = field(default_factory=InFlight)
    gpu: GpuUse | None = None


@dataclass(frozen=True)
class GetHealth(Request[Health]):
    """Say how you are."""


@dataclass(frozen=True)
class Examination:
    """What a rank does, in detail.

    Attributes:
        state: as `Status.state`, or ``"lost"`` of a script that has failed.
        snapshot: the value of `ddp_lab.diagnosis.on_rank.examine.examine`.
        debugged: whether a debugger has stopped it.
        why: how a script failed.
        rank: of a script's process.
        pid: of a script's process.
        job: of a script's process, see `ddp_lab.diagnosis.sources.script.Job`.
    """

    state: str
    snapshot: Mapping[str, Any]
    debugged: bool = False
    why: str = ""
    rank: int | None = None
    pid: int = 0
    job: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Examine(Request[Examination]):
    """Say in detail what you do; with the collectives that torch has recorded, or without."""

    whole: bool = True


@dataclass(frozen=True)
class CallSite:
    """Where the user's code entered a collective; "" if unknown."""

    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class FindCallSite(Request[CallSite]):
    """Say where your code entered the collective of this number on this group."""

    group: str
    number: int


@dataclass(frozen=True)
class HostTime:
    """The time on the rank's monotonic clock, in nanoseconds."""

    ns: int


@dataclass(frozen=True)
class GetTime(Request[HostTime]):
    """Say what time it is."""


@dataclass(frozen=True)
class LastCell:
    """The cell that a rank began last.

    Attributes:
        id: of the cell run.
        label: its name.
        began: when, in seconds since the epoch.
        ended: when; None while it runs.
        error: its exception in words; "" if it did not fail.
    """

    id: str
    label: str
    began: float
    ended: float | None = None
    error: str = ""


@dataclass(frozen=True)
class RankDescription:
    """A rank's last cell.

    Attributes:
        cell: None if it has run none.
        text: the end of what the cell printed.
        now: the time, in seconds since the epoch.
    """

    cell: LastCell | None
    text: str
    now: float


@dataclass(frozen=True)
class DescribeRank(Request[RankDescription]):
    """Another client has attached: begin anew for it, and describe yourself."""


@dataclass(frozen=True)
class GetLastCell(Request[RankDescription]):
    """Describe yourself."""


# ---- the notebook's help -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Completions:
    """Pairs of a name and ``"module"``, ``"class"``, ``"function"`` or ``"instance"``; or why there are none."""

    matches: Sequence[tuple[str, str]] = ()
    error: str = ""


@dataclass(frozen=True)
class Complete(Request[Completions]):
    """Complete a name, or an attribute."""

    text: str


@dataclass(frozen=True)
class Page:
    """What the rank knows of a name: pairs of title and text; None: it could not look in time, or the error."""

    sections: Sequence[tuple[str, str]] | None = None
    error: str = ""


@dataclass(frozen=True)
class LookUp(Request[Page]):
    """Describe a name; with its source, or without."""

    text: str
    source: bool = False


@dataclass(frozen=True)
class DebuggerState:
    """Of a rank's debugger: why it can't be opened ("" if it can), and whether it is open."""

    problem: str = ""
    is_open: bool = False


@dataclass(frozen=True)
class OpenDebugger(Request[DebuggerState]):
    """Begin to debug.

    Attributes:
        name: the client's of this debugger; replies and events refer to it.
        prefix: what the client's front end puts before a cell's hash.
    """

    name: str
    prefix: str


@dataclass(frozen=True)
class DebugRequest(Message):
    """A front end's request of the Debug Adapter Protocol; a `DebugReply` answers it."""

    name: str
    number: int
    request: Mapping[str, Any]


@dataclass(frozen=True)
class DebugReply:
    """The rank's reply to a `DebugRequest`."""

    number: int
    reply: Mapping[str, Any]


@dataclass(frozen=True)
class HoldDebugTimeouts(Request[DebuggerState]):
    """Keep the timeouts of process groups from expiring while a rank is debugged, or no longer."""

    on: bool


@dataclass(frozen=True)
class GetDebugger(Request[DebuggerState]):
    """Say whether the debugger of this name is open."""

    name: str


@dataclass(frozen=True)
class CloseDebugger(Request[DebuggerState]):
    """End the debugger of this name."""

    name: str


# ---- training models ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class InspectGradients(Message):
    """Describe norm and checksum of a model's averaged gradients at a step; the model is the rank's own number."""

    reducer: int
    step: int


@dataclass(frozen=True)
class EventCost:
    """The measured cost of one event in nanoseconds."""

    ns: float | None


@dataclass(frozen=True)
class MeasureEventCost(Request[EventCost]):
    """Measure what an event costs."""


@dataclass(frozen=True)
class Change:
    """The requested change. None: unchanged.

    Attributes:
        bucket_cap_mb: size limit of all buckets in MiB; of all but the first if `first_bucket_mb` is given.
        first_bucket_mb: size limit of the bucket that is launched first.
        bucket_cap_mb_list: size limits in the order of launch, the last one repeats; excludes the other two.
        order: ``"ready"`` (as rank 0's gradients became ready last), ``"registration"``, ``"reversed"``, or the names
            of all trained parameters.
        comm_hook: a name, see `ddp_lab.parallel.live.change`; ``"none"`` for the plain average.
    """

    bucket_cap_mb: float | None = None
    first_bucket_mb: float | None = None
    bucket_cap_mb_list: Sequence[float] | None = None
    order: str | Sequence[str] | None = None
    comm_hook: str | None = None

    def text(self) -> str:
        """JSON, the same for equal changes."""
        return json.dumps(asdict(self), sort_keys=True)

    def words(self) -> str:
        """For a mark on the timeline."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if not isinstance(given.get("order", ""), str):
            given["order"] = "as given"
        return "reconfigured: " + ", ".join(f"{name}={value}" for name, value in given.items())


@dataclass(frozen=True)
class MonitoringRequest:
    """The requested monitoring. None: unchanged; 0: off.

    Attributes:
        gradients: monitor the gradients at this interval of steps.
        drift: compare the replicas at this interval of steps.
        check: compare them once.
    """

    gradients: int | None = None
    drift: int | None = None
    check: bool = False

    def validate(self) -> None:
        """Raises `ValueError` if it is invalid."""
        for every in (self.gradients, self.drift):
            if every is not None and every < 0:
                raise ValueError(f"every must be at least 0 (0: off), got {every}")


@dataclass(frozen=True)
class ModelRequest(Request[R]):
    """A request about one model.

    Attributes:
        reducers: rank -> that rank's number of the model.
    """

    reducers: Mapping[int, int] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class CheckChange(ModelRequest[Done]):
    """Check whether the model can be changed so: an error if not."""

    change: Change


@dataclass(frozen=True)
class PrepareChange(ModelRequest[Done]):
    """Change the model between two steps that rank 0 of its group decides; `name` identifies the request."""

    name: str
    change: Change


@dataclass(frozen=True)
class ChangeState:
    """The state of a change on a rank.

    Attributes:
        state: ``"waiting"`` (for a forward), ``"decided"``, ``"applied"`` or ``"dropped"``.
        at: of a decided one: after how many backwards it is applied.
        step: of an applied one: index of the first step with it.
        after: of an applied one: after how many backwards it was.
        generation: of an applied one: version of the bucket layout.
    """

    state: str
    at: int | None = None
    step: int = 0
    after: int = 0
    generation: int = 0


@dataclass(frozen=True)
class GetChange(ModelRequest[ChangeState]):
    """Return the state of that change."""

    name: str


@dataclass(frozen=True)
class Withdrawal:
    """Whether the change was withdrawn in time."""

    withdrawn: bool


@dataclass(frozen=True)
class WithdrawChange(ModelRequest[Withdrawal]):
    """Withdraw the change, unless it is decided."""

    name: str


@dataclass(frozen=True)
class PrepareMonitoring(ModelRequest[Done]):
    """Monitor values from a step on that rank 0 of the model's group decides."""

    name: str
    monitoring: MonitoringRequest


@dataclass(frozen=True)
class Monitoring:
    """The active monitoring: intervals in steps (0: off), and how many requests are pending."""

    gradients: int
    drift: int
    pending: int


@dataclass(frozen=True)
class GetMonitoring(ModelRequest[Monitoring]):
    """Return the active monitoring."""


@dataclass(frozen=True)
class FaultNumber:
    """The number of a fault on its rank; None: it is not that rank's."""

    number: int | None


@dataclass(frozen=True)
class InjectFault(ModelRequest[FaultNumber]):
    """Inject a fault from the next forward on."""

    fault: Fault


@dataclass(frozen=True)
class SetBreakpoints(ModelRequest[Done]):
    """Pause the model's backwards at these points; see `TrainingControl.breakpoints`."""

    points: Sequence[str]
    parameters: Sequence[str]
    buckets: Sequence[int]


@dataclass(frozen=True)
class Continue(ModelRequest[Done]):
    """End a pause, `until` the next "breakpoint", "event" or "bucket"."""

    until: str


@dataclass(frozen=True)
class Pause:
    """Where a backward is paused.

    Attributes:
        point: ``"gradient_ready"``, ``"bucket_ready"``, ``"launched"`` or ``"reduced"``.
        since_ns: when the pause began, on the host's monotonic clock.
        parameter: whose gradient, at ``"gradient_ready"``.
        bucket: which bucket, at the other points.
    """

    point: str
    since_ns: int
    parameter: str | None = None
    bucket: int | None = None


@dataclass(frozen=True)
class BucketStage:
    """One bucket in the middle of a backward.

    Attributes:
        state: ``"pending"``, ``"ready"``, ``"launched"`` or ``"reduced"``.
        arrived: gradients that have arrived.
        of: gradients that it holds.
        missing: names of those that have not arrived.
    """

    state: str
    arrived: int
    of: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """The state of a model's backward on a rank.

    Attributes:
        step: index of the running, or next, synchronised backward.
        generation: version of the bucket layout.
        in_flight: whether a backward is in progress.
        finalizing: whether all buckets are launched and the backward waits for them.
        paused: where it is paused; None: it is not.
        armed: whether it has breakpoints.
        ended: why they were removed, if not on request; until it trains again.
        buckets: in the order of launch.
    """

    step: int
    generation: int
    in_flight: bool
    finalizing: bool
    paused: Pause | None
    armed: bool
    ended: str
    buckets: tuple[BucketStage, ...]


@dataclass(frozen=True)
class GetStage(ModelRequest[Stage]):
    """Return the state of the model's backward."""


@dataclass(frozen=True)
class Faults:
    """The faults of a rank: the fields of each, its ``number``, and whether it has ``begun``."""

    faults: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class GetFaults(Request[Faults]):
    """Return the faults of all models of the rank."""


@dataclass(frozen=True)
class ClearFaults(Request[Done]):
    """End the fault of this number, or for None all of the rank."""

    number: int | None = None


@dataclass(frozen=True)
class HoldTimeouts(Request[Done]):
    """Keep group timeouts from expiring while a rank is paused."""


@dataclass(frozen=True)
class Resume(Request[Done]):
    """Remove all breakpoints of the rank and continue training."""
