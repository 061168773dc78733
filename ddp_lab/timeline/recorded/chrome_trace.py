"""Spans, gradients and steps as a Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open.

One process per rank, and one for what they do together. A rank's threads are the steps' phases, its gradients, one
track for each bucket and model, and one for each process group; the common process has a track for each bucket's
collectives, from the last rank's launch to the last rank's end. Arrows lead from the gradient that completes a bucket
to the bucket's collective on that rank, and on to that of all ranks. Format: "Trace Event Format": complete
events (``"ph": "X"``), flows (``s``, ``t``, ``f``), instants (``i``) and metadata (``M``); times in microseconds.

A large trace holds fewer gradients and arrows (`MOST_GRADIENTS`, `MOST_ARROWS`), and says so in its ``otherData``.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...files import replacing

__all__ = ["MOST_ARROWS", "MOST_GRADIENTS", "Trace", "write", "write_file"]

_Columns = Mapping[str, npt.NDArray[Any]]

MOST_GRADIENTS = 250_000
"""If there are more gradients, only those that complete a bucket get a slice."""
MOST_ARROWS = 100_000
"""If there are more arrows, only those of the rank that launched last are kept, which the others waited for."""

_AT_ONCE = 16_384  # objects that are written together
_TOGETHER = 1_000_000  # process of the collectives
# Threads of a model: phases, gradients, one for each bucket on the host and one for it on the device.
_PHASES_THREAD, _GRADIENTS_THREAD, _BUCKETS_THREAD, _DEVICE_THREADS = 1, 2, 3, 500_000
_THREADS_PER_REDUCER = 1_000_000
_GROUPS_THREAD = 900_000  # of the process groups, among those of model 0
_PHASES = (
    ("forward", "forward_begin_ns", "forward_end_ns"),
    ("backward", "backward_begin_ns", "finalize_ns"),
    ("wait for gradients", "finalize_ns", "backward_end_ns"),
)
_BUCKET_PHASES = (("fill", "first_ready_ns", "ready_ns"), ("in line", "ready_ns", "launched_ns"))
_SHORTEST_LINE_NS = 1_000  # a bucket that is launched at once was in no line


class _Sink(Protocol):
    """A file, or what compresses for one."""

    def write(self, data: bytes, /) -> object:
        """Takes bytes."""


@dataclass(frozen=True)
class Trace:
    """The data of a trace.

    Attributes:
        spans: columns of `Timeline.spans()`.
        steps: columns of `Timeline.steps()`.
        gradients: columns of `gradient_columns`; if there are many, only those that complete a bucket are needed.
        modules: reducer -> class name of the model.
        names: reducer -> qualified names of its parameters.
        marks: (rank, time in ns, name) of `recording.mark`.
        notes: sentences about what is omitted.
        operations: columns of `Timeline.collectives()`.
        groups: number of a process group -> its name.
    """

    spans: _Columns
    steps: _Columns
    gradients: _Columns
    modules: Mapping[int, str]
    names: Mapping[int, Sequence[str]]
    marks: Sequence[tuple[int, int, str]] = ()
    notes: Sequence[str] = ()
    operations: _Columns | None = None
    groups: Mapping[int, str] = field(default_factory=dict)


class _Events:
    """The trace's events, as they are written: objects of a JSON array, separated by commas."""

    def __init__(self, file: _Sink) -> None:
        self._file, self._comma = file, b""
        self.tracks: set[tuple[int, int]] = set()  # (process, thread) of the slices

    def texts(self, objects: Iterable[str]) -> None:
        """Writes objects that are text already."""
        objects = iter(objects)
        while piece := ",\n".join(itertools.islice(objects, _AT_ONCE)):
            self._file.write(self._comma + piece.encode())
            self._comma = b",\n"

    def rows(self, template: str, *columns: npt.NDArray[Any] | list[str]) -> None:
        """Writes a template for each row of the columns, which take the places of its ``%``."""
        for first in range(0, len(columns[0]), _AT_ONCE):
            pieces = (one[first : first + _AT_ONCE] for one in columns)
            lists = (one if isinstance(one, list) else one.tolist() for one in pieces)
            self.texts(map(template.__mod__, zip(*lists, strict=True)))

    def slices(
        self, name: str, process: npt.NDArray[Any], thread: npt.NDArray[Any], begin: npt.NDArray[Any],
        end: npt.NDArray[Any], **arguments: npt.NDArray[Any],
    ) -> None:  # fmt: skip
        """Writes complete events of one name; events that have not happened or not ended are omitted.

        Args:
            name: of all of them.
            process, thread: their track.
            begin, end: ns.
            arguments: what a click shows: integers first, then ms as floats; those that are NaN are left out, as
                JSON has none.
        """
        shown = np.flatnonzero((begin > 0) & (end >= begin))
        tracks = np.unique([process[shown], thread[shown]], axis=1)
        self.tracks.update(zip(*tracks.tolist(), strict=True))
        for first in range(0, len(shown), _AT_ONCE):
            some = shown[first : first + _AT_ONCE]
            told = {key: values[some] for key, values in arguments.items()}
            self._slices(name, process[some], thread[some], begin[some], end[some], told)

    def _slices(
        self, name: str, process: npt.NDArray[Any], thread: npt.NDArray[Any], begin: npt.NDArray[Any],
        end: npt.NDArray[Any], arguments: _Columns,
    ) -> None:  # fmt: skip
        told: list[npt.NDArray[Any] | list[str]] = []
        words: list[str] = []
        for key, values in arguments.items():
            comma = "," if words else ""
            if values.dtype.kind == "f":
                words.append("%s")
                told.append([f'{comma}"{key}":{ms:.6f}' if ms == ms else "" for ms in values.tolist()])
            else:
                words.append(f'{comma}"{key}":%d')
                told.append(values)
        title = json.dumps(name).replace("%", "%%")
        template = f'{{"name":{title},"ph":"X","pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,"args":{{{"".join(words)}}}}}'
        self.rows(template, process, thread, begin / 1e3, (end - begin) / 1e3, *told)


def write_file(target: Path, trace: Trace) -> Path:
    """Writes the trace to a file, compressed if its name ends in ``.gz``."""
    with replacing(target) as file:
        if target.suffix == ".gz":
            with gzip.GzipFile(target.stem, "wb", 1, file) as packed:
                write(packed, trace)
        else:
            write(file, trace)
    return target


def write(file: _Sink, trace: Trace) -> None:
    """Writes the trace as one JSON object."""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    events, notes = _Events(file), list(trace.notes)
    whole = _together(trace.spans)
    arrows = _arrows(trace, whole)
    shown = _shown_gradients(trace, arrows)
    if not arrows.of_every_rank:
        notes.append("Arrows, and gradients at their beginning, only of the rank that launched last.")
    elif len(shown["rank"]) and shown["completes"].all():
        notes.append("Of each bucket's gradients only the one that completes it.")
    steps = trace.steps
    for name, begin, end in _PHASES:
        threads = _thread(steps, _PHASES_THREAD)
        events.slices(name, steps["rank"], threads, steps[begin], steps[end], step=steps["step"])
    _buckets(events, trace.spans)
    _gradients(events, trace, shown)
    _collectives(events, trace.spans, whole)
    _flows(events, arrows)
    if trace.operations is not None:
        _operations(events, trace.operations)
    events.texts(
        f'{{"name":{json.dumps(name)},"ph":"i","s":"p","pid":{rank},"tid":{_PHASES_THREAD},"ts":{at / 1e3!r}}}'
        for rank, at, name in trace.marks
    )
    events.texts(map(json.dumps, _names(events.tracks, trace.modules, trace.groups)))
    about = f',"otherData":{json.dumps({"notes": " ".join(notes)})}' if notes else ""
    file.write(f"\n]{about}}}\n".encode())


def _thread(columns: _Columns, which: int) -> npt.NDArray[Any]:
    return np.asarray(columns["reducer"] * _THREADS_PER_REDUCER + which)


def _bucket_thread(columns: _Columns) -> npt.NDArray[Any]:
    return np.asarray(_thread(columns, _BUCKETS_THREAD) + columns["bucket"])


def _buckets(events: _Events, spans: _Columns) -> None:
    threads, rank, step = _bucket_thread(spans), spans["rank"], spans["step"]
    for name, begin, end in _BUCKET_PHASES:
        least = _SHORTEST_LINE_NS if name == "in line" else 0
        shown = spans[end] - spans[begin] >= least
        events.slices(name, rank[shown], threads[shown], spans[begin][shown], spans[end][shown], step=step[shown])
    told = {key: spans[key] for key in ("step", "bucket", "bytes", "n_parameters", "hidden_ms", "exposed_ms")}
    events.slices("all_reduce", rank, threads, spans["launched_ns"], spans["reduced_ns"], **told)
    device = threads + _DEVICE_THREADS
    events.slices("all_reduce (device)", rank, device, spans["device_begin_ns"], spans["device_end_ns"], step=step)


def _shown_gradients(trace: Trace, arrows: _Arrows) -> _Columns:
    """All of them; of many those that complete a bucket; of very many those at which an arrow begins."""
    found = trace.gradients
    if not arrows.of_every_rank:
        return {name: column[arrows.gradient] for name, column in found.items()}
    if len(found["rank"]) > MOST_GRADIENTS:
        return {name: column[found["completes"]] for name, column in found.items()}
    return found


def _gradients(events: _Events, trace: Trace, found: _Columns) -> None:
    threads = _thread(found, _GRADIENTS_THREAD)
    order = np.lexsort((found["parameter"], found["reducer"]))
    key = np.stack([found["reducer"][order], found["parameter"][order]])
    begins = np.flatnonzero(np.diff(key, axis=1, prepend=-1).any(axis=0))
    for chosen in np.split(order, begins)[1:]:
        reducer, parameter = int(found["reducer"][chosen[0]]), int(found["parameter"][chosen[0]])
        names = trace.names.get(reducer, ())
        title = names[parameter] if parameter < len(names) else f"parameter {parameter}"
        begin, end = found["begin_ns"][chosen], found["end_ns"][chosen]
        told = {name: found[name][chosen] for name in ("step", "bucket")}
        events.slices(title, found["rank"][chosen], threads[chosen], begin, np.maximum(end, begin + 1), **told)


@dataclass(frozen=True)
class _Whole:
    """Spans by collective: rows of `spans` sorted by (reducer, step, bucket), and where each collective begins."""

    rows: npt.NDArray[np.intp]
    first: npt.NDArray[np.intp]
    of_row: npt.NDArray[np.intp]  # which collective a sorted row belongs to
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]


def _together(spans: _Columns) -> _Whole:
    """The collectives that have ended on every rank that launched them."""
    done = np.flatnonzero((spans["launched_ns"] > 0) & (spans["reduced_ns"] > 0))
    order = np.lexsort((spans["bucket"][done], spans["step"][done], spans["reducer"][done]))
    rows = done[order]
    key = np.stack([spans[name][rows] for name in ("reducer", "step", "bucket")])
    new = np.diff(key, axis=1, prepend=-1).any(axis=0)
    first = np.flatnonzero(new)
    times = (spans[name][rows] for name in ("launched_ns", "reduced_ns"))
    begin, end = (np.maximum.reduceat(one, first) if len(first) else one for one in times)
    return _Whole(rows, first, np.cumsum(new) - 1, begin, end)


def _collectives(events: _Events, spans: _Columns, whole: _Whole) -> None:
    first = {name: spans[name][whole.rows[whole.first]] for name in ("reducer", "bucket", "step", "bytes")}
    process = np.full(len(whole.first), _TOGETHER)
    told = {name: first[name] for name in ("step", "bytes")}
    events.slices("collective", process, _bucket_thread(first), whole.begin, whole.end, **told)


def _operations(events: _Events, found: _Columns) -> None:
    """Those of process groups, from the rank's entering to the end."""
    threads = _GROUPS_THREAD + found["group"]
    for name in sorted(set(found["operation"].tolist())):
        of = found["operation"] == name
        told = {key: found[key][of] for key in ("sequence", "bytes", "peer", "last_rank", "wait_ms", "waited_ms")}
        events.slices(name, found["rank"][of], threads[of], found["entered_ns"][of], found["ended_ns"][of], **told)


@dataclass(frozen=True)
class _Arrows:
    """Gradient that completes a bucket, the rank's collective, everybody's collective: a row for each; times in ns."""

    rank: npt.NDArray[Any]
    gradient_thread: npt.NDArray[Any]
    bucket_thread: npt.NDArray[Any]
    gradient: npt.NDArray[np.intp]  # row of the trace's gradients
    begins: npt.NDArray[Any]
    launched: npt.NDArray[Any]
    middle: npt.NDArray[Any]
    of_every_rank: bool


def _arrows(trace: Trace, whole: _Whole) -> _Arrows:
    spans, rows, of = trace.spans, whole.rows, whole.of_row
    every = len(rows) <= MOST_ARROWS
    if not every:
        last = np.flatnonzero(spans["launched_ns"][rows] == whole.begin[of])
        rows, of = rows[last], of[last]
    starts = _completing(trace.gradients, {name: spans[name][rows] for name in ("reducer", "step", "bucket", "rank")})
    found = np.flatnonzero(starts >= 0)
    rows, of, starts = rows[found], of[found], starts[found]
    begins = (trace.gradients["begin_ns"] + trace.gradients["end_ns"])[starts] // 2
    launched = spans["launched_ns"][rows]
    known = (begins > 0) & (begins <= launched)
    rows, of, starts = rows[known], of[known], starts[known]
    return _Arrows(
        rank=spans["rank"][rows],
        gradient_thread=_thread(spans, _GRADIENTS_THREAD)[rows],
        bucket_thread=_bucket_thread(spans)[rows],
        gradient=starts,
        begins=begins[known],
        launched=launched[known],
        middle=((whole.begin + whole.end) // 2)[of],
        of_every_rank=every,
    )


def _flows(events: _Events, arrows: _Arrows) -> None:
    """Arrows: the gradient that completes a bucket, the rank's collective, everybody's collective."""
    head, number = '{"name":"bucket","cat":"flow","ph":', np.arange(len(arrows.rank))
    place = '"id":%d,"pid":%d,"tid":%d,"ts":%.3f}'
    template = f'{head}"s",{place},\n{head}"t",{place},\n{head}"f","bp":"e",{place}'
    first = (number, arrows.rank, arrows.gradient_thread, arrows.begins / 1e3)
    second = (number, arrows.rank, arrows.bucket_thread, arrows.launched / 1e3)
    third = (number, np.full(len(number), _TOGETHER), arrows.bucket_thread, arrows.middle / 1e3)
    events.rows(template, *first, *second, *third)


def _completing(gradients: _Columns, wanted: _Columns) -> npt.NDArray[np.intp]:
    """For each wanted (reducer, step, bucket, rank) the row of the gradient that completed the bucket; -1 for none."""
    found = np.flatnonzero(gradients["completes"])
    if not len(found):
        return np.full(len(wanted["rank"]), -1, np.intp)
    names = ("reducer", "step", "bucket", "rank")
    spread = [1 + max(int(gradients[name][found].max()), int(wanted[name].max(initial=0))) for name in names]
    keys = np.ravel_multi_index([gradients[name][found] for name in names], spread)
    order = np.argsort(keys)
    asked = np.ravel_multi_index([wanted[name] for name in names], spread)
    place = np.minimum(np.searchsorted(keys, asked, sorter=order), len(keys) - 1)
    return np.where(keys[order[place]] == asked, found[order[place]], -1)


def _names(tracks: set[tuple[int, int]], modules: Mapping[int, str], groups: Mapping[int, str]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for process in sorted({process for process, _ in tracks}):
        name = "all ranks" if process == _TOGETHER else f"rank {process}"
        made.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}})
        order = {"sort_index": -1 if process == _TOGETHER else process}
        made.append({"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": order})
    for process, thread in sorted(tracks):
        common = {"ph": "M", "pid": process, "tid": thread}
        made.append({"name": "thread_name", **common, "args": {"name": _thread_name(thread, modules, groups)}})
        made.append({"name": "thread_sort_index", **common, "args": {"sort_index": thread}})
    return made


def _thread_name(thread: int, modules: Mapping[int, str], groups: Mapping[int, str]) -> str:
    reducer, which = divmod(thread, _THREADS_PER_REDUCER)
    if which >= _GROUPS_THREAD:
        return groups.get(which - _GROUPS_THREAD, "process group")
    if which == _PHASES_THREAD:
        return f"{modules.get(reducer, '?')} [{reducer}]"
    if which == _GRADIENTS_THREAD:
        return f"[{reducer}] gradients"
    of_device, bucket = divmod(which, _DEVICE_THREADS)
    return f"[{reducer}] bucket {bucket - _BUCKETS_THREAD}{' on the device' if of_device else ''}"
