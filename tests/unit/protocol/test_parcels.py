"""Parcels and segments in one process."""

from __future__ import annotations

import os
import threading

import numpy
import pytest

from ddp_lab.cluster.cells.packing import pickled_for_ranks
from ddp_lab.engine.cells import variables
from ddp_lab.protocol.functions import culprit
from ddp_lab.protocol.parcels import LARGE, unpack
from ddp_lab.protocol.shared_memory import Segments, allot, fill, mapped, opened


@pytest.mark.parametrize("count", [1, 2, 7, 32])
def test_buffers_never_overlap_nor_need_more_segments(count: int) -> None:
    """Any sizes fit the segments that there are; buffers begin at pages and do not overlap."""
    generator = numpy.random.default_rng(count)
    for _ in range(50):
        sizes = [int(size) for size in 2 ** generator.uniform(0, 30, generator.integers(1, 200))]
        places = allot(sizes, count)
        assert max(segment for segment, _ in places) < count
        ends: dict[int, int] = {}
        for (segment, begin), size in zip(places, sizes, strict=True):
            assert begin >= ends.get(segment, 0)
            assert begin % 4096 == 0
            ends[segment] = begin + size


def test_a_small_buffer_keeps_no_large_one() -> None:
    """What shares a segment is small beside the whole, so that a small array that lives on holds little memory."""
    sizes = [1 << 20, 1 << 30, 1 << 20, 1 << 30]
    places = allot(sizes, 5)
    assert places[0][0] == places[2][0]
    assert len({places[index][0] for index in (0, 1, 3)}) == 3


def test_segments_are_sealed() -> None:
    """Once filled, nobody can change a segment, the process that made it included; mappings are private. A descriptor
    that has come to mean another file is refused."""
    data = bytearray(os.urandom(10_000))
    with Segments(1) as segments:
        spans = fill(segments.descriptors, [(memoryview(data), 0, len(data))])
        with opened(segments.references(), write=True) as descriptors, pytest.raises(PermissionError):
            os.pwrite(descriptors[0], b"x", 0)
        first, second = mapped(segments.descriptors, spans)[0], mapped(segments.descriptors, spans)[0]
    first[0] = (data[0] + 1) % 256
    assert second == data
    assert first[1:] == data[1:]
    with Segments(2) as segments:
        one, two = segments.references()
        with pytest.raises(OSError, match="is not the expected file"), opened([one._replace(inode=two.inode)]):
            pass


def test_segments_that_can_not_be_reached() -> None:
    """A rank says so, and the bytes in the message do instead."""
    array = numpy.arange(LARGE)
    value = pickled_for_ranks({"array": array}, "pushed")
    with Segments(2) as segments:
        parcel = value.into(segments.descriptors, segments.references())
    assert not variables.stage("token", parcel)
    assert variables.stage("token", value.inline())
    assert numpy.array_equal(unpack(value.inline())["array"], array)


def test_the_innermost_part_is_named() -> None:
    """Dicts, lists, attributes, closures and defaults are searched, and loops end."""
    lock = threading.Lock()

    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.parts = holder, (1, {"lock": lock})  # type: ignore[attr-defined]

    def closure() -> object:
        return lock

    def why_not(value: object) -> str | None:
        return "no" if "_thread.lock" in str(value) or value is holder or value is closure else None

    found = culprit({"fine": 1, "holder": holder}, why_not)
    assert (found.name, found.part) == ("holder", lock)
    assert found.path == "holder.parts[1]['lock']"
    found = culprit({"closure": closure}, why_not)
    assert found.path == "its variable lock"
    assert culprit({"fine": 1}, why_not) is None
