"""`python -m tests.vectorised`: the loops of `shm`'s reductions on aarch64, in what a cross compiler makes of them."""

from __future__ import annotations

import pytest

from tests import vectorised

pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def _cross_compiler() -> None:
    if (program := vectorised.missing("aarch64")) is not None:
        pytest.skip(f"there is no {program} (Debian: apt install g++-aarch64-linux-gnu)")


def test_every_loop_is_vectorised() -> None:
    """Each reduction of each dtype combines as many elements at once as a register of NEON holds."""
    loops = vectorised.loops()
    assert [loop for loop in loops if not loop.is_right] == []
    assert {loop.dtype for loop in loops} == set(vectorised.NAMES.values())
    sums = {(loop.dtype, loop.operation) for loop in loops if loop.operation.startswith("SUM")}
    assert {(dtype, of) for dtype in vectorised.NAMES.values() for of in ("SUM", "SUM of 2")} <= sums
    assert {("float16", "SUM of 2, FEAT_FP16"), ("bfloat16", "SUM of 2, FEAT_BF16")} <= sums


def test_a_loop_that_goes_one_by_one_is_found() -> None:
    """Without the compiler's vectoriser, what it would have made is not found; what is written by hand is."""
    found = {(loop.dtype, loop.operation): loop.is_right for loop in vectorised.loops("aarch64", "-fno-tree-vectorize")}
    assert not found["float32", "SUM"]
    assert not found["int32", "MAX"]
    assert found["float16", "SUM of 2, FEAT_FP16"]
