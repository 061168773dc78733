"""Spans, gradients and steps as a Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open.

One process per rank, and one for what they do together. A rank's threads are the steps' phases, its gradients, and
one track for each bucket and model; the common process has a track for each bucket's collectives, from the last
rank's launch to the last rank's end. Arrows lead from the gradient that completes a bucket to the bucket's collective
on that rank, and on to the collective of all ranks. Format: "Trace Event Format": complete events (``"ph": "X"``),
flows (``s``, ``t``, ``f``), instants (``i``) and metadata (``M``); times in microseconds.

A large trace holds less of what is many (`MOST_GRADIENTS`, `MOST_ARROWS`), and says so in its ``otherData``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .json_rows import JsonRows, Number, Sink

__all__ = ["MOST_ARROWS", "MOST_GRADIENTS", "Trace", "write"]

_Columns = Mapping[str, npt.NDArray[Any]]

MOST_GRADIENTS = 250_000
"""Of more gradients only those that complete a bucket get a slice."""
MOST_ARROWS = 100_000
"""Of more arrows only those of the rank that launched last, for which the others waited."""

_TOGETHER = 1_000_000  # process of the collectives
_PHASES_THREAD, _GRADIENTS_THREAD, _BUCKETS_THREAD = 1, 2, 3
_THREADS_PER_REDUCER, _DEVICE_THREADS = 10_000, 1_000_000
_PHASES = (
    ("forward", "forward_begin_ns", "forward_end_ns"),
    ("backward", "backward_begin_ns", "finalize_ns"),
    ("wait for gradients", "finalize_ns", "backward_end_ns"),
)
_BUCKET_PHASES = (("fill", "first_ready_ns", "ready_ns"), ("in line", "ready_ns", "launched_ns"))
_SHORTEST_LINE_NS = 1_000  # a bucket that is launched at once was in no line


@dataclass(frozen=True)
class Trace:
    """What is written.

    Attributes:
        spans: columns of `Timeline.spans()`.
        steps: columns of `Timeline.steps()`.
        gradients: columns of `gradient_columns`; of many only those that complete a bucket are needed.
        modules: reducer -> class name of the model.
        names: reducer -> qualified names of its parameters.
        marks: (rank, time in ns, name) of what `recording.mark` recorded.
        notes: sentences on what is left out.
    """

    spans: _Columns
    steps: _Columns
    gradients: _Columns
    modules: Mapping[int, str]
    names: Mapping[int, Sequence[str]]
    marks: Sequence[tuple[int, int, str]] = ()
    notes: Sequence[str] = ()
    used: dict[tuple[int, int], str] = field(default_factory=dict, init=False)  # (process, thread) -> its name


def write(file: Sink, trace: Trace) -> None:
    """Writes the trace as one JSON object."""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    rows = JsonRows(file)
    notes = list(trace.notes)
    arrows = _arrows(trace)
    shown = _shown_gradients(trace, arrows)
    if arrows is not None and not arrows.of_every_rank:
        notes.append("Arrows, and gradients at their beginning, only of the rank that launched last.")
    elif len(shown["rank"]) and shown["completes"].all():
        notes.append("Of each bucket's gradients only the one that completes it.")
    _phases(rows, trace)
    _buckets(rows, trace)
    _gradients(rows, trace, shown)
    _collectives(rows, trace)
    if arrows is not None:
        _flows(rows, arrows)
    rows.texts(
        [
            f'{{"name":{json.dumps(name)},"ph":"i","s":"p","pid":{rank},"tid":{_PHASES_THREAD},"ts":{at / 1e3!r}}}'
            for rank, at, name in trace.marks
        ]
    )
    rows.texts(_names(trace.used))
    about = f',"otherData":{json.dumps({"notes": " ".join(notes)})}' if notes else ""
    file.write(f"\n]{about}}}\n".encode())


def _rows(*columns: npt.NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _slices(
    rows: JsonRows, name: str, process: npt.NDArray[Any], thread: npt.NDArray[Any], begin: npt.NDArray[Any],
    end: npt.NDArray[Any], **arguments: npt.NDArray[Any],
) -> None:  # fmt: skip
    """Complete events of one name; what has not happened or not ended is left out.

    Args:
        rows: where they go.
        name: of all of them.
        process, thread: their track.
        begin, end: ns.
        arguments: what a click shows: integers, or ms as floats, left out where they are NaN.
    """
    shown = np.flatnonzero((begin > 0) & (end >= begin))
    given = {key: values[shown] for key, values in arguments.items()}
    # JSON has no NaN: objects of equal text lack the same numbers.
    lacks = {key: np.isnan(values) for key, values in given.items() if values.dtype.kind == "f"}
    kinds = sum((2**place * flags.astype(np.int64) for place, flags in enumerate(lacks.values())), 0 * shown)
    for kind in np.unique(kinds).tolist():
        chosen = np.flatnonzero(kinds == kind)
        at, row = shown[chosen], chosen
        missing = {key for place, key in enumerate(lacks) if kind >> place & 1}
        parts: list[str | Number] = [
            f'{{"name":{json.dumps(name)},"ph":"X","pid":', Number(process[at]), ',"tid":', Number(thread[at]),
            ',"ts":', Number(begin[at], 3), ',"dur":', Number(end[at] - begin[at], 3), ',"args":{',
        ]  # fmt: skip
        comma = ""
        for key, values in given.items():
            if key not in missing:
                is_ms = values.dtype.kind == "f"
                parts += [f'{comma}"{key}":', Number(np.rint(values[row] * 1e6), 6) if is_ms else Number(values[row])]
                comma = ","
        rows.rows([*parts, "}}"])


def _thread(reducer: npt.NDArray[Any], which: npt.NDArray[Any] | int) -> npt.NDArray[Any]:
    return np.asarray(reducer * _THREADS_PER_REDUCER + which)


def _name_threads(trace: Trace, process: npt.NDArray[Any], thread: npt.NDArray[Any], names: Mapping[int, str]) -> None:
    """Notes the names of the threads that were used."""
    pairs = np.unique(np.stack([process, thread]), axis=1) if len(process) else np.zeros((2, 0), np.int64)
    for pid, tid in pairs.T.tolist():
        trace.used[pid, tid] = names[tid]


def _phases(rows: JsonRows, trace: Trace) -> None:
    steps = trace.steps
    if not len(steps["rank"]):
        return
    threads = _thread(steps["reducer"], _PHASES_THREAD)
    named = {int(_thread(np.asarray(r), _PHASES_THREAD)): f"{trace.modules.get(r, '?')} [{r}]" for r in _of(steps)}
    _name_threads(trace, steps["rank"], threads, named)
    for name, begin, end in _PHASES:
        _slices(rows, name, steps["rank"], threads, steps[begin], steps[end], step=steps["step"])


def _of(columns: _Columns) -> list[int]:
    return [int(reducer) for reducer in np.unique(columns["reducer"])]


def _bucket_threads(columns: _Columns) -> npt.NDArray[Any]:
    return _thread(columns["reducer"], _BUCKETS_THREAD + columns["bucket"])


def _buckets(rows: JsonRows, trace: Trace) -> None:
    spans = trace.spans
    if not len(spans["rank"]):
        return
    threads, rank, step = _bucket_threads(spans), spans["rank"], spans["step"]
    named = {
        int(thread): f"[{reducer}] bucket {bucket}"
        for thread, reducer, bucket in _rows(threads, spans["reducer"], spans["bucket"])
    }
    _name_threads(trace, rank, threads, named)
    for name, begin, end in _BUCKET_PHASES:
        least = _SHORTEST_LINE_NS if name == "in line" else 0
        shown = spans[end] - spans[begin] >= least
        _slices(rows, name, rank[shown], threads[shown], spans[begin][shown], spans[end][shown], step=step[shown])
    told = {key: spans[key] for key in ("step", "bucket", "bytes", "n_parameters", "hidden_ms", "exposed_ms")}
    _slices(rows, "all_reduce", rank, threads, spans["launched_ns"], spans["reduced_ns"], **told)
    on_device = spans["device_end_ns"] > 0
    if on_device.any():
        device = {thread + _DEVICE_THREADS: f"{name} on the device" for thread, name in named.items()}
        _name_threads(trace, rank[on_device], threads[on_device] + _DEVICE_THREADS, device)
        first, last = spans["device_begin_ns"], spans["device_end_ns"]
        _slices(rows, "all_reduce (device)", rank, threads + _DEVICE_THREADS, first, last, step=step)


def _shown_gradients(trace: Trace, arrows: _Arrows | None) -> _Columns:
    """All of them; of many those that complete a bucket; of very many those at which an arrow begins."""
    found = trace.gradients
    if arrows is not None and not arrows.of_every_rank:
        return {name: column[arrows.gradient] for name, column in found.items()}
    if len(found["rank"]) > MOST_GRADIENTS:
        return {name: column[found["completes"].astype(bool)] for name, column in found.items()}
    return found


def _gradients(rows: JsonRows, trace: Trace, found: _Columns) -> None:
    if not len(found["rank"]):
        return
    threads = _thread(found["reducer"], _GRADIENTS_THREAD)
    named = {int(_thread(np.asarray(r), _GRADIENTS_THREAD)): f"[{r}] gradients" for r in _of(found)}
    _name_threads(trace, found["rank"], threads, named)
    order = np.lexsort((found["parameter"], found["reducer"]))
    key = np.stack([found["reducer"][order], found["parameter"][order]])
    begins = np.flatnonzero(np.diff(key, axis=1, prepend=-1).any(axis=0))
    for chosen in np.split(order, begins[1:]):
        reducer, parameter = int(found["reducer"][chosen[0]]), int(found["parameter"][chosen[0]])
        names = trace.names.get(reducer, ())
        title = names[parameter] if parameter < len(names) else f"parameter {parameter}"
        begin, end = found["begin_ns"][chosen], found["end_ns"][chosen]
        told = {name: found[name][chosen] for name in ("step", "bucket")}
        _slices(rows, title, found["rank"][chosen], threads[chosen], begin, np.maximum(end, begin + 1), **told)


@dataclass(frozen=True)
class _Whole:
    """Spans by collective: rows of `spans` sorted by (reducer, step, bucket), and where each collective begins."""

    rows: npt.NDArray[np.intp]
    first: npt.NDArray[np.intp]
    of_row: npt.NDArray[np.intp]  # which collective a sorted row belongs to
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]


def _together(spans: _Columns) -> _Whole | None:
    """The collectives that have ended on every rank that launched them."""
    done = np.flatnonzero((spans["launched_ns"] > 0) & (spans["reduced_ns"] > 0))
    if not len(done):
        return None
    order = np.lexsort((spans["bucket"][done], spans["step"][done], spans["reducer"][done]))
    rows = done[order]
    key = np.stack([spans[name][rows] for name in ("reducer", "step", "bucket")])
    new = np.concatenate([[True], np.diff(key, axis=1).any(axis=0)])
    first = np.flatnonzero(new)
    begin = np.maximum.reduceat(spans["launched_ns"][rows], first)
    end = np.maximum.reduceat(spans["reduced_ns"][rows], first)
    return _Whole(rows, first, np.cumsum(new) - 1, begin, end)


def _collectives(rows: JsonRows, trace: Trace) -> None:
    spans, whole = trace.spans, _together(trace.spans)
    if whole is None:
        return
    first = whole.rows[whole.first]
    columns = {name: spans[name][first] for name in ("reducer", "bucket", "step", "bytes")}
    threads, process = _bucket_threads(columns), np.full(len(first), _TOGETHER)
    named = {
        int(thread): f"[{reducer}] bucket {bucket}"
        for thread, reducer, bucket in _rows(threads, columns["reducer"], columns["bucket"])
    }
    _name_threads(trace, process, threads, named)
    told = {"step": columns["step"], "bytes": columns["bytes"]}
    _slices(rows, "collective", process, threads, whole.begin, whole.end, **told)


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


def _arrows(trace: Trace) -> _Arrows | None:
    spans, whole = trace.spans, _together(trace.spans)
    if whole is None:
        return None
    rows, of = whole.rows, whole.of_row
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
        gradient_thread=_thread(spans["reducer"][rows], _GRADIENTS_THREAD),
        bucket_thread=_bucket_threads(spans)[rows],
        gradient=starts,
        begins=begins[known],
        launched=launched[known],
        middle=((whole.begin + whole.end) // 2)[of],
        of_every_rank=every,
    )


def _flows(rows: JsonRows, arrows: _Arrows) -> None:
    """Arrows: the gradient that completes a bucket, the rank's collective, everybody's collective."""
    number, rank, bucket = Number(np.arange(len(arrows.rank))), Number(arrows.rank), Number(arrows.bucket_thread)
    head = '{"name":"bucket","cat":"flow","ph":'
    rows.rows(
        [
            f'{head}"s","id":', number, ',"pid":', rank, ',"tid":', Number(arrows.gradient_thread), ',"ts":',
            Number(arrows.begins, 3), f'}},\n{head}"t","id":', number, ',"pid":', rank, ',"tid":', bucket, ',"ts":',
            Number(arrows.launched, 3), f'}},\n{head}"f","bp":"e","id":', number, f',"pid":{_TOGETHER},"tid":', bucket,
            ',"ts":', Number(arrows.middle, 3), "}",
        ]
    )  # fmt: skip


def _completing(gradients: _Columns, wanted: _Columns) -> npt.NDArray[np.intp]:
    """For each wanted (reducer, step, bucket, rank) the row of the gradient that completed the bucket; -1 for none."""
    found = np.flatnonzero(gradients["completes"].astype(bool))
    if not len(found):
        return np.full(len(wanted["rank"]), -1, np.intp)
    names = ("reducer", "step", "bucket", "rank")
    spread = [1 + max(int(gradients[name][found].max()), int(wanted[name].max(initial=0))) for name in names]
    keys = np.ravel_multi_index([gradients[name][found] for name in names], spread)
    order = np.argsort(keys)
    asked = np.ravel_multi_index([wanted[name] for name in names], spread)
    place = np.minimum(np.searchsorted(keys, asked, sorter=order), len(keys) - 1)
    return np.where(keys[order[place]] == asked, found[order[place]], -1)


def _names(used: Mapping[tuple[int, int], str]) -> list[str]:
    made = []
    for process in sorted({process for process, _ in used}):
        name = "all ranks" if process == _TOGETHER else f"rank {process}"
        made.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}})
        order = {"sort_index": -1 if process == _TOGETHER else process}
        made.append({"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": order})
    for (process, thread), name in sorted(used.items()):
        common = {"ph": "M", "pid": process, "tid": thread}
        made.append({"name": "thread_name", **common, "args": {"name": name}})
        made.append({"name": "thread_sort_index", **common, "args": {"sort_index": thread}})
    return [json.dumps(one) for one in made]
