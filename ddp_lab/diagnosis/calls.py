"""Diagnoses of ranks whose collectives differ, or of which one is ahead, whether or not any rank waits; and the lesson
that explains a diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .backwards import SKIP, counts
from .flights import SKEW_S, Distance, Mismatch, distances, find_mismatch
from .rank_state import Examined, Place, label

__all__ = [
    "BUFFERS_ARE_BROADCAST",
    "CALLED_ALONE",
    "HANGS",
    "IN_FORWARD",
    "SAME_CALLS",
    "SAME_TENSORS",
    "Diagnosis",
    "diagnose_ahead",
    "diagnose_mismatch",
    "hang_lesson",
]
__all__ += ["count_backwards", "launched_alone", "mismatch_of", "with_places"]

_CHECKPOINT = "torch/distributed/checkpoint/"
IN_FORWARD = "_pre_forward"  # in which torch's DistributedDataParallel and ours broadcast buffers
SAME_TENSORS = "Tensors must have the same shape and dtype on all ranks; if sizes differ, gather the sizes first."
SAME_CALLS = "All ranks of a group must make the same calls in the same order."
BUFFERS_ARE_BROADCAST = (
    "The forward of a DistributedDataParallel model broadcasts its buffers (of BatchNorm, for example), so all ranks "
    "must call it. To validate on one rank, call `model.module`."
)
ASYNC_SAVE = (
    "A checkpoint is saved on a thread, whose collectives come in between: give it a group of its own, e.g. "
    '`async_save(..., process_group=dist.new_group(backend="gloo"))`.'
)
CALLED_ALONE = (
    "Either this call is made on one rank alone (all ranks of the group must make it, or none), or the ranks make "
    "different numbers of steps (`model.join()`)."
)

HANGS = "tutorials/11_why_does_my_cell_hang.ipynb"
_BUSY, _ENDED, _CALLS = "A busy rank", "A rank whose cell has ended", "Mismatched collectives"
_HEADINGS = {
    **dict.fromkeys(("busy", "paused", "silent", "stopped", "peer"), _BUSY),
    **dict.fromkeys(("ended", "subset", "unused"), _ENDED),
    **dict.fromkeys(("mismatch", "sizes", "root", "ahead", "group", "groups", "making", "crossed", "backward"), _CALLS),
    **dict.fromkeys(("members", "order"), _CALLS),
    **dict.fromkeys(("lost", "cut"), "A failed rank"),
    "slow": "A slow interconnect",
    "unknown": "How a hang is noticed",
}

Ask = Callable[[list[int], str, int], Mapping[int, Mapping[str, Any]]]


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        kind: e.g. ``"mismatch"``; see `diagnose`.
        sentence: the reason.
        remedy: the suggested fix; "" if there is nothing to do.
        stuck: whether ranks wait for something that will not happen by itself, or not soon.
    """

    kind: str
    sentence: str
    remedy: str = ""
    stuck: bool = True


def mismatch_of(ranks: Sequence[Examined]) -> Mismatch | None:
    """The first collective of the running cell, or of the last one, that is not the same on all ranks."""
    running = {one.last_cell for one in ranks if one.state == "running"} or {one.last_cell for one in ranks}
    of_cell = [one.rank for one in ranks if one.last_cell in running]
    return find_mismatch({one.rank: one.flights for one in ranks}, of_cell)


def with_places(ranks: Sequence[Examined], ask: Ask) -> list[Examined]:
    """The same; where the ranks entered different collectives, with the line that entered each, if it is known.

    Args:
        ranks: all of them.
        ask: called with ranks, group and number; returns rank -> ``file`` and ``line`` where it entered that one.
    """
    found = mismatch_of(ranks)
    if found is None:
        return list(ranks)
    places = {
        rank: Place(answer["file"], answer["line"], "", "", users=True)
        for rank, answer in ask(list(found.calls), found.group, found.number).items()
        if "file" in answer
    }
    return [replace(one, entered_at=places.get(one.rank)) for one in ranks]


def diagnose_mismatch(ranks: Sequence[Examined], found: Mismatch) -> Diagnosis:
    """The diagnosis of ranks that entered different collectives under the same number."""
    places = {one.rank: f" at {one.entered_at}" for one in ranks if one.entered_at is not None}
    modules = {
        one.rank: f" for {one.call.module}"
        for one in ranks
        if one.call is not None and one.call.module and one.call.sequence == found.number
    }
    by_call: dict[str, list[int]] = {}
    for rank, call in found.calls.items():
        called = f"{call.called(found.number)}{modules.get(rank, '')}"
        by_call.setdefault(f"{called}{found.where}{places.get(rank, '')}", []).append(rank)
    (first, who), *others = by_call.items()
    words = ", ".join([f"{label(who)} entered {first}", *(f"{label(which)} {call}" for call, which in others)])
    other_lines = len(places) == len(found.calls) and len(set(places.values())) > 1  # so they are other calls
    if found.sizes and not other_lines:
        return Diagnosis("sizes", f"{words}: the tensors differ.", SAME_TENSORS)
    told, remedy = count_backwards(ranks)
    if remedy is SKIP:
        return Diagnosis("backward", f"{words}. {told}", SKIP)
    forward = {one.rank for one in ranks if one.within(IN_FORWARD)}
    if any(call.name == "broadcast" and rank in forward for rank, call in found.calls.items()):
        return Diagnosis("mismatch", f"{words}.", BUFFERS_ARE_BROADCAST)
    saving = {rank for rank, place in places.items() if _CHECKPOINT in place}
    return Diagnosis("mismatch", f"{words}.", ASYNC_SAVE if 0 < len(saving) < len(found.calls) else SAME_CALLS)


def count_backwards(ranks: Sequence[Examined]) -> tuple[str, str]:
    """How many backwards each rank made of a model in whose backward one waits, in a sentence, and the remedy; "" if
    all have made the same number.
    """
    waits = next((one.bucket[0].reducer for one in ranks if one.bucket is not None), None)
    steps = {one.rank: model.steps for one in ranks for model in one.models if model.reducer == waits}
    if len(steps) < len(ranks) or len({one.backwards for one in steps.values()}) == 1:
        return "", CALLED_ALONE
    told, skipped = counts(steps)
    return told, CALLED_ALONE if skipped is None else SKIP


def launched_alone(ranks: Sequence[Examined], waiting: Sequence[Examined]) -> Diagnosis | None:
    """The diagnosis if a rank launched collectives that another one has not entered, and waits for none of them."""
    if waiting:
        return None
    for found in distances({one.rank: one.flights for one in ranks}).values():
        if found.launched is not None and found.launched.seconds >= SKEW_S:
            return replace(diagnose_ahead(ranks, found), stuck=False)
    return None


def diagnose_ahead(ranks: Sequence[Examined], found: Distance) -> Diagnosis:
    """The diagnosis of two ranks that are out of step although neither waits."""
    by_rank = {one.rank: one for one in ranks}
    behind, number = by_rank[found.behind], found.entered[1] + 1
    what = found.missing.called(number) if found.missing is not None else f"operation #{number} of their group"
    launches = f"rank {found.ahead} launched {what}{found.where}"
    if behind.state == "running":
        sentence = f"{launches} and continued; rank {found.behind} has not entered it and {behind}."
    elif by_rank[found.ahead].state == "running":
        sentence = f"{launches} and continued; rank {found.behind} finished the {behind.runs} without entering it."
    else:
        sentence = (
            f"No cell is running, but {launches} and rank {found.behind} has not entered it: "
            f"the next collective of rank {found.behind} will be matched with it."
        )
    remedy = f"{SAME_CALLS} Wait on the `Work` handles of async_op=True calls before the next step."
    return Diagnosis("ahead", sentence, remedy)


def hang_lesson(kind: str) -> str:
    """The lesson that explains a diagnosis, and a heading in it.

    E.g. ``'tutorials/11_why_does_my_cell_hang.ipynb, "Mismatched collectives"'``; "" for a kind that is not a problem.

    Args:
        kind: of a `Diagnosis`.
    """
    heading = _HEADINGS.get(kind)
    return f'{HANGS}, "{heading}"' if heading else ""
