"""The named parts of a step: spans and samples of a rank's main thread, from events to shares."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_lab.analysis.step_parts import PARTS
from ddp_lab.dashboard.views.overlap import parts_table, parts_words
from ddp_lab.protocol.events import Kind
from ddp_lab.timeline.timeline import Timeline
from tests.unit.backwards import MS, Bucket, Recorder, assignment

PLACES = (
    {"part": "data", "name": "Images", "workers": 2, "pin_memory": False},
    {"part": "optimizer", "name": "SGD"},
    {"part": "code", "name": "train.py:7", "text": "time.sleep(1)"},
    {"part": "clipping", "name": "train.py:8", "text": "clip_grad_norm_(parameters, 1.0)"},
)
DATA, OPTIMIZER, SLEEP, CLIPPING = range(4)
BUCKET = Bucket((2.0,), 2.0, 3.0)


class Rank:
    """Records steps of 20 ms that begin with an optimizer's step and the loader's batch."""

    def __init__(self, rank: int, timeline: Timeline) -> None:
        self.recorder, self.timeline = Recorder(rank), timeline
        for index, one in enumerate(PLACES):
            timeline.describe(rank, {"type": "place", "index": index, "session": 1, **one})

    def span(self, place: int, begin: int, end: int) -> None:
        self.recorder.record(Kind.ACTIVITY, end, parameter=place, device_begin_ns=begin)

    def samples(self, place: int, times: list[int], weight: int = MS) -> None:
        for at in times:
            self.recorder.record(Kind.SAMPLE, at, parameter=place, bytes=weight)

    def step(self, number: int, data_ms: int = 4, **fields: Any) -> None:
        """0 to 2 ms: optimizer; then data; from 10 ms: a blank; 14: forward; 15: backward of 4 ms; 19: the end."""
        begin = (number + 1) * 20 * MS
        if number:
            self.span(OPTIMIZER, begin - MS, begin + MS)
            self.span(DATA, begin + MS, begin + (1 + data_ms) * MS)
        self.recorder.backward(number, begin + 15 * MS, [BUCKET], 2.5, **fields)

    def send(self) -> None:
        self.timeline.extend(self.recorder.batch())

    @classmethod
    def alone(cls) -> Rank:
        """The only rank of a run."""
        made = Timeline()
        made.describe(0, {**assignment([[0]], ranks=[0]), "session": 1})
        return cls(0, made)


def recorded(ranks: int = 2, steps: int = 12, data: tuple[int, ...] = (4, 4)) -> Timeline:
    """Steps of 20 ms with 2 ms of optimizer, 4 of data, 1 of forward, 3 of backward; the rest is blank."""
    made = Timeline()
    for rank in range(ranks):
        one = Rank(rank, made)
        made.describe(rank, {**assignment([[0]], ranks=range(ranks)), "session": 1})
        for number in range(steps):
            one.step(number, data[rank])
            blank = (number + 1) * 20 * MS + 10 * MS
            one.samples(SLEEP, [blank, blank + MS, blank + 2 * MS])
            one.samples(CLIPPING, [blank + 3 * MS])
            one.samples(CLIPPING, [blank - 6 * MS])  # while data is loaded: not in a blank
        one.send()
    return made


def test_spans_and_samples_add_up_to_the_step() -> None:
    """Spans have their own time, samples divide the blanks by their weights, and the sum is the step."""
    found = recorded().parts()
    assert found.steps == 9
    for rank in (0, 1):
        parts = {name: 1e3 * seconds for name, seconds in found.by_rank[rank].items()}
        assert sum(parts.values()) == pytest.approx(20)
        assert parts["data"] == pytest.approx(4)
        assert parts["forward"] == pytest.approx(1)
        assert parts["optimizer"] == pytest.approx(2)
        blank = 20 - 4 - 1 - 3 - 2
        assert parts["code"] == pytest.approx(0.75 * blank)
        assert parts["clipping"] == pytest.approx(0.25 * blank)
    assert found.named == 1
    assert list(found.mean) == [part for part in PARTS if part in found.mean]
    assert str(found.places[0][0].place) == "train.py:7 (time.sleep(1))"


def test_the_mean_step_is_told_where_a_part_may_be_longer_than_the_median() -> None:
    """One step of 400 ms among a few of 20, as in a run that failed early: the parts add up to the mean of all."""
    one = Rank.alone()
    for number in range(5):
        one.step(number)
    one.recorder.backward(5, (5 + 20) * 20 * MS + 15 * MS, [BUCKET], 2.5)
    one.send()
    summary = one.timeline.summary()
    assert "20.0 ms per step (median)" in summary
    assert "(means of 3 steps; the mean step takes 146.7 ms): data loading 2.7 ms (2 %)" in summary
    assert "mean step" not in recorded().summary()


def test_how_many_samples_name_a_blank() -> None:
    """A blank with a handful of samples has no name, and the sentence says how much has one. A blank of 2 ms in steps
    of 20 has the name of four samples, which would say too little about one of 10 ms."""
    one = Rank.alone()
    for number in range(12):
        one.step(number)
    one.samples(SLEEP, [50 * MS])
    one.send()
    found = one.timeline.parts()
    assert found.by_rank[0]["unnamed"] == pytest.approx(0.010)
    assert found.named == pytest.approx(0.5)
    assert "50 % of the step is accounted for" in parts_words(found)
    one = Rank.alone()
    for number in range(12):
        one.step(number, data_ms=12)
    for number in (4, 6, 8, 10):
        one.samples(SLEEP, [(number + 1) * 20 * MS + int(13.5 * MS)])
    one.send()
    found = one.timeline.parts()
    assert found.by_rank[0]["code"] == pytest.approx(0.002)
    assert found.named == 1


def test_accumulated_forwards_and_backwards_are_a_part() -> None:
    """A forward without synchronisation lasts until its last gradient; the last forward is not counted with it. The
    step of an optimizer with a closure begins before the backward: only the time after it is the optimizer's."""
    one = Rank.alone()
    for number in range(12):
        begin = (number + 1) * 20 * MS
        common = {"reducer": 0, "process_group": 0, "step": number}
        one.recorder.record(Kind.FORWARD_BEGIN, begin + 3 * MS, **common)
        one.recorder.record(Kind.FORWARD_END, begin + 4 * MS, **common)
        one.recorder.record(Kind.GRAD_READY, begin + 6 * MS, parameter=0, **common)
        one.send()
        one.recorder.backward(number, begin + 15 * MS, [BUCKET], 2.5)
    one.send()
    assert one.timeline.parts().by_rank[0]["accumulation"] == pytest.approx(0.003)
    one = Rank.alone()
    for number in range(12):
        begin = (number + 1) * 20 * MS
        one.recorder.backward(number, begin, [BUCKET], 2.5)
        one.span(OPTIMIZER, begin - 5 * MS, begin + 8 * MS)  # the backward ends at 3
    one.send()
    assert one.timeline.parts().by_rank[0]["optimizer"] == pytest.approx(0.005)


def test_spans_are_columns_and_phases() -> None:
    """`Timeline.steps` has the spans' times; the table lists parts, then their lines, with each rank's time."""
    made = recorded(data=(4, 6))
    steps = made.steps()
    assert steps[steps["rank"] == 1]["data_ms"].iloc[-1] == pytest.approx(6)
    head, rows = parts_table(made.parts())
    assert head == ["part", "ms", "%", "rank 0", "rank 1"]
    assert rows[0][:1] + rows[0][3:] == ["data loading", pytest.approx(4), pytest.approx(6)]
    assert rows[1][0] == "  Images"


def test_a_training_stays_analysed_while_a_new_model_begins() -> None:
    """Findings, parts and summary are of the model that has enough steps, also while another one has only begun."""
    made = recorded()
    other = Recorder(0, next=10_000)
    other.record(Kind.FORWARD_BEGIN, 10_000 * MS, reducer=1, step=0)
    other.record(Kind.FORWARD_END, 10_001 * MS, reducer=1, step=0)
    made.extend(other.batch())
    assert made.model().reducer == 1  # type: ignore[union-attr]
    assert made.parts().steps == 9
    assert made.analysis_input() is not None
    assert "steps 3–11" in made.summary()
