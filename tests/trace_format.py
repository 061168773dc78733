"""The Trace Event Format, as far as it is used: what each phase's events must hold, and how they must relate."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from typing import Any

# phase -> field -> its types; optional fields end in "?".
_COMMON: dict[str, tuple[type, ...]] = {"name": (str,), "pid": (int,), "tid": (int,), "cat?": (str,), "args?": (dict,)}
_TIMED: dict[str, tuple[type, ...]] = {**_COMMON, "ts": (int, float)}
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "M": {**_COMMON, "args": (dict,)},
    "X": {**_TIMED, "dur": (int, float)},
    "i": {**_TIMED, "s": (str,)},
    "s": {**_TIMED, "id": (int,), "cat": (str,)},
    "t": {**_TIMED, "id": (int,), "cat": (str,)},
    "f": {**_TIMED, "id": (int,), "cat": (str,), "bp?": (str,)},
}
_METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}


def faults(document: dict[str, Any]) -> list[str]:
    """What is wrong with a trace; empty if nothing is."""
    if set(document) - {"traceEvents", "displayTimeUnit", "otherData"}:
        return [f"unknown keys: {sorted(document)}"]
    if document.get("displayTimeUnit") not in (None, "ms", "ns"):
        return [f"displayTimeUnit is {document['displayTimeUnit']!r}"]
    events = document["traceEvents"]
    found = [fault for event in events for fault in _event(event)]
    return found or [*_nesting(events), *_flows(events), *_named(events)]


def _event(event: dict[str, Any]) -> list[str]:
    fields = _FIELDS.get(event.get("ph", ""))
    if fields is None:
        return [f"unknown phase: {event}"]
    allowed = {name.rstrip("?"): types for name, types in fields.items()}
    wrong = [f"{name} is missing: {event}" for name in fields if not name.endswith("?") and name not in event]
    wrong += [f"{name} is not of the format: {event}" for name in event if name not in allowed and name != "ph"]
    wrong += [
        f"{name} is a {type(event[name]).__name__}: {event}"
        for name, types in allowed.items()
        if name in event and (not isinstance(event[name], types) or isinstance(event[name], bool))
    ]
    if event["ph"] == "X" and not wrong and event["dur"] < 0:
        wrong.append(f"ends before it begins: {event}")
    if event["ph"] == "i" and event.get("s") not in ("g", "p", "t"):
        wrong.append(f"unknown scope: {event}")
    if event["ph"] == "M" and not wrong:
        kind = _METADATA.get(event["name"])
        key = "sort_index" if event["name"].endswith("sort_index") else "name"
        if kind is None or not isinstance(event["args"].get(key), kind):
            wrong.append(f"unknown metadata: {event}")
    return wrong


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """(pid, tid) -> begin and end of its slices, in the order of time."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return {track: sorted(slices) for track, slices in found.items()}


def _nesting(events: list[dict[str, Any]]) -> list[str]:
    """The slices of a track follow each other (none of ours nest); rounding of nanoseconds is forgiven."""
    return [
        f"slices of track {track} overlap: {a}, {b}"
        for track, slices in tracks(events).items()
        for a, b in itertools.pairwise(slices)
        if a[1] > b[0] + 2e-3
    ]


def _flows(events: list[dict[str, Any]]) -> list[str]:
    by_id = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            by_id[event["cat"], event["id"]].append(event)
    slices = tracks(events)
    found = []
    for name, chain in by_id.items():
        phases = "".join(event["ph"] for event in chain)
        if phases[0] + phases[-1] != "sf" or phases.strip("sf").strip("t"):
            found.append(f"flow {name} is {phases}")
        if any(a["ts"] > b["ts"] for a, b in itertools.pairwise(chain)):
            found.append(f"flow {name} runs backwards")
        for event in chain:
            of_track = slices.get((event["pid"], event["tid"]), [])
            place = bisect.bisect_right(of_track, (event["ts"], float("inf"))) - 1
            if place < 0 or of_track[place][1] < event["ts"]:
                found.append(f"flow {name} is bound to no slice: {event}")
    return found


def _named(events: list[dict[str, Any]]) -> list[str]:
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xstf"}
    return [f"track {track} has no name" for track in sorted(used - named)]
