"""Collectives side by side: numbers, mismatches, and ranks out of step, from made-up looks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.diagnosis.collectives_in_flight import (
    Collective,
    Entry,
    Flight,
    GroupFlights,
    entries_of,
    in_flight_words,
    numbered,
)
from ddp_lab.diagnosis.mismatch import Distances, find_mismatch
from ddp_lab.protocol.messages import InFlight, OldestFlight

ONE = Entry(0, "0", "gloo", 0, 1, "all_reduce", ("Float",), ((4,),), 100, "scheduled", True, False)
SUM, COPY = Collective("all_reduce", "float32 [4]", 16), Collective("broadcast", "float32 [4]", 16)


def entry(record: int, sequence: int, **changes: object) -> Entry:
    return replace(ONE, record=record, sequence=sequence, created_ns=100 + record, **changes)  # type: ignore[arg-type]


def flights(entered: int | None, *, first: int = 1, begun: int | None = 1, **others: Collective) -> GroupFlights:
    """A rank's group with all-reduces from `first` on, but for `others` (``n7`` names number 7)."""
    entries = {number: others.get(f"n{number}", SUM) for number in range(first, (entered or 0) + 1)}
    return GroupFlights("0", "gloo", (0, 1, 2), entered, entered, begun, entries, (), 0)


def test_numbers() -> None:
    """Sequence numbers count as long as none was skipped; else entries, while all are known; else nothing is known."""
    made = {"0": 50}
    plain = numbered([entry(4, 5), entry(5, 6)], {"0": {"last_enqueued_collective": 6}}, made)
    assert (plain["0", "gloo"].known, list(plain["0", "gloo"].entries)) == (True, [5, 6])
    skipped = numbered([entry(0, 1), entry(1, 3)], {}, made)
    assert (skipped["0", "gloo"].known, list(skipped["0", "gloo"].entries)) == (True, [1, 2])
    wrapped = numbered([entry(7, 9), entry(8, 10)], {}, made)
    assert (wrapped["0", "gloo"].known, list(wrapped["0", "gloo"].entries)) == (False, [9, 10])
    of_two = numbered([entry(7, 9), entry(8, 1, group="1", made=1)], {"0": {"last_enqueued_collective": 9}}, {"1": 108})
    assert list(of_two) == [("1", "gloo")], "the group that is no more is left out"
    assert of_two["1", "gloo"] == (True, {1: entry(8, 1, group="1", made=1)})


def recorded(name: str) -> Any:
    """What torch 2.15.0 told on a CPU of one program on 2 ranks: Gloo's recorder, and that of its hook for others."""
    return json.loads(Path(__file__).with_name("recorded_flights.json").read_text())[name]


def test_a_recorder_of_torch_2_15() -> None:
    """Gloo's own entries have the same form as before: a send lies between the second and the third. Torch's hook
    writes it as it writes any other's, but of nccl2 it is told when a collective has ended."""
    entries = entries_of(recorded("gloo"))
    assert [one.name for one in entries] == ["all_reduce", "all_gather", "broadcast", "barrier"]
    found = numbered(entries, recorded("gloo")["pg_status"], {"0": 0})
    assert found.keys() == {("0", "gloo")}
    assert (found["0", "gloo"].known, list(found["0", "gloo"].entries)) == (True, [1, 2, 3, 4])
    assert all(one.done for one in entries)
    dump = recorded("hook")
    for given in dump["entries"]:
        given["profiling_name"] = given["profiling_name"].replace("shm:", "nccl2:")
        ended = given["record_id"] < 3
        given["retired"], given["state"] = ended, "completed" if ended else "scheduled"
    entries = entries_of(dump)
    assert {one.backend for one in entries} == {"nccl2"}
    [(key, of_group)] = numbered(entries, dump["pg_status"], {"1": 0}).items()
    assert key == ("1", "nccl2")
    assert of_group.known
    assert {number: (one.name, one.bytes, one.done) for number, one in of_group.entries.items()} == {
        1: ("all_reduce", 16, True),
        2: ("all_gather_into_tensor", 16, True),
        3: ("broadcast", 48, False),
        4: ("barrier", 0, False),
    }


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("nccl2:_reduce_scatter_base", "reduce_scatter_tensor"),
        ("nccl-lazy:allreduce_coalesced", "all_reduce_coalesced"),
        ("nccl2:all_to_all_single", "all_to_all_single"),
        ("nccl:all_reduce_barrier", "barrier"),
    ],
)
def test_names(title: str, name: str) -> None:
    """A collective is called as in torch.distributed, whoever noted it."""
    [one] = entries_of({"entries": [{**recorded("hook")["entries"][0], "profiling_name": title}]})
    assert (one.backend, one.name) == (title.partition(":")[0], name)


def test_the_first_mismatch() -> None:
    """The first number under which names differ; sizes where they have to agree; nothing from before the cell."""
    found = find_mismatch({0: [flights(9)], 1: [flights(8, n7=COPY, n8=COPY)], 2: [flights(3)]}, {0, 1, 2})
    assert (found.number, found.calls, found.sizes) == (7, {0: SUM, 1: COPY}, False)
    other = find_mismatch({0: [flights(9)], 1: [flights(9, n4=replace(SUM, bytes=32))]}, {0, 1})
    assert (other.number, other.sizes) == (4, True)
    uneven = Collective("all_gather", "float32 [4]", 16)
    assert find_mismatch({0: [flights(1, n1=uneven)], 1: [flights(1, n1=replace(uneven, bytes=8))]}, {0, 1}) is None
    assert find_mismatch({0: [flights(9)], 1: [flights(9, first=6)]}, {0, 1}) is None
    old = {0: [flights(9, begun=8)], 1: [flights(9, begun=8, n7=COPY)]}
    assert find_mismatch(old, {0, 1}) is None
    assert find_mismatch({0: [flights(9, begun=None)], 1: [flights(9, begun=None, n7=COPY)]}, {0, 1}) is None


def told(looks: list[tuple[int, int]], *, ended: bool = False, launched_s: float = 0.0, step_s: float = 1.0) -> bool:
    """Whether ranks 0 and 1 that were seen so far, look after look, are reported within looks over 3 s."""
    distances = Distances(3.0)
    found = None
    for number, (first, second) in enumerate(looks):
        open_ = (Flight(second + 1, SUM, launched_s, ""),) if launched_s else ()
        groups = {0: [replace(flights(first), open=open_, ranks=())], 1: [replace(flights(second), ranks=())]}
        found = distances.add(number * step_s, groups, [1] if ended else []) or found
    return found is not None


@pytest.mark.parametrize(
    "looks",
    [
        [(5, 1), (5, 2), (9, 5), (12, 10), (15, 11), (16, 16)],  # a few apart
        [(400, 0), (400, 0), (400, 0), (400, 0), (400, 0)],  # far ahead, and waiting for the other
        [(400, 0), (500, 0), (600, 300), (900, 500), (1000, 900)],  # catches up
        [(500, 450), (1500, 1430), (2500, 2400), (3500, 3300), (4500, 4250)],  # equally far, but asked later
        [(2, 1), (3, 1), (4, 1), (5, 1), (6, 1)],  # not far enough
        [(6, 1), (7, 1), (8, 1), (9, 1), (10, 1)],  # nor this, by one
        [(500, 351), (550, 400), (600, 450), (650, 500), (700, 550)],  # as far as the faster one comes in a second
        [(20, 1), (40, 2), (60, 40), (60, 58)],  # for less than three seconds
    ],
)
def test_ranks_that_are_left_alone(looks: list[tuple[int, int]]) -> None:
    """What goes by itself, or may be an accident of when the ranks were asked, is not told."""
    assert not told(looks)


def test_ranks_that_run_apart() -> None:
    """A rank that stands while another launches more and more, one that is slower for good, one that has ended."""
    assert told([(20, 1), (40, 1), (60, 1), (80, 1), (100, 1)])
    assert told([(7, 1), (8, 1), (9, 1), (11, 1)])
    assert told([(500, 351), (550, 400), (600, 450), (650, 500), (700, 549)])
    assert told([(200, 100), (400, 200), (600, 300), (800, 400), (1000, 400)])
    assert told([(2, 1)] * 5, ended=True, launched_s=4.0)
    assert not told([(2, 1)] * 5, ended=True, launched_s=1.0)
    assert not told([(2, 1)] * 5, ended=True)


def test_words() -> None:
    """What is in flight, in a few words."""
    oldest = OldestFlight("all_reduce", number=18, bytes=4 << 20, seconds=3.21, bucket="bucket 2 of Net")
    assert in_flight_words(InFlight()) == ""
    assert in_flight_words(InFlight(2, oldest)) == ("2, oldest all_reduce #18 of 4 MiB, bucket 2 of Net, for 3.2 s")
    one = OldestFlight("all_reduce", number=18, bytes=0, seconds=0.004, bucket="")
    assert in_flight_words(InFlight(1, one)) == "all_reduce #18 for 4 ms"
