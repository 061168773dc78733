"""The numpy dtype of an event and the kinds are those of `csrc/record/event.h`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ddp_lab.protocol.events import DTYPE, SCHEMA_VERSION, Kind

HEADER = (Path(__file__).parents[2] / "csrc/record/event.h").read_text()


def test_the_dtype_reads_what_cpp_writes(program: Callable[..., bytes]) -> None:
    """Each field of DTYPE has the place, the size and the sign of its field in the C++ struct."""
    raw = program("test_events")
    assert len(raw) == DTYPE.itemsize
    (event,) = np.frombuffer(raw, DTYPE)
    for position, name in enumerate(DTYPE.names or (), start=1):
        kind = DTYPE[name]
        signed = np.array(-position, f"i{kind.itemsize}")
        assert event[name] == signed.view(kind), name
    declared = re.findall(r"^  (?:std::\w+|Kind) (\w+) =", HEADER, re.MULTILINE)
    assert list(DTYPE.names or ()) == declared


def test_the_kinds_are_those_of_cpp() -> None:
    """Kind and SCHEMA_VERSION state the same names and numbers as event.h."""
    kinds = {name: int(number) for name, number in re.findall(r"^  k(\w+) = (\d+),", HEADER, re.MULTILINE)}
    assert kinds == {kind.name.title().replace("_", ""): kind.value for kind in Kind}
    assert f"kSchemaVersion = {SCHEMA_VERSION};" in HEADER
