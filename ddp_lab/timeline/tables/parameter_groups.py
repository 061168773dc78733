"""What the parameter groups of a model with `fully_shard` or `replicate` did in each step, and who waited for it.

Rows are the collectives of the model ([Note: every collective of every group]): each says which group it is for, and
what for (`USES`). They lie in a step by their time, between the end of the step before and its own end.

[Note: exposed where parameters are sharded]
A bucket of a DistributedDataParallel is reduced beside the backward's computation, and exposed is what remains after
it. A parameter group can be needed at once: then its rank waits in the forward and in the backward as well. So exposed
here is the time in which a rank waits for collectives of the model. On the CPU torch waits inside the call of each
collective, and all its time is exposed. Where the rank goes on (`_goes_on`) a thread waits later: gloo and shm tell
when. On a device the stream that computes waits, and the observation tells when ([Note: waits of a device] in
`parallel/observe_shards.py`). What nothing tells is NaN, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...analysis.parameter_groups import (
    ALL_REDUCE,
    FORWARD_UNSHARD,
    KINDS,
    REDUCE_SCATTER,
    DeviceCollectives,
    ModelCollectives,
)
from .collectives import CollectiveTable, GroupInfo, operation_name
from .span_columns import Columns, TableView, joined
from .step_table import BUCKET_FIELDS, STEP_FIELDS

__all__ = ["PARAMETER_GROUP_COLUMNS", "USES", "collectives_of", "parameter_group_columns", "starts_of", "with_waits"]

_Times = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]

USES: Final = ("", "forward", "forward ahead", "backward", "backward ahead", "reduction", "evaluation", "buffers")
"""What a collective is for; "ahead": it was prefetched. As `csrc/comm/collective_interception.h` numbers them."""
PARAMETER_GROUP_COLUMNS: Final = (
    *("rank", "reducer", "step", "generation", "group", "module"),
    *(f"{kind}{end}" for kind in KINDS for end in ("_ms", "_exposed_ms")),
    *("forward_unshards", "backward_unshards", "forward_prefetched", "backward_prefetched"),
    *("gathered_bytes", "reduced_bytes", "sharded_bytes", "unsharded_bytes", "complete"),
)
_F = {name: place for place, name in enumerate(STEP_FIELDS)}
_WINDOWS = {
    "forward": [_F["forward_begin"], _F["forward_end"]],
    "backward": [_F["backward_begin"], _F["backward_end"]],
    "computation": [_F["backward_begin"], _F["finalize"]],
}
_TELLING = ("gloo", "shm")  # backends whose `Work` tells when a thread waits
_FORWARD, _BACKWARD, _REDUCTION = 0, 1, 2
_PHASE = np.array([-1, _FORWARD, _FORWARD, _BACKWARD, _BACKWARD, _REDUCTION, -1])  # by use; -1: of no step
_OLDER = 64  # collectives before the first step of a view, among which the last one of the step before is
_AHEAD = np.array([one.endswith("ahead") for one in USES])


def starts_of(view: TableView) -> _Times:
    """When each step of a view begins: at the end of the one before."""
    known = np.where(view.previous_end > 0, view.previous_end, view.steps[:, _F["forward_begin"]])
    return np.where(view.step == 0, 0, np.where(known > 0, known, view.steps[:, _F["backward_begin"]]))


def collectives_of(
    view: TableView,
    table: CollectiveTable,
    calls: Sequence[Mapping[str, Any]],
    groups: Mapping[int, GroupInfo],
    layout: Sequence[Mapping[str, Any]],
) -> ModelCollectives:
    """The collectives of a model in the steps of a view.

    Args:
        view: of one rank.
        table: the operations of that rank.
        calls: descriptions of type ``"call"`` by their numbers.
        groups: process groups by their numbers.
        layout: the parameter groups as they are described.
    """
    starts = starts_of(view)
    on_device = any(one.get("device", "cpu") != "cpu" for one in layout)
    rows = table.rows(since=int(starts.min(initial=0)), older=_OLDER if on_device else 0)
    of = [(number, one) for number, one in enumerate(calls) if one.get("reducer", -1) == view.reducer]
    use, bucket, kind = (np.full(len(calls) + 1, -1, np.int64) for _ in range(3))
    for number, one in of:
        use[number] = USES.index(one["use"]) if one.get("use") in USES else 0
        bucket[number] = one.get("bucket", -1)
        kind[number] = _kind_of(operation_name(str(one["operation"])), int(use[number]))
    call = np.where(rows["call"] >= 0, rows["call"], len(calls))
    ends = view.steps[:, [_F["backward_end"], _F["abandoned"]]].max(axis=1, initial=0)
    ends = np.where(ends > 0, ends, np.iinfo(np.int64).max)
    at = np.searchsorted(starts, rows["entered"], side="right") - 1
    inside = (at >= 0) & (kind[call] >= 0) & (_PHASE[use[call]] >= 0)
    if len(starts):
        inside &= rows["entered"] <= ends[at]
    before = np.flatnonzero((at < 0) & (kind[call] >= REDUCE_SCATTER))[-1:]  # the last one of the step before
    ended_before = int((rows["wait_begin"] + rows["wait_ns"])[before].max(initial=0))
    chosen = {name: values[inside] for name, values in rows.items()}
    call = call[inside]
    about = {"row": at[inside], "group": bucket[call], "kind": kind[call], "ahead": _AHEAD[use[call]]}
    if on_device:
        return _on_device(view, chosen, about, ended_before)
    ended = chosen["ended"] * (chosen["failed"] == 0)
    # A thread that waits goes on a little after the collective has ended: until then it lasts for its rank.
    ended = np.where(ended > 0, np.maximum(ended, chosen["wait_begin"] + chosen["wait_ns"]), 0)
    goes_on = _goes_on(layout, about["kind"], about["group"], about["ahead"])
    telling = [number for number, one in groups.items() if any(name in one.backend for name in _TELLING)]
    return ModelCollectives(
        begin=starts,
        end=np.zeros_like(starts),
        **about,
        goes_on=goes_on,
        bytes=chosen["bytes"],
        entered=chosen["entered"],
        ended=ended,
        met=chosen["entered"],
        wait_begin=np.where(goes_on, chosen["wait_begin"], np.where(ended > 0, chosen["entered"], 0)),
        wait_ns=np.where(goes_on, chosen["wait_ns"], np.where(ended > 0, ended - chosen["entered"], 0)),
        told=(ended > 0) & (~goes_on | np.isin(chosen["group"], telling)),
    )


def _on_device(
    view: TableView, rows: Mapping[str, _Times], about: Mapping[str, Any], ended_before: int
) -> ModelCollectives:
    """The same where a device runs them. What it has done is told in turn, so that all of a step is known as soon as
    the wait for its last reduction is.

    Args:
        view: of one rank.
        rows: of its steps.
        about: what each is.
        ended_before: ns at which the device had ended the step before the first one; 0 if unknown.
    """
    row, kind = about["row"], about["kind"]
    ended, waits = rows["ended"] * (rows["failed"] == 0), rows["wait_begin"]
    entered = np.where(rows["device_begin"] > 0, rows["device_begin"], rows["entered"])
    reductions = np.flatnonzero(kind >= REDUCE_SCATTER)
    last = np.full(len(view.step), -1)
    last[row[reductions]] = reductions  # the last one stays
    known = (last >= 0) & (np.append(waits, 0)[last] > 0)
    end = np.where(known, np.append(waits + rows["wait_ns"], 0)[last], 0)
    gathered = (kind < REDUCE_SCATTER) & (waits > 0)
    met = np.where(gathered, waits, entered)
    met[reductions] = _computed(*(one[reductions] for one in (row, about["group"], kind, entered, waits)))
    order = np.lexsort((np.where(gathered, rows["waited_at"], rows["entered"]), row))  # as the host came to them
    return DeviceCollectives(
        begin=np.where(np.diff(view.step, prepend=view.step[:1] - 1) == 1, np.append(ended_before, end)[: len(end)], 0),
        end=end,
        **{name: values[order] for name, values in about.items()},
        goes_on=np.ones(len(row), bool),
        bytes=rows["bytes"][order],
        entered=entered[order],
        ended=ended[order],
        met=met[order],
        wait_begin=waits[order],
        wait_ns=rows["wait_ns"][order],
        told=((ended > 0) & known[row])[order],
    )


def _computed(row: _Times, group: _Times, kind: _Times, entered: _Times, waits: _Times) -> _Times:
    """When the stream of a device had computed what is reduced: before it reduces, it may wait for another reduction.

    Args:
        row, group, kind: of reductions, in the order in which they were entered.
        entered: when the device began each, in ns.
        waits: when the stream began to wait for each, in ns; 0 where it did not.
    """
    if len(row) < 2:
        return entered
    waited = np.append(np.flatnonzero(waits > 0), 0)
    waited = waited[np.argsort(waits[waited], kind="stable")]
    before = waited[np.maximum(np.searchsorted(waits[waited], entered, side="right") - 1, 0)]
    same = np.concatenate([[False], row[1:] == row[:-1]])
    since = np.concatenate([[0], entered[:-1]])
    waits_first = same & (row[before] == row) & (waits[before] >= since) & (waits[before] <= entered)
    found = np.where(waits_first, waits[before], entered)
    again = same & np.concatenate([[False], (group[1:] == group[:-1]) & (kind[1:] == ALL_REDUCE)])
    again &= np.concatenate([[False], kind[:-1] == REDUCE_SCATTER])  # of what has just been scattered
    return np.asarray(np.where(again, np.concatenate([[0], found[:-1]]), found))


def _goes_on(layout: Sequence[Mapping[str, Any]], kind: _Times, group: _Times, ahead: _Flags) -> _Flags:
    """Whether a rank goes on while a collective runs: all-gathers with ``async_op``, and those that the program asked
    for before torch would. For all others on the CPU, torch waits inside the call."""
    prefetched = {number for one in layout for number in one.get("forward_prefetch", ())}
    free = np.array([bool(one.get("unshard_async")) for one in layout] + [False])
    asked = np.array([number not in prefetched for number in range(len(layout))] + [False])
    at = np.where((group >= 0) & (group < len(layout)), group, len(layout))
    found: _Flags = (kind < REDUCE_SCATTER) & (free[at] | (ahead & asked[at] & (kind == FORWARD_UNSHARD)))
    return found


def _kind_of(operation: str, use: int) -> int:
    """Place in `KINDS`; -1 for an operation that is none of them, e.g. of a hook of the program."""
    phase = int(_PHASE[use])
    if operation.startswith("all_gather"):
        return phase if phase in (_FORWARD, _BACKWARD) else -1
    names = {"reduce_scatter": 2, "all_reduce": 3}
    return next((kind for name, kind in names.items() if phase == _REDUCTION and operation.startswith(name)), -1)


def with_waits(view: TableView, found: ModelCollectives, table: CollectiveTable) -> TableView:
    """The same view with the times in which its rank waited: [Note: exposed where parameters are sharded].

    Args:
        view: of one rank.
        found: its collectives.
        table: the operations of that rank.
    """
    steps, buckets = len(view.step), view.buckets.shape[1]
    unknown = np.bincount(found.row[~found.told], minlength=steps) > 0
    unknown |= (starts_of(view) < table.oldest()) & (table.forgotten > 0)
    windows = {name: view.steps[:, columns] for name, columns in _WINDOWS.items()}
    return replace(view, buckets=_with_device_times(view, found), communication=found.waits(windows, buckets, unknown))


def _with_device_times(view: TableView, found: ModelCollectives) -> _Times:
    """The buckets of a view with the times of their reductions on a device."""
    of = found.reductions(view.buckets.shape[1])
    if not len(of):
        return view.buckets
    made: _Times = view.buckets.copy()
    place = found.row[of], found.group[of]
    begin, end, reduced = (made[:, :, BUCKET_FIELDS.index(name)] for name in ("device_begin", "device_end", "reduced"))
    begin[place] = np.iinfo(np.int64).max
    np.minimum.at(begin, place, found.entered[of])
    for column in (end, reduced):
        np.maximum.at(column, place, found.ended[of])
    return made


def parameter_group_columns(
    parts: Sequence[tuple[TableView, ModelCollectives]], described: Mapping[tuple[int, int], Mapping[str, Any]]
) -> Columns:
    """The columns of `Timeline.parameter_groups`: one row for each rank, step and parameter group.

    Args:
        parts: a view and its collectives for each rank and model.
        described: (model, generation) -> description.
    """
    made = [_columns_of(view, found, described) for view, found in parts]
    return {name: joined([one[name] for one in made]) for name in PARAMETER_GROUP_COLUMNS}


def _columns_of(
    view: TableView, found: ModelCollectives, described: Mapping[tuple[int, int], Mapping[str, Any]]
) -> Columns:
    known = [described.get((view.reducer, generation)) for generation in view.generation.tolist()]
    layouts = [one["buckets"] if one is not None else [] for one in known]
    sizes = np.array([len(one) for one in layouts], np.int64)
    row = np.repeat(np.arange(len(view.step)), sizes)
    group = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    about = [bucket for one in layouts for bucket in one]
    first = np.cumsum(sizes) - sizes
    valid = (found.group >= 0) & (found.group < sizes[found.row])
    target = first[found.row[valid]] + found.group[valid]
    kind, told, ended = found.kind[valid], found.told[valid], found.ended[valid]
    took, waited = np.where(ended > 0, ended - found.entered[valid], 0) / 1e6, found.wait_ns[valid] / 1e6

    def summed(values: npt.NDArray[Any], chosen: _Flags) -> _Values:
        return np.bincount(target[chosen], weights=values[chosen], minlength=len(row)).astype(np.float64)

    made: Columns = {
        "rank": np.full(len(row), view.rank),
        "reducer": np.full(len(row), view.reducer),
        "step": view.step[row],
        "generation": view.generation[row],
        "group": group,
        "module": np.array([str(one.get("name", "")) for one in about], object),
        "complete": view.steps[row, _F["backward_end"]] > 0,
        **{name: np.array([int(one.get(name, 0)) for one in about], np.int64) for name in _HELD},
    }
    for number, name in enumerate(KINDS):
        of = kind == number
        made[f"{name}_ms"] = summed(took, of)
        made[f"{name}_exposed_ms"] = np.where(summed(~told, of) > 0, np.nan, summed(waited, of))
    ones, ahead, size = np.ones(len(target)), found.ahead[valid], found.bytes[valid]
    for number, name in ((_FORWARD, "forward"), (_BACKWARD, "backward")):
        made[f"{name}_unshards"] = summed(ones, kind == number).astype(np.int64)
        made[f"{name}_prefetched"] = summed(ones, (kind == number) & ahead) > 0
    made["gathered_bytes"] = summed(size, kind < 2).astype(np.int64)
    scattered = summed(size, kind == 2)  # what is all-reduced afterwards are parts of it
    made["reduced_bytes"] = np.where(scattered > 0, scattered, summed(size, kind == 3)).astype(np.int64)
    return made


_HELD = ("sharded_bytes", "unsharded_bytes")
