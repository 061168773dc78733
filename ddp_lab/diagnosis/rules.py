"""Why ranks make no progress: one sentence derived from each rank's own state, and a suggested fix.

[Note: who waits for whom]
A waiting rank names its peers: the other members of the group whose collective it is in, or the rank that it receives
from. The cause is the peer that is least able to arrive: one that failed, one that is paused, one whose cell has
finished, one that computes or sleeps. If all peers wait too, the cause is in what they wait for: another
collective, another size, another root, another group, or each other.

Before that, and also when no rank waits, the collectives themselves are compared by their numbers on a group: ranks
that called a different one under the same number are found, whatever they do now (`find_mismatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..formatting import enumeration, label_of, names, size
from .mismatch import SKEW_S, Distance, Mismatch, count_backwards, distances, mismatch_of
from .snapshot import COMPILERS, IMPORT, UNNAMED, Call, RankSnapshot, label

__all__ = ["BUFFERS_ARE_BROADCAST", "BUSY", "CALLED_ALONE", "HANGS", "IN_FORWARD", "SAME_CALLS", "SAME_STEPS"]
__all__ += [
    "SAME_TENSORS",
    "SKIP",
    "Diagnosis",
    "diagnose",
    "diagnose_ahead",
    "diagnose_mismatch",
    "different_calls",
    "wait_of",
]

SAME_STEPS = (
    "If ranks have different numbers of batches, train inside `with model.join():`, or stop all ranks together."
)
SKIP = (
    "All ranks must make the same number of backwards: decide on all of them together whether to skip a batch "
    "(all_reduce a flag), or make the backward with the model's output times zero."
)
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
_BACKWARD = "_engine_run_backward"  # the function of torch that runs one
BUSY = "busy"  # the kind of diagnosis in which a rank does something else; not stuck if that is an import or a compiler
_SLOW_LINK = "If it does not finish soon, the network is slow or down."
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

    @property
    def brief(self) -> str:
        """The cause and the suggested fix."""
        return f"{self.sentence}\n→ {self.remedy}" if self.remedy else self.sentence

    @property
    def lesson(self) -> str:
        """The lesson that explains it, and a heading in it.

        E.g. ``'tutorials/11_why_does_my_cell_hang.ipynb, "Mismatched collectives"'``; "" if nothing is wrong.
        """
        heading = _HEADINGS.get(self.kind)
        return f'{HANGS}, "{heading}"' if heading else ""


_Rule = Callable[[Sequence[RankSnapshot], Sequence[RankSnapshot]], Diagnosis | None]


def diagnose(ranks: Sequence[RankSnapshot], before: Sequence[RankSnapshot] = ()) -> Diagnosis:
    """The first rule that fits.

    Args:
        ranks: all of the cluster's.
        before: the same, a moment ago. Ranks that train wait for each other all the time, and are not examined at the
            same moment: if none of the waiting ranks waited for the same thing then, all make progress.
    """
    waiting = [one for one in ranks if one.waits]
    for rule in _SURE:
        if (found := rule(ranks, waiting)) is not None:
            return found
    then = {wait_of(one) for one in before}
    if before and waiting and not any(wait_of(one) in then for one in waiting):
        return Diagnosis("working", f"All ranks are making progress. Right now: {_each(ranks)}", stuck=False)
    for rule in _RULES:
        if (found := rule(ranks, waiting)) is not None:
            return found
    return Diagnosis("unknown", _each(ranks))


def wait_of(one: RankSnapshot) -> object:
    """What distinguishes one wait of a rank from its next one."""
    steps = tuple((model.reducer, model.step, model.waits_for) for model in one.models)
    return one.rank, one.call, tuple(sorted(one.sequences.items())), steps


def diagnose_mismatch(ranks: Sequence[RankSnapshot], found: Mismatch) -> Diagnosis:
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
    told, remedy = _backwards_of(ranks)
    if remedy is SKIP:
        return Diagnosis("backward", f"{words}. {told}", SKIP)
    forward = {one.rank for one in ranks if one.within(IN_FORWARD)}
    if any(call.name == "broadcast" and rank in forward for rank, call in found.calls.items()):
        return Diagnosis("mismatch", f"{words}.", BUFFERS_ARE_BROADCAST)
    saving = {rank for rank, place in places.items() if _CHECKPOINT in place}
    return Diagnosis("mismatch", f"{words}.", ASYNC_SAVE if 0 < len(saving) < len(found.calls) else SAME_CALLS)


def _backwards_of(ranks: Sequence[RankSnapshot]) -> tuple[str, str]:
    """How many backwards each rank made of a model in whose backward one waits, in a sentence, and the remedy; "" if
    all have made the same number.
    """
    waits = next((one.bucket[0].reducer for one in ranks if one.bucket is not None), None)
    steps = {one.rank: model.steps for one in ranks for model in one.models if model.reducer == waits}
    if len(steps) < len(ranks) or len({one.backwards for one in steps.values()}) == 1:
        return "", CALLED_ALONE
    told, skipped = count_backwards(steps)
    return told, CALLED_ALONE if skipped is None else SKIP


def launched_alone(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    """The diagnosis if a rank launched collectives that another one has not entered, and waits for none of them."""
    if waiting:
        return None
    for found in distances({one.rank: one.flights for one in ranks}).values():
        if found.launched is not None and found.launched.seconds >= SKEW_S:
            return replace(diagnose_ahead(ranks, found), stuck=False)
    return None


def diagnose_ahead(ranks: Sequence[RankSnapshot], found: Distance) -> Diagnosis:
    """The diagnosis of two ranks that are out of step although neither waits."""
    by_rank = {one.rank: one for one in ranks}
    ahead, behind, number = by_rank[found.ahead], by_rank[found.behind], found.entered[1] + 1
    what = found.missing.called(number) if found.missing is not None else f"operation #{number} of their group"
    launches = f"rank {found.ahead} launched {what}{found.where}"
    in_backward = ahead.state == "running" and ahead.within(_BACKWARD)  # of torch's class: it may wait there
    continues = str(ahead) if in_backward else "continued"
    if behind.state == "running":
        sentence = f"{launches} and {continues}; rank {found.behind} has not entered it and {behind}."
    elif ahead.state == "running":
        sentence = f"{launches} and {continues}; rank {found.behind} finished the {behind.runs} without entering it."
    else:
        sentence = (
            f"No cell is running, but {launches} and rank {found.behind} has not entered it: "
            f"the next collective of rank {found.behind} will be matched with it."
        )
    in_time = SAME_STEPS if in_backward else "Wait on the `Work` handles of async_op=True calls before the next step."
    remedy = f"{SAME_CALLS} {in_time}"
    return Diagnosis("ahead", sentence, remedy)


def _each(ranks: Sequence[RankSnapshot]) -> str:
    """What every rank does; ranks that do the same share one phrase."""
    doing: dict[str, list[int]] = {}
    for one in ranks:
        doing.setdefault(str(one), []).append(one.rank)
    return "; ".join(f"{'each of ' if len(who) > 1 else ''}{label(who)} {what}" for what, who in doing.items()) + "."


def _who(ranks: Sequence[RankSnapshot]) -> str:
    return label(one.rank for one in ranks)


def _gone(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    if not (gone := [one for one in ranks if one.state == "lost"]):
        return None
    them, new = ("it", "a new process for it") if len(gone) == 1 else ("them", "new processes for them")
    others = f"; {_who(waiting)} {_was(waiting)} waiting for {them}" if waiting else ""
    sentence = f"{_who(gone)} failed ({gone[0].how_it_ended}){others}."
    restart = f"The next cell, or `%cluster rejoin`, starts {new}." if gone[0].runs == "cell" else ""
    return Diagnosis("lost", sentence, restart)


def _debugged(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    if not (debugged := [one for one in ranks if one.debugged]):
        return None
    others = f" {_who(waiting)} {_wait_s(waiting)} in {waiting[0].waits_in}." if waiting else ""
    sentence = f"{_each(debugged)}{others}"
    remedy = "Continue it in the debugger, or turn the debugger off. Interrupting the cell ends it on all ranks."
    return Diagnosis("debugger", sentence, remedy, stuck=False)


def _paused(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    paused = [(one, one.paused.paused) for one in ranks if one.paused is not None]
    if not paused:
        return None
    who = label(one.rank for one, _ in paused)
    sentence = f"{who} {'is' if len(paused) == 1 else 'are'} paused at a breakpoint: {paused[0][1]}."
    remedy = "`lab.next_event()` advances to the next event; `lab.resume()` removes all breakpoints."
    return Diagnosis("paused", sentence, remedy)


def different_calls(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    """Ranks that entered different collectives under the same number: waiting longer does not change that."""
    found = mismatch_of(ranks)
    waits = _different(ranks, waiting) if found is not None and len(waiting) == len(ranks) else None
    if waits is not None and waits.kind in ("backward", "order", "group"):
        return waits  # tells more
    return None if found is None else diagnose_mismatch(ranks, found)


def _other_members(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    """A group of one name with other members on other ranks: each rank made its own at the same call."""
    made: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for one in ranks:
        known = {flight.group: flight.ranks for flight in one.flights}
        if one.call is not None:
            known[one.call.group] = one.call.members if one.call.kind == "group" else one.call.ranks
        for group, members in known.items():
            if group and members:
                made.setdefault(group, {}).setdefault(members, []).append(one.rank)
    apart = next((by_members for by_members in made.values() if len(by_members) > 1), None)
    if apart is None:
        return None
    each = "; ".join(f"{label_of(who)} one of {label_of(members)}" for members, who in apart.items())
    now = "; ".join(f"rank {one.rank} is in {one.waits_in}{_at(one)}" for one in waiting)
    sentence = (
        f"Ranks made different groups by the same call of `new_group`: {each}. Their messages can reach wrong ranks."
        f"{f' Now {now}.' if now else ''}"
    )
    remedy = (
        "All ranks must call `new_group` for every group, in the same order, also for groups that they are not in, or "
        "pass use_local_synchronization=True."
    )
    return Diagnosis("members", sentence, remedy)


def _stopped(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    if not (stopped := [one for one in ranks if one.state == "stopped"]):
        return None
    are, resume, them = ("is", "resumes", "it") if len(stopped) == 1 else ("are", "resume", "them")
    others = f" {_who(waiting)} {_wait_s(waiting)} in {waiting[0].waits_in}." if waiting else ""
    sentence = f"{_who(stopped)} {are} stopped (SIGSTOP).{others}"
    commands = enumeration([f"`{one.why}`" for one in stopped])
    return Diagnosis("stopped", sentence, f"{commands} {resume} {them}; nothing is lost.")


def _was(waiting: Sequence[RankSnapshot]) -> str:
    return "was" if len(waiting) == 1 else "were"


def _wait_s(waiting: Sequence[RankSnapshot]) -> str:
    return "waits" if len(waiting) == 1 else "wait"


def _idle(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    if any(one.state in ("running", "silent") for one in ranks):
        return None
    over = "No cell is running." if any(one.runs == "cell" for one in ranks) else "All ranks have finished the script."
    return Diagnosis("idle", over, stuck=False)


def _cut_off(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    """Ranks of a node that does not answer."""
    if not (cut := [one for one in ranks if one.state == "cut off"]):
        return None
    are = "is" if len(cut) == 1 else "are"
    others = f" {_who(waiting)} {_wait_s(waiting)} in {waiting[0].waits_in}{_at(waiting[0])}." if waiting else ""
    sentence = f"{_who(cut)} {are} cut off: {enumeration(sorted({one.why for one in cut}))}.{others}"
    remedy = "Check that host and its network: ranks that wait for it do so until their group's timeout."
    return Diagnosis("cut", sentence, remedy)


def _silent(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    if not (silent := [one for one in ranks if one.state == "silent"]):
        return None
    are, them, ends = ("are", "them", "those ranks' processes; the next cell starts new ones")
    if len(silent) == 1:
        are, them, ends = ("is", "it", "that rank's process; the next cell starts a new one")
    wait = f" {_who(waiting)} {_wait_s(waiting)} for {them}." if waiting else ""
    sentence = f"{_who(silent)} {are} unresponsive: a C call may be holding the GIL.{wait}"
    remedy = f"Interrupting a cell that you wait for terminates {ends}." if silent[0].runs == "cell" else ""
    return Diagnosis("silent", sentence, remedy)


def _missing(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    """Ranks of a script that no process of it has come as, while others wait for them."""
    missing = [one for one in ranks if one.state == "missing"]
    if not missing or not waiting:
        return None
    others = f"; {missing[0].why}" if missing[0].why else ""
    alike = [replace(one, call=replace(one.call, joins=())) if one.call is not None else one for one in waiting]
    sentence = f"{_each(alike)[:-1]}; no process on this host has joined as {_who(missing)}{others}."
    if missing[0].prepares:
        return Diagnosis(BUSY, sentence, "The ranks that wait continue when all have joined.", stuck=False)
    remedy = (
        "Each rank needs a process that calls `init_process_group` with the same address and world_size, and with a "
        "rank of its own."
    )
    return Diagnosis("making", sentence, remedy)


def _nobody_waits(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    if waiting:
        return None
    return Diagnosis("working", f"No rank is waiting for another: {_each(ranks)}", stuck=False)


def _point_to_point(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    by_rank = {one.rank: one for one in ranks}
    for one in waiting:
        if one.call is None or one.call.kind != "point to point" or one.call.peer not in by_rank:
            continue
        peer = by_rank[one.call.peer]
        if peer.call is not None and peer.call.kind == "point to point" and peer.call.peer == one.rank:
            if peer.call.name == one.call.name:
                verb = "receive from" if "recv" in one.call.name else "send to"
                where = (
                    _at(one) if one.place == peer.place else f": rank {one.rank}{_at(one)}, rank {peer.rank}{_at(peer)}"
                )
                sentence = f"{label([one.rank, peer.rank])} are both waiting to {verb} each other{where}."
                remedy = "Swap the calls on one of the two ranks, or use `batch_isend_irecv`."
                return Diagnosis("crossed", sentence, remedy)
            continue
        verb = "a message from" if "recv" in one.call.name else "a matching recv on"
        return Diagnosis(
            "peer",
            f"rank {one.rank}{_at(one)} waits for {verb} rank {peer.rank}, which {peer}.",
            f"rank {peer.rank} must make the matching call, with the same tag.",
        )
    return None


def _members(one: RankSnapshot, ranks: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """The other ranks that it waits for."""
    group = one.call.ranks if one.call is not None and one.call.ranks else tuple(other.rank for other in ranks)
    return [other for other in ranks if other.rank in group and other.rank != one.rank]


def _ended(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    """Peers whose cell has finished, or that were not sent it."""
    for one in waiting:
        absent = [other for other in _members(one, ranks) if other.state in ("idle", "unblocked")]
        if not absent:
            continue
        who, what = _who(absent), one.waits_in
        has, it = ("have", "them") if len(absent) > 1 else ("has", "it")
        if not any(other.asked for other in absent):
            sentence = f"rank {one.rank} waits in {what}, which {who} must enter too; the cell was not sent to {it}."
            remedy = (
                "Run the cell on all ranks of the group, or pass `group=` a group of only those that run it (call "
                "`dist.new_group` on all ranks). Interrupting the cell ends the wait."
            )
            return Diagnosis("subset", sentence, remedy)
        if (unused := _never_produced(one, absent)) is not None:
            return unused
        sentence = f"{who} {has} finished the {one.runs}; rank {one.rank} still waits in {what}{_at(one)}."
        return Diagnosis("ended", sentence, SAME_CALLS if one.bucket is None else SAME_STEPS)
    return None


def _never_produced(one: RankSnapshot, others: Sequence[RankSnapshot]) -> Diagnosis | None:
    """A backward that waits for a gradient that no rank will produce."""
    lacking = [(other.rank, model.missing) for other in others for model in other.models if model.missing]
    if one.bucket is None or not lacking:
        return None
    rank, missing = lacking[0]
    sentence = (
        f"rank {one.rank} waits for bucket {one.bucket[1]}; rank {rank} never produced a gradient for "
        f"{names(missing)}, unused in its forward pass."
    )
    return Diagnosis("unused", sentence, "Wrap the model with find_unused_parameters=True.")


def _busy(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    """Peers that are still doing something else."""
    for one in waiting:
        busy = [other for other in _members(one, ranks) if other.state == "running" and not other.waits]
        if not busy:
            continue
        unused = _never_produced(one, [other for other in busy if not other.within(_BACKWARD)])
        if unused is not None:
            return unused
        waits = [other for other in waiting if other.waits_in == one.waits_in]
        where = _at(one) if one.runs == "script" else ""
        sentence = f"{_who(waits)} {_wait_s(waits)} in {one.waits_in}{where}; {_each(busy)}"
        return Diagnosis(BUSY, sentence, _remedy_of(busy[0]), stuck=not busy[0].prepares)
    return None


def _remedy_of(busy: RankSnapshot) -> str:
    """The suggested fix for what a rank does while others wait for it."""
    text = busy.place.text if busy.place is not None else ""
    innermost = busy.stack[0].file if busy.stack else ""
    if "sleep" in text:
        return f"rank {busy.rank} is in a sleep call; the others continue when it gets there, too."
    if busy.within(*COMPILERS) and not _imports(busy):
        return (
            f"rank {busy.rank} is compiling; the others continue when it is done. Warm the model up on all ranks "
            "before they wait for each other, or give the group a longer timeout."
        )
    if busy.within(IMPORT):
        return f"rank {busy.rank} is importing a module; the others continue when it is done."
    if busy.within("dataloader.py"):
        return f"rank {busy.rank} is waiting for data: use more or faster DataLoader workers, or a balanced sampler."
    if "threading.py" in innermost or "queue.py" in innermost:
        return f"rank {busy.rank} is waiting for a thread or a queue of its own."
    if ".save(" in text:
        return f"rank {busy.rank} is writing a file; the others do not need to wait until it is written."
    if busy.runs == "script":
        return f"If rank {busy.rank} never reaches the collective, end the run (Ctrl-C)."
    return (
        f"If rank {busy.rank} never reaches the collective, `%cluster interrupt` ends the cell on all ranks and keeps "
        "their variables."
    )


def _imports(busy: RankSnapshot) -> bool:
    """Whether it imports a module, and no compiler has asked for that: a compiler is imported, too."""
    frames = [one for one in busy.stack if any(name in one.file for name in (IMPORT, *COMPILERS))]
    return bool(frames) and (IMPORT in frames[-1].file or frames[-1].function == "<module>")


def _different(ranks: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> Diagnosis | None:
    """If all peers wait: what do they wait for?"""
    calls = {one.rank: one.call for one in waiting if one.call is not None and one.call.kind == "collective"}
    making = [one for one in waiting if one.call is not None and one.call.kind == "group"]
    buckets = [one for one in waiting if one.bucket is not None]
    words = "; ".join(f"rank {one.rank} is in {one.waits_in}{_at(one)}" for one in waiting)
    if making and len(making) < len(waiting):
        remedy = "All ranks must create all groups in the same order, including groups they do not belong to."
        return Diagnosis("group", f"Not every rank called `new_group`: {words}.", remedy)
    if making:
        return _making(ranks, [one.call for one in making if one.call is not None], words)
    if buckets and calls:
        words = "; ".join(f"rank {one.rank} is in {one.waits_in}{_at(one, function=True)}" for one in waiting)
        told, remedy = _backwards_of(ranks)
        sentence = f"A backward pass and another collective wait for each other: {words}.{told and f' {told}'}"
        return Diagnosis("backward", sentence, remedy)
    if buckets:
        return _in_buckets(buckets)
    return _in_calls(calls, words, _uneven(waiting)) if calls else None


def _making(ranks: Sequence[RankSnapshot], calls: Sequence[Call], words: str) -> Diagnosis:
    joins = [one.joins for one in calls if one.joins]
    sentence = f"All ranks are creating a group but have not found each other: {words}."
    if len(joins) < len(calls):
        return Diagnosis("making", sentence, SAME_CALLS)
    remedy = "Leave rank, world_size and init_method out of `init_process_group`: the launcher has set them."
    largest = max(size for _, size in joins)
    if largest > len(ranks):
        sentence = f"init_process_group waits for {largest} ranks, of which {len(ranks)} were started: {words}."
    elif len({rank for rank, _ in joins}) < len(joins):
        sentence = f"Ranks join the default group as the same rank: {words}."
    elif calls[0].address and len({one.address for one in calls}) == 1:
        remedy = (
            "Check that all ranks reach this address and that no other job uses it. Ranks of a launcher need no "
            "address: leave rank, world_size and init_method out of `init_process_group`."
        )
    return Diagnosis("making", sentence, remedy)


def _uneven(waiting: Sequence[RankSnapshot]) -> bool:
    """Whether ranks that are in collectives are out of step. Sequence numbers also count sends and receives."""
    groups = {one.call.group for one in waiting if one.call is not None}
    known = {flight.entered for one in waiting for flight in one.flights if flight.group in groups}
    if known:
        return None not in known and len(known) > 1
    return len({one.call.sequence for one in waiting if one.call is not None and one.call.sequence is not None}) > 1


def _in_buckets(buckets: Sequence[RankSnapshot]) -> Diagnosis:
    found = {one.rank: one.bucket for one in buckets if one.bucket is not None}
    if len({(model.module, number) for model, number in found.values()}) > 1:
        each = (f"rank {rank} for bucket {number} of {model.module}" for rank, (model, number) in found.items())
        remedy = "They run the backward passes of different models, or in a different order."
        return Diagnosis("order", f"Ranks wait for different buckets: {'; '.join(each)}.", remedy)
    model, number = next(iter(found.values()))
    sentence = f"All ranks wait for bucket {number} of {model.module}: all have launched it; it is being reduced."
    return Diagnosis("slow", sentence, _SLOW_LINK)


def _in_calls(calls: dict[int, Call], words: str, uneven: bool) -> Diagnosis:
    some = list(calls.values())
    groups = {one.group for one in some}
    if len(groups) > 1:
        remedy = "Ranks that are in several groups must use them in the same order."
        return Diagnosis("groups", f"Ranks wait for each other in different groups: {words}.", remedy)
    if len({one.name for one in some} - {UNNAMED}) > 1:
        return Diagnosis("mismatch", f"Ranks entered different collectives: {words}.", SAME_CALLS)
    if len({one.peer for one in some}) > 1:
        return Diagnosis("root", f"Ranks use different roots: {words}.", "src and dst must be the same on all ranks.")
    if uneven:
        return Diagnosis("ahead", f"Ranks are out of step: {words}.", "One rank skipped or repeated a collective.")
    if len({(one.bytes, one.what) for one in some}) > 1:
        sizes = enumeration([f"{size(one.bytes)} on rank {rank}" for rank, one in calls.items()])
        return Diagnosis("sizes", f"{some[0].name} was called with different tensors: {sizes} ({words}).", SAME_TENSORS)
    return Diagnosis("slow", f"{label(calls)} are all in {some[0]}, which is in progress.", _SLOW_LINK)


def _at(one: RankSnapshot, *, function: bool = False) -> str:
    """Its line, to follow what it does; with the function if that is wanted and the line is in one."""
    if one.place is None:
        return ""
    named = function and one.place.function and not one.place.function.startswith("<")
    return f" ({one.place}{f' in {one.place.function}()' if named else ''})"


# Certain at once: waiting longer does not change them.
_SURE: tuple[_Rule, ...] = (
    _gone,
    _cut_off,
    _stopped,
    _debugged,
    _paused,
    different_calls,
    _other_members,
    launched_alone,
    _idle,
    _silent,
)
_RULES: tuple[_Rule, ...] = (_nobody_waits, _missing, _point_to_point, _ended, _busy, _different)
