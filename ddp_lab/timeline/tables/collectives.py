"""Every operation of every process group: a row for each on each rank, and who was last in it.

Rows come from events of the kinds from `COLLECTIVE_ENTERED` on (`csrc/record/event.h`). A rank's table is a ring of its
newest operations; what it has forgotten is counted. Operations of a group have the same number on all its members, so
rows of several ranks are matched without clocks; those of sends and receives by sender, receiver and number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...formatting import label_of, line_name
from ...protocol.events import Kind
from .span_columns import Columns

__all__ = ["CollectiveTable", "GroupInfo", "collective_columns", "operation_name", "purpose_of"]

_Array = npt.NDArray[np.int64]
_MOST = 1 << 14  # rows of a rank
_FIRST = 256
_MOST_OPEN = 4096  # of the newest rows, those in which an end is looked for
_FIELDS = (
    *("key", "group", "call", "peer", "sequence", "bytes", "entered", "ended", "device_begin", "device_end"),
    *("failed", "unseen", "wait_begin", "wait_ns", "waited_at"),
)
_AT = _FIELDS.index("entered")
_ENTERED, _ENDED, _FAILED = map(int, (Kind.COLLECTIVE_ENTERED, Kind.COLLECTIVE_ENDED, Kind.COLLECTIVE_FAILED))
_WAIT_BEGIN, _WAIT_END, _UNSEEN = map(int, (Kind.WAIT_BEGIN, Kind.WAIT_END, Kind.END_UNSEEN))
_STATES = np.array(["running", "complete", "failed", "unseen"], object)
# What a ring of n ranks moves over each of its links, in units of the bytes (those of the larger side).
_PARTS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
# c10d's operators, by the names that `torch.distributed` has for them; several tensors at once are "coalesced".
_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_TEXTS = ("dtype", "reduction", "function", "module", "use")
_VARIANTS = ("_base", "_into_tensor", "_tensor")


@dataclass(frozen=True)
class GroupInfo:
    """One process group.

    Attributes:
        group: its number on this timeline.
        name: c10d's name.
        description: c10d's description, ``""`` if it has none.
        mesh_dimension: name of the dimension of a `DeviceMesh` whose group it is, ``""`` if it is none.
        ranks: global ranks in the order of the group.
        backend: its backend, e.g. ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
    """

    group: int
    name: str
    description: str
    mesh_dimension: str
    ranks: tuple[int, ...]
    backend: str

    @property
    def title(self) -> str:
        """What a reader calls it, without its ranks."""
        if self.mesh_dimension:
            return f"mesh {self.mesh_dimension}"
        if self.description and self.description not in ("default_pg", "undefined"):
            return self.description
        return "default group" if self.description == "default_pg" else f"group {self.name}"

    def __str__(self) -> str:
        """Its title and its ranks."""
        return f"{self.title} ({label_of(set(self.ranks))})"


class CollectiveTable:
    """The newest operations of one rank, in the order in which it entered them.

    Attributes:
        entered: how many it has entered.
    """

    def __init__(self) -> None:
        self._rows = np.zeros((_FIRST, len(_FIELDS)), np.int64)
        self.entered = 0
        self._open = 0  # number of the oldest row that has not ended

    @property
    def forgotten(self) -> int:
        """How many are no longer kept."""
        return max(0, self.entered - len(self._rows))

    def first(self, newest: int | None = None) -> int:
        """How many are older than the newest ones, or than all that are kept."""
        return self.forgotten if newest is None else max(self.forgotten, self.entered - newest)

    def extend(self, events: npt.NDArray[np.void]) -> None:
        """Takes events of this rank, of these kinds alone, in the order of their sequence numbers."""
        if not len(events):
            return
        keys, kind = _keys(events), events["kind"]
        entered = kind == _ENTERED
        if entered.any():
            self._append(events[entered], keys[entered])
        if not entered.all():
            self._end(events[~entered], keys[~entered])
        self._advance()

    def oldest(self) -> int:
        """When the oldest one that is kept was entered, in ns; 0 if there is none."""
        return int(self._rows[self.forgotten % len(self._rows), _AT]) if self.entered else 0

    def rows(self, newest: int | None = None, since: int = 0, older: int = 0) -> dict[str, _Array]:
        """A copy of the rows by field, the oldest first; times in ns, 0 if not known.

        Args:
            newest: how many; None for all that are kept.
            since: those that were entered at this time (ns) or later.
            older: and how many of those before it.
        """
        numbers = np.arange(self.first(newest), self.entered) % len(self._rows)
        if since:
            earlier = int((self._rows[numbers, _AT] < since).sum())  # nearly: threads enter operations in any order
            numbers = numbers[max(0, earlier - older) :] if older else numbers[self._rows[numbers, _AT] >= since]
        return dict(zip(_FIELDS, self._rows[numbers].T.copy(), strict=True))

    def _append(self, events: npt.NDArray[np.void], keys: _Array) -> None:
        while self.entered + len(events) > len(self._rows) < _MOST:
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        gone = max(0, len(events) - len(self._rows))
        self.entered += gone
        events, keys = events[gone:], keys[gone:]
        made = np.zeros((len(events), len(_FIELDS)), np.int64)
        made[:, 0] = keys
        for column, name in enumerate(("process_group", "parameter", "bucket", "step", "bytes", "host_ns"), 1):
            made[:, column] = events[name]
        self._rows[np.arange(self.entered, self.entered + len(made)) % len(self._rows)] = made
        self.entered += len(made)

    def _end(self, events: npt.NDArray[np.void], keys: _Array) -> None:
        numbers = np.arange(max(self._open, self.forgotten, self.entered - _MOST_OPEN), self.entered)
        if not len(numbers):
            return
        place = numbers % len(self._rows)
        known = self._rows[place, 0]
        order = np.argsort(known, kind="stable")
        at = np.minimum(np.searchsorted(known[order], keys, side="right") - 1, len(known) - 1)
        row = place[order[np.maximum(at, 0)]]
        found = (at >= 0) & (self._rows[row, 0] == keys)
        events, row = events[found], row[found]
        field, kind, host = _FIELDS.index, events["kind"], events["host_ns"]
        ended = (kind == _ENDED) | (kind == _FAILED)
        for name, values in (
            ("ended", np.where(events["device_end_ns"] != 0, events["device_end_ns"], host)),
            ("device_begin", events["device_begin_ns"]),
            ("device_end", events["device_end_ns"]),
            ("failed", kind == _FAILED),
        ):
            self._rows[row[ended], field(name)] = values[ended]
        self._rows[row[kind == _UNSEEN], field("unseen")] = 1
        for one in (_WAIT_BEGIN, _WAIT_END):  # a begin comes before its end; both may be in one batch
            chosen = kind == one
            if one == _WAIT_BEGIN:
                self._rows[row[chosen], field("wait_begin")] = host[chosen]
            else:
                chosen &= events["device_end_ns"] == 0
                begin = self._rows[row[chosen], field("wait_begin")]
                self._rows[row[chosen], field("wait_ns")] += np.where(begin != 0, host[chosen] - begin, 0)
        self._take_device_waits(events, row)

    def _take_device_waits(self, events: npt.NDArray[np.void], row: _Array) -> None:
        """Begin and end of the wait of a device's stream come in one event, with the host's time at which the host came
        to it; the stream may wait more than once."""
        chosen = (events["kind"] == _WAIT_END) & (events["device_end_ns"] != 0)
        begin_at, ns_at, host_at = map(_FIELDS.index, ("wait_begin", "wait_ns", "waited_at"))
        begin, end = events["device_begin_ns"][chosen], events["device_end_ns"][chosen]
        spans = zip(
            row[chosen].tolist(), begin.tolist(), (end - begin).tolist(), events["host_ns"][chosen], strict=True
        )
        for place, first, ns, host in spans:
            if not self._rows[place, begin_at]:
                self._rows[place, [begin_at, host_at]] = first, host
            self._rows[place, ns_at] += max(1, ns)

    def _advance(self) -> None:
        """Moves `_open` to the oldest row that may still change; a wait ends after what it waits for."""
        self._open = max(self._open, self.forgotten)
        numbers = np.arange(self._open, self.entered)
        rows = self._rows[numbers % len(self._rows)]
        waits = (rows[:, _FIELDS.index("wait_begin")] != 0) & (rows[:, _FIELDS.index("wait_ns")] == 0)
        open_ended = (rows[:, _FIELDS.index("ended")] == 0) & (rows[:, _FIELDS.index("unseen")] == 0)
        still = np.flatnonzero(open_ended | waits)
        # A thread may begin to wait for what has just ended, and of a device its wait is told then: the newest stay.
        first = int(numbers[still[0]]) if len(still) else self.entered
        self._open = max(self._open, first - _FIRST // 4)


def _keys(events: npt.NDArray[np.void]) -> _Array:
    """What the events of one operation of a rank have in common, in one number."""
    parts = ((events["process_group"], 12), (events["parameter"], 13), (events["bucket"], 15), (events["step"], 23))
    key = np.zeros(len(events), np.int64)
    for values, bits in parts:
        key = (key << bits) | ((values.astype(np.int64) + 1) & ((1 << bits) - 1))
    return key


def collective_columns(
    by_rank: Mapping[int, Mapping[str, _Array]], groups: Mapping[int, GroupInfo], calls: Sequence[Mapping[str, Any]]
) -> Columns:
    """The columns of `Timeline.collectives`, by rank in the order in which it entered them.

    Args:
        by_rank: rank -> its `CollectiveTable.rows`.
        groups: by their numbers.
        calls: descriptions of type ``"call"`` by their numbers.
    """
    parts = [{"rank": np.full(len(rows["key"]), rank), **rows} for rank, rows in sorted(by_rank.items())]
    names = ("rank", *_FIELDS)
    rows = {name: np.concatenate([np.empty(0, np.int64), *(part[name] for part in parts)]) for name in names}
    told = _told(rows["call"], calls)
    ended = rows["ended"]
    state = np.select([rows["failed"] != 0, ended > 0, rows["unseen"] != 0], [2, 1, 3], 0)
    columns: Columns = {
        "rank": rows["rank"],
        "group": rows["group"],
        "operation": told["operation"],
        "sequence": rows["sequence"],
        "peer": _peers(rows, groups),
        "bytes": rows["bytes"],
        **{
            name: told[name]
            for name in ("dtype", "reduction", "place", "function", "module", "use", "reducer", "bucket")
        },
        "entered_ns": rows["entered"],
        "ended_ns": ended,
        "device_begin_ns": rows["device_begin"],
        "device_end_ns": rows["device_end"],
        "state": _STATES[state],
        "ms": np.where(ended > 0, (ended - rows["entered"]) / 1e6, np.nan),
        "waited_ms": rows["wait_ns"] / 1e6,
    }
    return columns | _together(columns, groups)


def operation_name(operator: str) -> str:
    """What `torch.distributed` calls an operator of c10d."""
    name = operator.strip("_")
    for variant in _VARIANTS:
        name = name.replace(variant, "")
    first = next((one for one in _NAMES if name.startswith(one)), "")
    return _NAMES[first] + name.removeprefix(first) if first else name


def _told(index: _Array, calls: Sequence[Mapping[str, Any]]) -> dict[str, npt.NDArray[Any]]:
    """What the calls say, for each row; texts are "" and numbers -1 where they say nothing."""
    place = [line_name(str(one["file"]), one["line"]) if one.get("file") else "" for one in calls]
    found = {
        "operation": [operation_name(str(one["operation"])) for one in calls],
        "place": place,
        **{name: [str(one.get(name, "")) for one in calls] for name in _TEXTS},
    }
    chosen = np.where((index >= 0) & (index < len(calls)), index, len(calls))
    made = {name: np.array([*values, ""], object)[chosen] for name, values in found.items()}
    for name in ("reducer", "bucket"):
        made[name] = np.array([*(int(one.get(name, -1)) for one in calls), -1], np.int64)[chosen]
    return made


def _peers(rows: Mapping[str, _Array], groups: Mapping[int, GroupInfo]) -> _Array:
    """Global ranks of the other side of sends and receives, -1 for none."""
    peers: _Array = rows["peer"].copy()
    for number in np.unique(rows["group"][peers >= 0]).tolist():
        ranks = np.array(groups[number].ranks if number in groups else (), np.int64)
        of = (rows["group"] == number) & (peers >= 0) & (peers < len(ranks))
        peers[of] = ranks[peers[of]]
    return peers


def _together(columns: Columns, groups: Mapping[int, GroupInfo]) -> Columns:
    """Who was last in each operation, and how long the others waited: over the rows of all its ranks."""
    order, starts, sizes = _matched(columns, groups)
    count, entered = len(order), columns["entered_ns"]
    lengths = np.diff([*starts.tolist(), count])
    of = np.empty(count, np.int64)  # row -> its operation
    of[order] = np.repeat(np.arange(len(starts)), lengths)
    first, final = entered[order[starts]], order[starts + lengths - 1]
    whole = (lengths >= sizes)[of]
    begin = np.where(whole, entered[final][of], 0)
    transfer = np.where((columns["ended_ns"] > begin) & whole, (columns["ended_ns"] - begin) / 1e6, np.nan)
    factor = np.array(
        [_bus_factor(str(columns["operation"][row]), int(n)) for row, n in zip(final, sizes, strict=True)]
    )
    return {
        "ranks": lengths[of],
        "last_rank": np.where(whole, columns["rank"][final][of], -1),
        "late_ms": (entered - first[of]) / 1e6,
        "wait_ms": np.where(whole, (begin - entered) / 1e6, np.nan),
        "transfer_ms": transfer,
        "bus_gb_s": factor[of] * columns["bytes"] / transfer / 1e6 if count else transfer,
    }


def _bus_factor(operation: str, ranks: int) -> float:
    parts = next((parts for name, parts in _PARTS.items() if name in operation), None)
    return 1.0 if parts is None else parts * (ranks - 1) / max(ranks, 1)


def _matched(columns: Columns, groups: Mapping[int, GroupInfo]) -> tuple[_Array, _Array, _Array]:
    """Rows ordered by operation and time; where each operation begins in that order; how many ranks each has."""
    operation, rank, peer = columns["operation"], columns["rank"], columns["peer"]
    sends = operation == "send"
    directed = sends | np.array([one.startswith("recv") for one in operation.tolist()], bool)
    source, target = np.where(sends, rank, peer), np.where(sends, peer, rank)
    between = np.where(directed, (source + 1) * (1 << 31) + target + 1, 0)
    keys = (columns["sequence"], between, columns["group"])
    order = np.lexsort((columns["entered_ns"], *keys))
    if not len(order):
        return order, np.empty(0, np.int64), np.empty(0, np.int64)
    changes = np.any([np.diff(one[order]) != 0 for one in keys], axis=0)
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    members = {number: len(one.ranks) for number, one in groups.items()}
    leads = order[starts]
    sizes = [2 if directed[row] else members.get(int(columns["group"][row]), 1) for row in leads.tolist()]
    return order, starts, np.array(sizes, np.int64)


def purpose_of(columns: Mapping[str, npt.NDArray[Any]], row: int) -> str:
    """What an operation is for: a module's parameters, or a model's bucket; ``""`` if it is not known."""
    if columns["module"][row]:
        return f"module {columns['module'][row]}"
    if columns["use"][row] == "buffers":
        return "the buffers"
    if columns["reducer"][row] < 0:
        return ""
    return "the root module" if columns["use"][row] else f"bucket {columns['bucket'][row]}"
