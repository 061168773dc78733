"""Why a run ended before its end: from what each rank entered last, and from how it ended.

[Note: what came first in a crash]
Gloo ends ranks that enter different collectives, or the same with different sizes, before anybody waits; a rank whose
peer has gone gets an error of the connection. Such ends are consequences. So the causes are sought in this order: the
first collective that is not the same on all ranks of its group; a rank that failed with an error of its own, was
killed, or had finished the program or exited, while others had entered what it never entered.

What a rank did since which step is read from its forwards: a step in which it made more of them than another rank is
one whose backward it left out.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..formatting import enumeration, size
from .mismatch import count_backwards, left_out_backward
from .rules import BUFFERS_ARE_BROADCAST, CALLED_ALONE, SAME_CALLS, SAME_STEPS, SAME_TENSORS, SKIP, Diagnosis
from .snapshot import Steps, label

__all__ = ["BUFFERS", "Entered", "Failure", "Group", "RankAtEnd", "diagnose_crash", "first_sentence"]
__all__ += ["unregistered_method", "without_noise"]

BUFFERS = "the buffers"
"""What a broadcast is for."""
FINISHED, EXITED, FAILED, KILLED, ENDED, RUNNING = "finished", "exited", "failed", "killed", "ended", "running"

# Of torch's own words, and of the transports', for a peer that is gone. Python's errors of a connection are of another
# one, of a DataLoader's worker, say: they come after errors that are surely the rank's own.
_CONSEQUENCE = re.compile(
    r"DistBackendError|DistNetworkError|gloo|[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|NCCL|nccl|"
    r"[Tt]imed out|SignalException|^shm: "
)
_PYTHONS = re.compile(r"(Connection(Reset|Refused|Aborted)|BrokenPipe|Timeout)Error: ")
_NOISE = re.compile(
    r"\[enforce fail at \S+:\d+\] err == 0\. |\[/\S+?\.(cc|h):\d+\] | ?This is typically caused by .*? GLHF! \S*"
)
_SENTENCES, _PLACE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])|\s*\n"), re.compile(r" \([^()\n]*(?::| line )\d+\)$")
_SAME_BYTES = re.compile("all_reduce|broadcast|reduce$|all_gather|reduce_scatter")
_SAME_BATCHES = "All ranks must run the same number of batches: end the epoch on all of them together."
_GATHER = "Gather the lengths first and pad to the longest, or use `all_gather_object`."
_SAME_MODEL = "`fully_shard` gathers and reduces the same parameters on all ranks: build the same model on all of them."
_BUFFERS = (
    "Buffers must have the same shape on all ranks: keep what depends on the batch in no buffer, or pass "
    "broadcast_buffers=False."
)
_CONNECTING = re.compile("connectFullMesh")
_STAY = "A rank that leaves early must stay until all have joined: call `dist.barrier()` before."
_WAIT_FOR_IT = "Wait for what `isend` and `irecv` return before the program ends."
_MEMORY = "If nobody sent this signal, the host ran out of memory: see `dmesg`, or what the job's manager reports."


@dataclass(frozen=True)
class Group:
    """A process group.

    Attributes:
        title: to follow "on"; "" for the default group.
        ranks: its global ranks.
    """

    title: str
    ranks: tuple[int, ...]


_NO_GROUP = Group("", ())


@dataclass(frozen=True)
class Entered:
    """A collective that a rank entered.

    Attributes:
        name: e.g. ``"all_reduce"``.
        bytes: of a rank's part.
        dtype: e.g. ``"float32"``; "" if it has no tensor.
        place: the user's line; "" if unknown.
        function: the function of that line.
        purpose: what it is for, e.g. ``"bucket 0 of Net"`` or ``"layers.0 (forward)"``; "" if unknown.
        model: whose bucket or parameters it carries; -1 for none.
        sharded: whether it is one of `fully_shard` or `replicate`.
        peer: of a message, the rank that it is from or to; -1 for a collective.
        ended: whether it ended, without an error.
    """

    name: str
    bytes: int
    dtype: str
    place: str
    function: str
    purpose: str
    model: int
    ended: bool
    sharded: bool = False
    peer: int = -1


@dataclass(frozen=True)
class RankAtEnd:
    """A rank at the end of a run.

    Attributes:
        rank: its rank.
        state: ``"finished"`` the program; ``"exited"`` with code 0 before its end; ``"failed"`` with an error;
            ``"killed"`` by a signal; ``"ended"`` with the run; ``"running"`` still.
        how: in words.
        entered: group -> number in the group, from 1 -> collective.
        steps: model -> its steps.
        last_words: what it did last, e.g. ``"it had logged WARNING: … (train.py:31)"``; "" if unknown.
        buffers: name -> shape, of those that DistributedDataParallel has broadcast.
        messages: those that it has sent or received, or was to.
    """

    rank: int
    state: str
    how: str
    entered: Mapping[int, Mapping[int, Entered]]
    steps: Mapping[int, Steps]
    last_words: str = ""
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    messages: Sequence[Entered] = ()

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's end explains this one."""
        if self.state == FAILED:
            return _CONSEQUENCE.search(self.how) is not None and _PYTHONS.match(self.how) is None
        return self.state in (ENDED, RUNNING)


@dataclass(frozen=True)
class Failure:
    """A run that ended early, or whose ranks entered different collectives without an error.

    Attributes:
        ends: how each rank ended, in words: ``"rank 0 failed: ValueError: …"``; empty if all have finished.
        cause: what explains it; None if nothing more is known than that.
    """

    ends: tuple[str, ...]
    cause: Diagnosis | None

    @property
    def title(self) -> str:
        """Its heading in a report."""
        return "The run failed" if self.ends else "Ranks called different things"


def without_noise(error: str) -> str:
    """An error of Gloo's or of torch's allocator without source file, advice and code: none is about the program."""
    return _NOISE.sub("", error)


def first_sentence(error: str) -> str:
    """The first sentence of an error, and where it was raised: its traceback has the rest."""
    text = without_noise(error)
    place = found[0] if (found := _PLACE.search(text)) else ""
    return _SENTENCES.split(text[: len(text) - len(place)].strip(), maxsplit=1)[0] + place


def diagnose_crash(ranks: Sequence[RankAtEnd], groups: Mapping[int, Group]) -> Diagnosis | None:
    """The cause; None if what each rank has said tells all that is known. See [Note: what came first in a crash].

    Args:
        ranks: those that are known, at least one.
        groups: number -> group, of all in `entered`.
    """
    for number, group in sorted(groups.items()):
        if (found := _mismatch(ranks, number, group)) is not None:
            return found
    if all(one.state == FINISHED for one in ranks):
        return None
    own = [one for one in ranks if one.state == FAILED and not one.is_consequence]
    own.sort(key=lambda one: _PYTHONS.match(one.how) is not None)
    killed = [one for one in ranks if one.state == KILLED]
    aborted = [one for one in killed if "SIGABRT" in one.how]  # by Gloo, it may be
    finished = [one for one in ranks if one.state in (FINISHED, EXITED)]
    for culprits in (own, [one for one in killed if one not in aborted], finished, aborted):
        for number, group in sorted(groups.items()):
            if (found := _missing(ranks, culprits, number, group)) is not None:
                return found
        if (found := _without_partner(ranks, culprits)) is not None:
            return found
    if finished and (found := _never_connected(ranks, finished[0])) is not None:
        return found
    if killed:
        return Diagnosis("lost", f"{_killed(killed[0])}.", _MEMORY if "SIGKILL" in killed[0].how else "")
    return None


# ---- different collectives under one number -------------------------------------------------------------


def _mismatch(ranks: Sequence[RankAtEnd], number_of_group: int, group: Group) -> Diagnosis | None:
    by_rank = {one.rank: one.entered.get(number_of_group, {}) for one in ranks}
    for number in sorted({number for entered in by_rank.values() for number in entered}):
        calls = {rank: entered[number] for rank, entered in by_rank.items() if number in entered}
        names = {one.name for one in calls.values()}
        if len(names) > 1:
            return _different(ranks, calls, number, group)
        sizes = {(one.bytes, one.dtype) for one in calls.values()}
        if len(sizes) > 1 and _SAME_BYTES.match(names.pop()):
            return _different(ranks, calls, number, group)
    return None


def _different(ranks: Sequence[RankAtEnd], calls: Mapping[int, Entered], number: int, group: Group) -> Diagnosis:
    """The diagnosis of calls that do not fit, by what they are for."""
    by_rank = {one.rank: one for one in ranks}
    sentence = f"{_each(calls, number, group)}."
    models = {one.model for one in calls.values() if not one.sharded} - {-1}
    if len(models) == 1 and any(one.model < 0 for one in calls.values()):
        (model,) = models
        told, remedy = _counts([by_rank[rank] for rank in calls], model)
        return Diagnosis("backward", f"{sentence}{told}", remedy if remedy is SKIP else _alone(calls.values(), remedy))
    for model in {one.model for one in calls.values() if one.sharded}:
        if told := _left_out([by_rank[rank] for rank in calls], model):
            return Diagnosis("backward", f"{sentence}{told}", SKIP)
    if len({one.name for one in calls.values()}) > 1 or models or len({one.place for one in calls.values()}) > 1:
        return Diagnosis("mismatch", sentence, _alone(calls.values(), SAME_CALLS))
    name = next(iter(calls.values())).name
    if all(one.purpose == BUFFERS for one in calls.values()):
        return Diagnosis("sizes", f"{sentence}{_buffers([by_rank[rank] for rank in calls])}", _BUFFERS)
    if all(one.sharded for one in calls.values()):
        return Diagnosis("sizes", sentence, _SAME_MODEL)
    remedy = _GATHER if name.startswith("all_gather") else SAME_TENSORS
    return Diagnosis("sizes", sentence, _alone(calls.values(), remedy))


def _alone(calls: Iterable[Entered], remedy: str) -> str:
    """The remedy of different collectives: another one if the forward of a model is among them."""
    return BUFFERS_ARE_BROADCAST if any(one.purpose == BUFFERS for one in calls) else remedy


def _buffers(ranks: Sequence[RankAtEnd]) -> str:
    """The first buffer that has not the same shape on all ranks, in a sentence."""
    for name in sorted({name for one in ranks for name in one.buffers}):
        shapes: dict[str, list[int]] = {}
        for one in ranks:
            shapes.setdefault(str(list(one.buffers[name])) if name in one.buffers else "none", []).append(one.rank)
        if len(shapes) > 1:
            told = enumeration([f"{shape} on {label(who)}" for shape, who in shapes.items()])
            return f" The buffer {name} has the shape {told}."
    return ""


def _each(calls: Mapping[int, Entered], number: int, group: Group) -> str:
    """Who entered what, e.g. ``"rank 0 entered barrier #3 at a.py:4, rank 1 all_reduce #3 of 4 B at a.py:9"``."""
    functions = len({one.function for one in calls.values()}) > 1
    said: dict[str, list[int]] = {}
    for rank, call in calls.items():
        said.setdefault(_words(call, number, group, function=functions), []).append(rank)
    (first, who), *others = said.items()
    return ", ".join([f"{label(who)} entered {first}", *(f"{label(which)} {words}" for words, which in others)])


def _words(call: Entered, number: int, group: Group, *, function: bool = False) -> str:
    of_bytes = f" of {size(call.bytes)} ({call.dtype})" if call.dtype and call.name != "barrier" else ""
    purpose = f" for {call.purpose}" if call.purpose else ""
    on = f" on {group.title}" if group.title else ""
    if call.peer >= 0:
        on = f" {'from' if 'recv' in call.name else 'to'} rank {call.peer}"
    inside = f" in {call.function}()" if function and not call.function.startswith("<") and call.function else ""
    at = f" at {call.place}{inside}" if call.place else ""
    return f"{call.name}{f' #{number}' if number else ''}{of_bytes}{purpose}{on}{at}"


def _counts(ranks: Sequence[RankAtEnd], model: int) -> tuple[str, str]:
    """How many backwards each rank made, in a sentence, and the remedy."""
    steps = {one.rank: one.steps[model] for one in ranks if model in one.steps}
    if len(steps) < len(ranks):
        return "", CALLED_ALONE
    told, skipped = count_backwards(steps)
    return f" {told}", CALLED_ALONE if skipped is None else SKIP


def _left_out(ranks: Sequence[RankAtEnd], model: int) -> str:
    """The first step of a sharded model whose backward a rank left out, in a sentence."""
    told = left_out_backward({one.rank: one.steps[model] for one in ranks if model in one.steps})
    return f" {told}" if told else ""


# ---- a rank that never came -----------------------------------------------------------------------------


def _missing(
    ranks: Sequence[RankAtEnd], culprits: Sequence[RankAtEnd], number_of_group: int, group: Group
) -> Diagnosis | None:
    """The diagnosis if one of these ranks has not entered what another one entered and did not finish."""
    for culprit in culprits:
        if culprit.rank not in group.ranks:
            continue
        entered = culprit.entered.get(number_of_group, {})
        for one in ranks:
            waited = sorted(
                number
                for number, call in one.entered.get(number_of_group, {}).items()
                if number not in entered and number > max(entered, default=0) and not call.ended
            )
            if waited:
                return _of_missing(culprit, one, waited[0], one.entered[number_of_group][waited[0]], group)
    return None


def _without_partner(ranks: Sequence[RankAtEnd], culprits: Sequence[RankAtEnd]) -> Diagnosis | None:
    """The diagnosis if one of these ranks left before a message that another one waited for, or wanted to send."""
    for culprit in culprits:
        for one in ranks:
            waited = next((call for call in one.messages if call.peer == culprit.rank and not call.ended), None)
            if one.is_consequence and waited is not None:
                return _of_partner(culprit, one, waited)
    return None


def _of_partner(culprit: RankAtEnd, waiting: RankAtEnd, call: Entered) -> Diagnosis:
    then = f"rank {waiting.rank} had entered {_words(call, 0, _NO_GROUP)}."
    if culprit.state != FINISHED:
        ended = (
            _killed(culprit)
            if culprit.state == KILLED
            else f"rank {culprit.rank} ended early: {first_sentence(culprit.how)}"
        )
        return Diagnosis("lost", f"{ended}; {then}", _MEMORY if "SIGKILL" in culprit.how else "")
    own = next((one for one in culprit.messages if one.peer == waiting.rank and not one.ended), None)
    left = f" without waiting for its {_words(own, 0, _NO_GROUP)}" if own is not None else ""
    remedy = _WAIT_FOR_IT if own is not None else f"rank {culprit.rank} must make the matching call, with the same tag."
    return Diagnosis("ended", f"rank {culprit.rank} had {culprit.how}{_last(culprit)}{left}; {then}", remedy)


def _never_connected(ranks: Sequence[RankAtEnd], culprit: RankAtEnd) -> Diagnosis | None:
    """The diagnosis if a rank left while another one still connected to the ranks of a group: Gloo joins one by one."""
    for one in ranks:
        if one.state == FAILED and _CONNECTING.search(one.how):
            has = f"rank {culprit.rank} had {culprit.how}{_last(culprit)}"
            then = f"rank {one.rank} could not connect to all ranks of a group: {first_sentence(one.how)}"
            return Diagnosis("ended", f"{has}; {then}", _STAY)
    return None


def _of_missing(culprit: RankAtEnd, waiting: RankAtEnd, number: int, call: Entered, group: Group) -> Diagnosis:
    what = _words(call, number, group)
    if culprit.state == FAILED:
        how = first_sentence(culprit.how)
        sentence = f"rank {culprit.rank} ended early: {how}; rank {waiting.rank} then waited in {what}."
        return Diagnosis("lost", sentence, "")
    if culprit.state == KILLED:
        sentence = f"{_killed(culprit)}; rank {waiting.rank} then waited in {what}."
        return Diagnosis("lost", sentence, _MEMORY if "SIGKILL" in culprit.how else "")
    has, waits = ("has", "waits") if waiting.state == RUNNING else ("had", "waited")
    sentence = f"rank {culprit.rank} {has} {culprit.how}{_last(culprit)} without entering {what}, "
    sentence += f"in which rank {waiting.rank} {waits} for it."
    if call.sharded:
        told = _left_out([culprit, waiting], call.model)
        return Diagnosis("ended", f"{sentence}{told}", SKIP if told else _SAME_BATCHES)
    if call.model < 0:
        remedy = f"{BUFFERS_ARE_BROADCAST} {SAME_STEPS}" if call.purpose == BUFFERS else SAME_CALLS
        return Diagnosis("ended", sentence, remedy)
    told, remedy = _counts([culprit, waiting], call.model)
    return Diagnosis("ended", f"{sentence}{told}", SKIP if remedy is SKIP else SAME_STEPS)


def _killed(one: RankAtEnd) -> str:
    return f"rank {one.rank} was {one.how}{_last(one)}"


def _last(one: RankAtEnd) -> str:
    """What it did last, to follow how it ended."""
    if one.last_words:
        return f" ({one.last_words})"
    last = [(number, call) for entered in one.entered.values() for number, call in list(entered.items())[-1:]]
    if not last:
        return " (it had entered no collective)"
    number, call = last[-1]
    return f" (its last collective: {_words(call, number, _NO_GROUP)})"


# ---- an error of the program -------------------------------------------------------------------------------

_MIXED = "got mixed torch.Tensor and DTensor"  # torch's error
_OF_A_ROOT = ("unshard", "reshard", "set_requires_gradient_sync")  # methods that fully_shard adds to a module


def unregistered_method(error: BaseException) -> str:
    """What to do if a method of a sharded module was called besides its forward; "" if the error has another cause."""
    if _MIXED not in str(error):
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, name = frame.f_locals.get("self"), frame.f_code.co_name
        if not all(hasattr(type(module), method) for method in _OF_A_ROOT):
            continue
        if name == "forward" or name.startswith("_"):  # this one gathers
            return ""
        return (
            f"`{name}` of {type(module).__name__.removeprefix('FSDP')} was called, but only `forward` gathers the "
            f"parameters that fully_shard has sharded: call `register_fsdp_forward_method(model, {name!r})` of "
            "torch.distributed.fsdp before."
        )
    return ""
