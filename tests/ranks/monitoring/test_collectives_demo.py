"""Collectives step by step: they end with what the collective means, and send what the algorithm is known to send."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_lab.analysis.collectives import ALGORITHMS, schedule
from ddp_lab.parallel.monitoring.collectives import demonstrate
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks

CASES = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]
PART = 256 * 8  # bytes


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


# What each of four ranks sends, in parts: ring and halving 2 (n - 1) / n of the buffer, a tree more from inner ranks.
SENT = {
    ("all_reduce", "ring"): [6, 6, 6, 6],
    ("all_reduce", "halving"): [6, 6, 6, 6],
    ("all_reduce", "tree"): [8, 4, 8, 4],
    ("gather", "tree"): [0, 1, 2, 1],
    ("scatter", "tree"): [3, 0, 1, 0],
}


@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks()
def test_real_tensors_end_where_the_collective_says(rank: int, size: int) -> None:
    """On 2, 3 and 4 real ranks the data that arrived is what each collective promises, by each algorithm, equal in
    every rank's account, and the bytes that were sent are the algorithm's."""
    for case in CASES:
        if size == 3 and case[1] in ("halving", "doubling"):  # which want a power of two
            continue
        shown = demonstrate(*case)
        assert len(set(everywhere(str([(step.transfers, step.holds) for step in shown.steps])))) == 1, case
        _ends_well(shown)
        assert all(step.ms > 0 for step in shown.steps), case
        if size == 4 and case in SENT:
            assert [shown.sent(one) / PART for one in range(4)] == SENT[case], case
        if (size, *case) == (4, "all_reduce", "tree"):
            assert len(shown.steps) == 4


def test_what_does_not_exist_is_refused() -> None:
    """Unknown names, and numbers of ranks that an algorithm can't have, are ValueErrors that say what there is."""
    with pytest.raises(ValueError, match="all_gather"):
        schedule("scan", "ring", 2)
    with pytest.raises(ValueError, match="tree"):
        schedule("all_reduce", "butterfly", 2)
    with pytest.raises(ValueError, match="power of two"):
        schedule("all_reduce", "halving", 3)


@on_ranks(2)
def test_repetitions_give_one_time_for_each_step(rank: int, size: int) -> None:
    """All ranks get the same account of several runs: who holds a part, bytes, and one time for each step."""
    first, second = everywhere(demonstrate("all_gather", "ring", part_numel=32, repeats=3))
    assert first == second
    assert first.begin == (((0,), ()), ((), (1,)))
    (step,) = first.steps
    assert step.holds == (((0,), (1,)), ((0,), (1,)))
    assert (first.bytes, step.bytes) == (512, (256, 256))
    assert step.ms > 0
