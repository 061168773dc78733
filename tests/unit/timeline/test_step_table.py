"""The dense tables of times: steps against a plain dictionary, and the activities of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.analysis.step_parts import SPANS
from ddp_lab.protocol.events import DTYPE, MOST_BUCKETS, MOST_PARAMETERS, Kind
from ddp_lab.timeline.history import EventStore
from ddp_lab.timeline.tables import step_table
from ddp_lab.timeline.tables.activity import _MOST, ActivityTable
from ddp_lab.timeline.tables.span_columns import view_of
from ddp_lab.timeline.tables.step_table import BUCKET_FIELDS, STEP_FIELDS, StepTable

_STEP_KINDS = (
    *(Kind.FORWARD_BEGIN, Kind.FORWARD_END, Kind.BACKWARD_BEGIN),
    *(Kind.FINALIZE_BEGIN, Kind.BACKWARD_END, Kind.ABANDONED),
)
_BUCKET_KINDS = {Kind.BUCKET_READY: "ready", Kind.BUCKET_LAUNCHED: "launched", Kind.BUCKET_REDUCED: "reduced"}
# Steps mostly go up; kind, bucket and parameter are anything.
FACTS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([*_STEP_KINDS, *_BUCKET_KINDS, Kind.GRAD_READY, Kind.DEVICE_SPAN, Kind.MARK]),
        st.integers(-1, 5),
        st.integers(0, 7),
    ),
    max_size=120,
)


def _events(facts: list[tuple[int, Kind, int, int]]) -> np.ndarray:
    made, step = np.zeros(len(facts), DTYPE), 0
    for index, (forward, kind, bucket, parameter) in enumerate(facts):
        step += forward
        made[index]["sequence"] = index
        made[index]["host_ns"] = 1_000 + index
        made[index]["step"], made[index]["kind"] = step, kind
        made[index]["bucket"], made[index]["parameter"] = bucket, parameter
        made[index]["bytes"] = 10 * index
        made[index]["device_begin_ns"], made[index]["device_end_ns"] = index + 1, index + 2
    return made


def _expected(events: np.ndarray) -> dict[int, dict[Any, int]]:
    """step -> (field, bucket) -> value, event by event."""
    steps: dict[int, dict[Any, int]] = {}
    for event in events:
        times = steps.setdefault(int(event["step"]), {})
        kind, bucket, at = Kind(int(event["kind"])), int(event["bucket"]), int(event["host_ns"])
        if kind in _STEP_KINDS:
            times[STEP_FIELDS[_STEP_KINDS.index(kind)], None] = at
        elif bucket < 0:
            continue
        elif kind in _BUCKET_KINDS:
            times[_BUCKET_KINDS[kind], bucket] = at
            if kind == Kind.BUCKET_LAUNCHED:
                times["bytes", bucket] = int(event["bytes"])
        elif kind == Kind.GRAD_READY:
            times.setdefault(("first_ready", bucket), at)
            times["gradient", int(event["parameter"])] = at
        elif kind == Kind.DEVICE_SPAN:
            times["device_begin", bucket] = int(event["device_begin_ns"])
            times["device_end", bucket] = int(event["device_end_ns"])
    return steps


def _held(table: StepTable) -> dict[int, dict[Any, int]]:
    steps: dict[int, dict[Any, int]] = {}
    for row in table.rows():
        times = steps[int(table.step[row])] = {}
        times |= {(f, None): int(v) for f, v in zip(STEP_FIELDS, table.steps[row], strict=True) if v}
        times |= {
            (f, bucket): int(v)
            for bucket, fields in enumerate(table.buckets[row])
            for f, v in zip(BUCKET_FIELDS, fields, strict=True)
            if v
        }
        times |= {("gradient", index): int(v) for index, v in enumerate(table.gradients[row]) if v}
    return steps


@given(FACTS, st.integers(1, 90), st.lists(st.integers(1, 40), max_size=6))
def test_holds_what_the_events_say(facts: list[tuple[int, Kind, int, int]], max_steps: int, cuts: list[int]) -> None:
    """Any events, cut into any batches: the newest steps are held as an event-by-event reading gives them."""
    table, events = StepTable(max_steps), _events(facts)
    for part in np.split(events, np.unique(np.minimum(np.cumsum(cuts), len(events))).astype(int)):
        table.extend(part)
    expected = _expected(events)
    held = _held(table)
    newest = max(expected, default=-1)
    assert table.last_step == newest
    assert len(held) <= max_steps + max_steps // 4
    for step, times in held.items():  # the thinned ones, too
        assert times == {key: value for key, value in expected[step].items() if value}
    for step in range(newest - max_steps + 1, newest + 1):
        if step in expected:
            assert held[step] == {key: value for key, value in expected[step].items() if value}


def test_a_late_device_span_of_a_forgotten_step_is_ignored() -> None:
    """An event of a step that the ring has overwritten changes nothing. A far step of the last parameter and the last
    bucket that there may be make no table of gigabytes."""
    table = StepTable(8)
    events = _events([(1, Kind.BACKWARD_END, -1, 0)] * 20)
    table.extend(events)
    before = _held(table)
    late = _events([(2, Kind.DEVICE_SPAN, 0, 0)])
    table.extend(late)
    assert _held(table) == before
    assert sorted(before) == [8, *range(13, 21)]
    table = StepTable(1_000)
    kind, far = Kind.GRAD_READY, (MOST_BUCKETS - 1, MOST_PARAMETERS - 1)
    table.extend(_events([(1, kind, 0, 0), (900, kind, *far), (50_000, kind, *far)]))
    assert sum(one.nbytes for one in (table.steps, table.buckets, table.gradients)) < 4 << 20
    assert _held(table)[50_901]["gradient", MOST_PARAMETERS - 1] == 1_002


@settings(max_examples=30)
@given(st.integers(1, 1_000), st.integers(4, 60), st.integers(1, 300))
def test_old_steps_are_thinned(steps: int, most: int, at_once: int) -> None:
    """Behind the newest steps lie evenly spaced ones of the whole past, and each knows when the one before ended."""
    table = StepTable(most)
    events = _events([(1, Kind.BACKWARD_END, -1, 0)] * steps)
    for part in np.split(events, range(at_once, steps, at_once)):
        table.extend(part)
    held = table.step[table.rows()]
    old = held[held <= steps - most]
    assert held[len(old) :].tolist() == list(range(max(1, steps - most + 1), steps + 1))
    assert len(old) <= most // 4
    if len(old) > 1:
        every = int(np.diff(old)[0])
        assert every & (every - 1) == 0
        assert old.tolist() == list(range(every, steps - most + 1, every))
        assert every == 1 or len(old) * 2 + 2 > most // 4, "no thinner than needed"
    ends = view_of(0, 0, table, held, ActivityTable()).previous_end
    assert (ends[held > 1] == 1_000 + held[held > 1] - 2).all()


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 100), st.lists(st.integers(0, 39), max_size=5))
def test_cursor_reads(sizes: list[int], most: int, reads: list[int]) -> None:
    """A reader that asks after any batches gets every event once, or is told how many are gone."""
    store, cursor, got, told = EventStore(most), 0, [], 0
    number = 0
    for index, size in enumerate([*sizes, 0]):
        chunk = np.zeros(size, DTYPE)
        chunk["sequence"] = np.arange(number, number + size)
        number += size
        store.append(index % 3, chunk)
        if index in reads or index == len(sizes):
            found, cursor, gone = store.since(cursor)
            told += gone
            got += [int(n) for _, events in found for n in events["sequence"]]
    assert cursor == number
    assert len(got) + told == number
    assert got == sorted(set(got))
    assert number - store.start <= max(most, *sizes, 0) if sizes else True


@given(FACTS, st.integers(1, 90), st.lists(st.integers(1, 40), max_size=6), st.integers(540, 3_000), st.integers(0, 60))
def test_no_larger_than_what_came(
    facts: list[tuple[int, Kind, int, int]], max_steps: int, cuts: list[int], spare: int, an_event: int
) -> None:
    """Whatever steps, buckets and parameters come: the tables have no more numbers than suits the events, and what
    they hold is what was said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_table, "_SPARE_NUMBERS", spare)
        patch.setattr(step_table, "_NUMBERS_AN_EVENT", an_event)
        table, events = StepTable(max_steps), _events(facts)
        for part in np.split(events, np.unique(np.minimum(np.cumsum(cuts), len(events))).astype(int)):
            table.extend(part)
            held = sum(one.size // len(table.step) for one in (table.steps, table.buckets, table.gradients))
            assert len(table.step) <= max(1, (spare + an_event * len(events)) // held)
    expected = _expected(events)
    for step, times in _held(table).items():
        assert times == {key: value for key, value in expected[step].items() if value}
    assert not len(events) or table.last_step in _held(table)


_APART, _LASTS = 100, 10  # ns between two forwards, and that each takes


@pytest.mark.parametrize("batch", [1, 997, 3 * _MOST])
def test_the_newest_activities_are_kept(batch: int) -> None:
    """Whatever comes at once: of many forwards the newest ones count, and those before are forgotten."""
    number = 3 * _MOST if batch > 1 else 300
    table, forwards = ActivityTable(), np.zeros(2 * number, DTYPE)
    forwards["kind"] = [Kind.FORWARD_BEGIN, Kind.FORWARD_END] * number
    forwards["host_ns"] = np.repeat(1_000 + _APART * np.arange(number), 2) + [0, _LASTS] * number
    forwards["bucket"] = -1
    for first in range(0, number, batch):
        table.extend(forwards[2 * first : 2 * (first + batch)], [])
        table.digest([])
    end = 1_000 + _APART * number
    begins = end - _APART * np.array([1, 7, 250, min(_MOST, number), number])
    steps = np.stack([begins - 1, np.full(5, end), np.full(5, end + 1), np.full(5, end + 2)], axis=1)
    forwards_of_steps = table.within(steps)[:, SPANS.index("accumulation")] // _LASTS
    assert forwards_of_steps.tolist() == [1, 7, 250, *[min(_MOST, number)] * 2]
    one_by_one = np.concatenate([table.within(step[None]) for step in steps])
    assert np.array_equal(table.within(steps), one_by_one)
