"""Spans, gradients and steps as a Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open.

One process per rank, and one for what they do together. A rank's threads are the steps' phases, its gradients, and
one track for each bucket and model; the common process has a track for each bucket's collectives, from the last
rank's launch to the last rank's end. Arrows lead from the gradient that completes a bucket to the bucket's collective
on that rank, and on to the collective of all ranks. Format: "Trace Event Format": complete events (``"ph": "X"``),
flows (``s``, ``t``, ``f``), instants (``i``) and metadata (``M``); times in microseconds.

The text of each event is written directly: a million of them as dicts would take ten times as long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_GRADIENTS", "Trace", "write"]

_Columns = Mapping[str, npt.NDArray[Any]]

MOST_GRADIENTS = 250_000
"""Of more gradients only those that complete a bucket get a slice."""

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
        gradients: columns of `gradient_columns`.
        modules: reducer -> class name of the model.
        names: reducer -> qualified names of its parameters.
        marks: (rank, time in ns, name) of what `recording.mark` recorded.
    """

    spans: _Columns
    steps: _Columns
    gradients: _Columns
    modules: Mapping[int, str]
    names: Mapping[int, Sequence[str]]
    marks: Sequence[tuple[int, int, str]] = ()
    used: dict[tuple[int, int], str] = field(default_factory=dict, init=False)  # (process, thread) -> its name


def write(file: TextIO, trace: Trace) -> None:
    """Writes the trace as one JSON object."""
    parts = [*_phases(trace), *_buckets(trace), *_gradients(trace), *_collectives(trace), *_flows(trace)]
    marks = (
        f'{{"name":{json.dumps(name)},"ph":"i","s":"p","pid":{rank},"tid":{_PHASES_THREAD},"ts":{at / 1e3!r}}}'
        for rank, at, name in trace.marks
    )
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    file.write(",\n".join([*_names(trace.used), *parts, *marks]))
    file.write("\n]}\n")


def _rows(*columns: npt.NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _slices(
    name: str, process: npt.NDArray[Any], thread: npt.NDArray[Any], begin: npt.NDArray[Any], end: npt.NDArray[Any],
    **arguments: npt.NDArray[Any],
) -> Iterable[str]:  # fmt: skip
    """Complete events of one name; what has not happened or not ended is left out."""
    shown = np.flatnonzero((begin > 0) & (end >= begin))
    columns = [process[shown], thread[shown], begin[shown] / 1e3, (end[shown] - begin[shown]) / 1e3]
    values = [np.round(array[shown], 6) for array in arguments.values()]
    head = f'{{"name":{json.dumps(name)},"ph":"X","pid":'
    keys = [f'"{key}":' for key in arguments]
    if len(keys) == 1:  # by far the most
        key = keys[0]
        return [
            f'{head}{pid},"tid":{tid},"ts":{ts!r},"dur":{dur!r},"args":{{{key}{value}}}}}'
            for pid, tid, ts, dur, value in _rows(*columns, *values)
        ]
    return [
        f'{head}{pid},"tid":{tid},"ts":{ts!r},"dur":{dur!r},"args":{{'
        # JSON has no NaN.
        + ",".join([key + str(one) for key, one in zip(keys, given, strict=True) if one == one])
        + "}}"
        for pid, tid, ts, dur, *given in _rows(*columns, *values)
    ]


def _thread(reducer: npt.NDArray[Any], which: npt.NDArray[Any] | int) -> npt.NDArray[Any]:
    return np.asarray(reducer * _THREADS_PER_REDUCER + which)


def _name_threads(trace: Trace, process: npt.NDArray[Any], thread: npt.NDArray[Any], names: Mapping[int, str]) -> None:
    """Notes the names of the threads that were used."""
    pairs = np.unique(np.stack([process, thread]), axis=1) if len(process) else np.zeros((2, 0), np.int64)
    for pid, tid in pairs.T.tolist():
        trace.used[pid, tid] = names[tid]


def _phases(trace: Trace) -> Iterator[str]:
    steps = trace.steps
    if not len(steps["rank"]):
        return
    threads = _thread(steps["reducer"], _PHASES_THREAD)
    named = {int(_thread(np.asarray(r), _PHASES_THREAD)): f"{trace.modules.get(r, '?')} [{r}]" for r in _of(steps)}
    _name_threads(trace, steps["rank"], threads, named)
    for name, begin, end in _PHASES:
        yield from _slices(name, steps["rank"], threads, steps[begin], steps[end], step=steps["step"])


def _of(columns: _Columns) -> list[int]:
    return [int(reducer) for reducer in np.unique(columns["reducer"])]


def _bucket_threads(columns: _Columns) -> npt.NDArray[Any]:
    return _thread(columns["reducer"], _BUCKETS_THREAD + columns["bucket"])


def _buckets(trace: Trace) -> Iterator[str]:
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
        yield from _slices(name, rank[shown], threads[shown], spans[begin][shown], spans[end][shown], step=step[shown])
    told = {key: spans[key] for key in ("step", "bucket", "bytes", "n_parameters", "hidden_ms", "exposed_ms")}
    yield from _slices("all_reduce", rank, threads, spans["launched_ns"], spans["reduced_ns"], **told)
    on_device = spans["device_end_ns"] > 0
    if on_device.any():
        device = {thread + _DEVICE_THREADS: f"{name} on the device" for thread, name in named.items()}
        _name_threads(trace, rank[on_device], threads[on_device] + _DEVICE_THREADS, device)
        first, last = spans["device_begin_ns"], spans["device_end_ns"]
        yield from _slices("all_reduce (device)", rank, threads + _DEVICE_THREADS, first, last, step=step)


def _gradients(trace: Trace) -> Iterator[str]:
    found = trace.gradients
    if not len(found["rank"]):
        return
    if len(found["rank"]) > MOST_GRADIENTS:
        found = {name: column[trace.gradients["completes"]] for name, column in found.items()}
    threads = _thread(found["reducer"], _GRADIENTS_THREAD)
    named = {int(_thread(np.asarray(r), _GRADIENTS_THREAD)): f"[{r}] gradients" for r in _of(found)}
    _name_threads(trace, found["rank"], threads, named)
    titles = {r: [json.dumps(name) for name in trace.names.get(r, ())] for r in _of(found)}
    for reducer, of_reducer in titles.items():
        chosen = found["reducer"] == reducer
        begin, end = found["begin_ns"][chosen], found["end_ns"][chosen]
        columns = (found["rank"], threads, found["parameter"], found["step"], found["bucket"])
        rows = _rows(*(column[chosen] for column in columns), begin / 1e3, np.maximum(end - begin, 1) / 1e3)
        for pid, tid, parameter, step, bucket, ts, dur in rows:
            title = of_reducer[parameter] if parameter < len(of_reducer) else f'"parameter {parameter}"'
            yield (
                f'{{"name":{title},"ph":"X","pid":{pid},"tid":{tid},"ts":{ts!r},"dur":{dur!r},'
                f'"args":{{"step":{step},"bucket":{bucket}}}}}'
            )


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


def _collectives(trace: Trace) -> Iterator[str]:
    spans, whole = trace.spans, _together(trace.spans)
    if whole is None:
        return
    rows = whole.rows[whole.first]
    columns = {name: spans[name][rows] for name in ("reducer", "bucket", "step", "bytes")}
    threads, process = _bucket_threads(columns), np.full(len(rows), _TOGETHER)
    named = {
        int(thread): f"[{reducer}] bucket {bucket}"
        for thread, reducer, bucket in _rows(threads, columns["reducer"], columns["bucket"])
    }
    _name_threads(trace, process, threads, named)
    told = {"step": columns["step"], "bytes": columns["bytes"]}
    yield from _slices("collective", process, threads, whole.begin, whole.end, **told)


def _flows(trace: Trace) -> Iterator[str]:
    """Arrows: the gradient that completes a bucket, the rank's collective, everybody's collective."""
    spans, whole = trace.spans, _together(trace.spans)
    if whole is None:
        return
    rows = whole.rows
    threads = _bucket_threads(spans)[rows]
    rank, launched = spans["rank"][rows], spans["launched_ns"][rows]
    starts = _completing(trace.gradients, {name: spans[name][rows] for name in ("reducer", "step", "bucket", "rank")})
    begins = np.where(starts >= 0, (trace.gradients["begin_ns"] + trace.gradients["end_ns"])[starts] // 2, 0)
    gradient_threads = _thread(spans["reducer"][rows], _GRADIENTS_THREAD)
    middle = ((whole.begin + whole.end) / 2)[whole.of_row]
    known = (begins > 0) & (begins <= launched)
    data = _rows(rank[known], gradient_threads[known], threads[known], begins[known] / 1e3, launched[known] / 1e3,
                 middle[known] / 1e3)  # fmt: skip
    head = '{"name":"bucket","cat":"flow"'
    for number, (pid, gradients, bucket, at, launch, collective) in enumerate(data):
        yield (
            f'{head},"ph":"s","id":{number},"pid":{pid},"tid":{gradients},"ts":{at!r}}},\n'
            f'{head},"ph":"t","id":{number},"pid":{pid},"tid":{bucket},"ts":{launch!r}}},\n'
            f'{head},"ph":"f","bp":"e","id":{number},"pid":{_TOGETHER},"tid":{bucket},"ts":{collective!r}}}'
        )


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
