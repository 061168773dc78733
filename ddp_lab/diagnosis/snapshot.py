"""The state that a rank reports when it is examined: where it is, what it waits in, how far its backwards are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..formatting import enumeration, label_of, line_name, names, size
from ..protocol.messages import BucketStage
from .collectives_in_flight import GroupFlights, on_group, open_words

__all__ = ["COMPILERS", "IMPORT", "UNNAMED", "BucketStage", "Call", "Model", "Place", "RankSnapshot", "Steps", "label"]

COMPILERS = ("torch/_dynamo/", "torch/_inductor/")  # in the paths of their files
IMPORT = "<frozen importlib._bootstrap>"
UNNAMED = "a collective"
"""The name of one whose work does not tell, as some of Gloo's do not: those of `fully_shard`, for example."""


@dataclass(frozen=True)
class Place:
    """One frame of a rank's main thread.

    Attributes:
        file: as Python names it; of a cell ``"<cell %%distributed [3]>"``.
        line: number in the file.
        function: qualified name.
        text: the part of the line that is being executed.
        users: whether it is the user's own code.
    """

    file: str
    line: int
    function: str
    text: str
    users: bool

    def __str__(self) -> str:
        return line_name(self.file, self.line)


@dataclass(frozen=True)
class Call:
    """A function of torch.distributed from which a rank has not returned.

    Attributes:
        name: e.g. ``"all_reduce"``.
        kind: ``"collective"``, ``"point to point"`` or ``"group"`` (one is being created).
        group: name of the group.
        ranks: its global ranks.
        what: types and shapes of the tensors.
        bytes: their size.
        peer: source or destination, a global rank; None if there is none.
        sequence: how many collectives this rank has entered on the group, this one included; None if unknown.
        description: of the group, as its maker gave it, e.g. ``"mesh_dp"``; "" if there is none.
        members: of the group that is being created, if they are known; `ranks` are those that must take part.
        joins: of ``init_process_group``, as which rank, and of how many; empty if unknown.
        address: of ``init_process_group``, where it looks for the others; "" if the launcher says it.
        module: whose parameters `fully_shard` gathers or reduces with it; "" if it is none of its collectives.
    """

    name: str
    kind: str
    group: str
    ranks: tuple[int, ...]
    what: str
    bytes: int
    peer: int | None
    sequence: int | None
    description: str = ""
    members: tuple[int, ...] = ()
    joins: tuple[int, ...] = ()
    address: str = ""
    module: str = ""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Call:
        """From the rank's answer (`ddp_lab.diagnosis.on_rank.examine`)."""
        return cls(**{**answer, **{name: tuple(answer.get(name, ())) for name in ("ranks", "members", "joins")}})

    def __str__(self) -> str:
        number = f" #{self.sequence}" if self.sequence is not None and self.kind == "collective" else ""
        of_bytes = f" of {size(self.bytes)} ({self.what})" if self.what else ""
        if self.kind == "point to point":
            whom = "" if self.peer is None else f" {'from' if 'recv' in self.name else 'to'} rank {self.peer}"
            any_rank = self.name == "recv" and self.group  # without a group its arguments are not known
            return f"{self.name}{whom or (' from any rank' if any_rank else '')}"
        if self.joins:
            return f"{self.name} as rank {self.joins[0]} of {self.joins[1]}{self.address and f' at {self.address}'}"
        root = f" with root {self.peer}" if self.peer is not None else ""
        carried = f" for {self.module}" if self.module else ""
        return f"{self.name}{number}{of_bytes}{carried}{on_group(self.description, self.ranks)}{root}"


@dataclass(frozen=True)
class Steps:
    """The steps of a model on one rank.

    Attributes:
        module: class of the model.
        backwards: synchronised backwards that have begun.
        ended: those that have ended.
        forwards: step -> forwards that have ended for it.
    """

    module: str
    backwards: int
    ended: int
    forwards: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A wrapped model of the rank.

    Attributes:
        reducer: the rank's number of it.
        module: its class.
        step: index of the running, or next, synchronised backward.
        in_flight: whether a backward has begun and not ended.
        finalizing: whether all buckets are launched and the backward waits for them.
        paused: the breakpoint at which it is paused; "" if it is not.
        buckets: in the order of launch.
        forwards: step -> synchronised forwards that have ended for it, of the last steps.
    """

    reducer: int
    module: str
    step: int
    in_flight: bool
    finalizing: bool
    paused: str
    buckets: tuple[BucketStage, ...]
    forwards: Mapping[int, int] = field(default_factory=dict)

    @property
    def steps(self) -> Steps:
        """How far the rank has come with it."""
        return Steps(self.module, self.step + self.in_flight, self.step, self.forwards)

    @property
    def waits_for(self) -> int | None:
        """The first bucket that is launched and not yet reduced."""
        return next((number for number, one in enumerate(self.buckets) if one.state == "launched"), None)

    @property
    def missing(self) -> list[str]:
        """Parameters whose gradients a backward that has begun still lacks."""
        return [name for one in self.buckets for name in one.missing] if self.in_flight else []


@dataclass(frozen=True)
class RankSnapshot:
    """One rank.

    Attributes:
        rank: its rank.
        state: ``"running"`` a cell, ``"idle"``, ``"unblocked"``, ``"silent"`` (unresponsive), ``"stopped"`` (by a
            signal), ``"lost"`` (its process exited), ``"missing"`` (no process of the script has come as this rank),
            ``"cut off"`` (its node does not answer) or ``"recorded"`` (only the dump of its Flight Recorder is known).
        why: of a lost one, how it ended; of a stopped one, the command that resumes it; of a missing one, what the
            processes do that it could be; of one that is cut off, who does not answer; of a recorded one, what its
            dump says.
        label: of the running cell.
        asked: whether the cell was sent to this rank.
        seconds: since the cell began here.
        stack: frames of the main thread, innermost first.
        call: the function of torch.distributed in which it is.
        sequences: group -> collectives entered.
        models: the wrapped ones.
        flights: the collectives that it has entered, by group.
        last_cell: id of the running cell, or of the last one.
        debugged: whether it is stopped in the visual debugger.
        entered_at: where it entered the collective that is not the same on all ranks, if that is known.
        runs: what it runs: ``"cell"`` or ``"script"``.
    """

    rank: int
    state: str
    why: str = ""
    label: str = ""
    asked: bool = True
    seconds: float = 0.0
    stack: tuple[Place, ...] = ()
    call: Call | None = None
    sequences: Mapping[str, int] = field(default_factory=dict)
    models: tuple[Model, ...] = ()
    flights: tuple[GroupFlights, ...] = ()
    last_cell: str | None = None
    entered_at: Place | None = None
    debugged: bool = False
    runs: str = "cell"

    @classmethod
    def of(cls, rank: int, state: str, answer: Mapping[str, Any], **more: Any) -> RankSnapshot:
        """From the rank's answer (`ddp_lab.diagnosis.on_rank.examine`)."""
        call = answer["call"]
        return cls(
            rank=rank,
            state=state,
            seconds=float(answer["seconds"]),
            stack=tuple(Place(**one) for one in answer["stack"]),
            call=Call.of(call) if call else None,
            sequences=dict(answer["sequences"]),
            models=tuple(_model(one) for one in answer["models"] if "error" not in one),
            flights=tuple(GroupFlights.of(one) for one in answer.get("flights", ())),
            last_cell=answer.get("last_cell"),
            debugged=bool(answer.get("debugger")),
            entered_at=Place(**answer["entered_at"]) if answer.get("entered_at") else None,
            **more,
        )

    @classmethod
    def of_script(cls, told: Mapping[str, Any]) -> RankSnapshot:
        """Of a rank of a script: from ``rank``, ``state``, ``why``, and its answer if it has answered."""
        rank, state, why = told["rank"], told["state"], told.get("why", "")
        if "call" not in told:
            return cls(rank, state, why=why, runs="script")
        return cls.of(rank, state, told, why=why, runs="script")

    @property
    def how_it_ended(self) -> str:
        """Of a lost one, e.g. ``"killed by SIGKILL (signal 9)"``, to follow "failed: "."""
        return self.why.removeprefix("was ")

    @property
    def place(self) -> Place | None:
        """The innermost line of the user's own."""
        return next((one for one in self.stack if one.users), None)

    @property
    def paused(self) -> Model | None:
        """The model that is paused at a breakpoint."""
        return next((one for one in self.models if one.paused), None)

    @property
    def bucket(self) -> tuple[Model, int] | None:
        """The model whose backward waits for its buckets, and the first of these that is not reduced."""
        if self.state != "running" or self.call is not None:
            return None
        for model in self.models:
            if model.finalizing and model.waits_for is not None:
                return model, model.waits_for
        return None

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.state == "running" and not self.debugged and (self.call is not None or self.bucket is not None)

    @property
    def in_flight(self) -> str:
        """E.g. ``"2, oldest all_reduce #18 of 4 MiB for 3.2 s"``: launched collectives that have not ended; or ""."""
        return open_words(self.flights)

    @property
    def waits_in(self) -> str:
        """What it waits in; "" if it does not wait."""
        if self.call is not None:
            return str(self.call)
        if self.bucket is None:
            return ""
        model, number = self.bucket
        return f"the backward, for bucket {number} of {model.module}"

    @property
    def prepares(self) -> bool:
        """Whether it imports or compiles, which ends by itself."""
        return self.within(*COMPILERS, IMPORT)

    def within(self, *names_: str) -> bool:
        """Whether one of the functions of these names, or of files whose path holds one of them, is on the stack."""
        return any(name == one.function.rpartition(".")[2] or name in one.file for one in self.stack for name in names_)

    def __str__(self) -> str:
        """What it does, to follow "rank 1 "."""
        if self.state == "lost":
            return f"failed: {self.how_it_ended}"
        if self.state == "stopped":
            return f"is stopped (SIGSTOP): `{self.why}` resumes it"
        if self.state == "missing":
            return "has not joined"
        if self.state == "silent":
            return "is unresponsive: a C call may be holding the GIL"
        if self.state == "cut off":
            return f"is cut off: {self.why}"
        if self.state == "recorded":
            return self.why
        if self.state != "running":
            return "is not running a cell" if self.runs == "cell" else f"has finished the {self.runs}"
        at = f" at {self.place}" if self.place is not None else ""
        if self.debugged:
            return f"is stopped in the debugger{at}"
        if self.paused is not None:
            return f"is paused at a breakpoint ({self.paused.paused}){at}"
        if self.call is not None:
            return f"waits in {self.call}{at}"
        if self.bucket is not None:
            return f"waits for bucket {self.bucket[1]} of {self.bucket[0].module}{at}"
        model = next((one for one in self.models if one.missing and self.within("_engine_run_backward")), None)
        if model is not None:
            return f"is computing a backward that still lacks {names(model.missing)}{at}"
        doing = self.place or (self.stack[0] if self.stack else None)
        if doing is None:
            return "is busy"
        return f"is in `{doing.text or f'{doing.function}()'}`{at}"


_MANY = 4


def _model(answer: Mapping[str, Any]) -> Model:
    pause = answer["paused"]
    where = ""
    if pause:
        about = pause.get("parameter") or (f"bucket {pause['bucket']}" if pause.get("bucket") is not None else "")
        where = f"{pause['point'].replace('_', ' ')}: {about}"
    buckets = tuple(BucketStage(**{**one, "missing": tuple(one["missing"])}) for one in answer["buckets"])
    known = {name: answer[name] for name in ("reducer", "module", "step", "in_flight", "finalizing")}
    return Model(**known, paused=where, buckets=buckets, forwards=dict(answer.get("forwards", ())))


def label(ranks: Iterable[int]) -> str:
    """``"rank 0"``, ``"ranks 0 and 2"``, or of many ``"ranks 0–6, 9"``."""
    ordered = [str(rank) for rank in sorted(ranks)]
    if len(ordered) > _MANY:
        return label_of(map(int, ordered))
    return f"rank{'s' if len(ordered) > 1 else ''} {enumeration(ordered)}"
