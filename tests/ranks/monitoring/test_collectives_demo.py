"""Collectives step by step: they end with what the collective means, and send what the algorithm is known to send."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_lab.analysis.collectives import ALGORITHMS, schedule
from ddp_lab.parallel.monitoring.collectives import demonstrate
from tests.ranks.conftest import Ranks

CASES = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]
PART = 256 * 8  # bytes


def _demonstrate(rank: int, size: int, collective: str, algorithm: str) -> Any:
    return demonstrate(collective, algorithm)


def _ends_well(shown: Any) -> None:
    n, everyone = shown.ranks, tuple(range(shown.ranks))
    last = shown.steps[-1].holds
    for rank in range(n):
        if shown.collective == "all_reduce":
            assert last[rank] == (everyone,) * n
        elif shown.collective in ("all_gather", "all_to_all"):
            assert last[rank] == tuple((part,) for part in range(n))
        elif shown.collective == "reduce_scatter":
            assert last[rank][rank] == everyone
        elif shown.collective == "scatter":
            assert last[rank][rank] == (0,)
        elif shown.collective in ("reduce", "gather"):
            if rank == 0:
                assert last[0] == ((everyone,) * n if shown.collective == "reduce" else tuple((r,) for r in range(n)))
        else:
            assert last[rank] == ((0,),) * n


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_real_tensors_end_where_the_collective_says(ranks: Ranks, collective: str, algorithm: str) -> None:
    """On 2, 3 and 4 real ranks the data that arrived is what the collective promises, equal in every rank's account."""
    for size in (2, 4) if algorithm in ("halving", "doubling") else (2, 3, 4):
        shown = ranks(size, _demonstrate, collective, algorithm)
        assert len({str([(step.transfers, step.holds) for step in one.steps]) for one in shown}) == 1
        _ends_well(shown[0])
        assert all(step.ms > 0 for step in shown[0].steps)


def test_bytes_are_the_algorithms(ranks: Ranks) -> None:
    """Ring and halving all-reduce send 2 (n - 1) / n of the buffer from each rank; a tree more from its inner ones."""
    for algorithm in ("ring", "halving"):
        shown = ranks(4, _demonstrate, "all_reduce", algorithm)[0]
        assert [shown.sent(rank) for rank in range(4)] == [2 * 3 * PART] * 4
    shown = ranks(4, _demonstrate, "all_reduce", "tree")[0]
    assert [shown.sent(rank) // PART for rank in range(4)] == [8, 4, 8, 4]
    assert len(shown.steps) == 4
    for collective, root, inner in (("gather", 0, [PART, 2 * PART, PART]), ("scatter", 3 * PART, [0, PART, 0])):
        shown = ranks(4, _demonstrate, collective, "tree")[0]
        assert [shown.sent(rank) for rank in range(4)] == [root, *inner]


def test_what_does_not_exist_is_refused() -> None:
    """Unknown names, and numbers of ranks that an algorithm can't have, are ValueErrors that say what there is."""
    with pytest.raises(ValueError, match="all_gather"):
        schedule("scan", "ring", 2)
    with pytest.raises(ValueError, match="tree"):
        schedule("all_reduce", "butterfly", 2)
    with pytest.raises(ValueError, match="power of two"):
        schedule("all_reduce", "halving", 3)


def _repeatedly(rank: int, size: int) -> Any:
    return demonstrate("all_gather", "ring", part_numel=32, repeats=3)


def test_repetitions_give_one_time_for_each_step(ranks: Ranks) -> None:
    """All ranks get the same account of several runs: who holds a part, bytes, and one time for each step."""
    first, second = ranks(2, _repeatedly)
    assert first == second
    assert first.begin == (((0,), ()), ((), (1,)))
    (step,) = first.steps
    assert step.holds == (((0,), (1,)), ((0,), (1,)))
    assert (first.bytes, step.bytes) == (512, (256, 256))
    assert step.ms > 0
