"""Spans and steps as a Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open.

One process per rank; its threads are the steps' phases and one track for each bucket and model.
Format: "Trace Event Format", complete events (``"ph": "X"``), times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["chrome_trace"]

_Columns = Mapping[str, npt.NDArray[Any]]
_PHASES_THREAD, _DEVICE_THREADS, _THREADS_PER_REDUCER = 1, 1_000_000, 10_000
_PHASES = (
    ("forward", "forward_begin_ns", "forward_end_ns"),
    ("backward", "backward_begin_ns", "finalize_ns"),
    ("wait for gradients", "finalize_ns", "backward_end_ns"),
)
_BUCKET_PHASES = (
    ("fill", "first_ready_ns", "ready_ns"),
    ("in line", "ready_ns", "launched_ns"),
    ("all_reduce", "launched_ns", "reduced_ns"),
)
_DEVICE_PHASE = ("all_reduce (device)", "device_begin_ns", "device_end_ns")
_BUCKET_ARGUMENTS = ("step", "bucket", "bytes", "n_parameters", "hidden_ms", "exposed_ms")


def chrome_trace(
    spans: _Columns, steps: _Columns, modules: Mapping[int, str], marks: list[tuple[int, int, str]] | None = None
) -> dict[str, Any]:
    """Builds the trace.

    Args:
        spans: columns of `Timeline.spans()`.
        steps: columns of `Timeline.steps()`.
        modules: reducer -> class name of the model.
        marks: (rank, time in ns, name) of what `recording.mark` recorded.

    Returns:
        A JSON-able dict.
    """
    made: list[dict[str, Any]] = []
    used: dict[tuple[int, int], str] = {}  # (process, thread) -> name
    if len(steps["rank"]):
        threads = _PHASES_THREAD + steps["reducer"] * _THREADS_PER_REDUCER
        for rank, thread, reducer in _rows(steps["rank"], threads, steps["reducer"]):
            used[rank, thread] = f"{modules.get(reducer, '?')} [{reducer}]"
        for phase in _PHASES:
            made += _slices(steps, phase, threads, ("step", "generation"))
    if len(spans["rank"]):
        threads = _PHASES_THREAD + spans["reducer"] * _THREADS_PER_REDUCER + 1 + spans["bucket"]
        on_device = spans["device_end_ns"] > 0
        for rank, thread, reducer, bucket, device in _rows(
            spans["rank"], threads, spans["reducer"], spans["bucket"], on_device
        ):
            used[rank, thread] = f"[{reducer}] bucket {bucket}"
            if device:
                used[rank, thread + _DEVICE_THREADS] = f"[{reducer}] bucket {bucket} on the device"
        for phase in _BUCKET_PHASES:
            made += _slices(spans, phase, threads, _BUCKET_ARGUMENTS)
        made += _slices(spans, _DEVICE_PHASE, threads + _DEVICE_THREADS, _BUCKET_ARGUMENTS)
    made += [
        {"name": name, "ph": "i", "s": "p", "pid": rank, "tid": _PHASES_THREAD, "ts": at / 1e3}
        for rank, at, name in marks or []
    ]
    return {"traceEvents": [*_names(used), *made], "displayTimeUnit": "ms"}


def _rows(*columns: npt.NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _slices(
    columns: _Columns, phase: tuple[str, str, str], threads: npt.NDArray[Any], keys: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    name, begin, end = phase
    shown = np.flatnonzero((columns[begin] > 0) & (columns[end] >= columns[begin]))
    arguments = [columns[key][shown] for key in keys]
    rows = _rows(columns["rank"][shown], threads[shown], columns[begin][shown], columns[end][shown], *arguments)
    for rank, thread, start, stop, *values in rows:
        yield {
            "name": name,
            "ph": "X",
            "pid": rank,
            "tid": thread,
            "ts": start / 1e3,
            "dur": (stop - start) / 1e3,
            # JSON has no NaN.
            "args": {key: value for key, value in zip(keys, values, strict=True) if value == value},
        }


def _names(used: Mapping[tuple[int, int], str]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in used}):
        made.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        made.append({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    for (rank, thread), name in sorted(used.items()):
        made.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})
        made.append(
            {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": thread, "args": {"sort_index": thread}}
        )
    return made
