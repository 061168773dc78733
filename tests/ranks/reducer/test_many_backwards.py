"""Thousands of backwards of four ranks: none may stand still."""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C import _distributed_c10d as c10d

from ddp_lab import DistributedDataParallel
from tests.ranks.conftest import Ranks
from tests.waiting import DEADLINE_S

BACKWARDS = int(os.environ.get("DDP_LAB_BACKWARDS", "5000"))
_OF_A_MODEL = 50


class _Recorder:
    """Writes this rank's stacks and collectives into a folder if nothing is told to it for a while."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = Path(folder, f"rank-{rank}")
        self._told, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def tell(self) -> None:
        self._told.set()

    def stop(self) -> None:
        self._over = True
        self._told.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over:
            if not self._told.wait(DEADLINE_S / 2):
                with self._file.open("w") as file:
                    faulthandler.dump_traceback(file)
                self._file.with_suffix(".pickle").write_bytes(c10d._dump_fr_trace(includeStackTraces=False))  # type: ignore[attr-defined, unused-ignore]
                return
            self._told.clear()


def _train(rank: int, size: int, seed: int, folder: Path) -> None:
    """A model of random layers and options, the same on all ranks, is trained for a while."""
    draw = random.Random(seed)
    widths = [draw.randint(1, 300) for _ in range(draw.randint(2, 12))]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    wrapped = DistributedDataParallel(
        model,
        bucket_cap_mb=draw.choice([0.001, 0.05, 25]),
        gradient_as_bucket_view=draw.random() < 0.5,
        find_unused_parameters=draw.random() < 0.3,
    )
    recorder = _Recorder(folder, rank)
    try:
        for _ in range(_OF_A_MODEL):
            wrapped(torch.ones(2, widths[0])).sum().backward()
            recorder.tell()
    finally:
        recorder.stop()


@pytest.mark.soak
def test_many_backwards(ranks: Ranks, tmp_path: Path) -> None:
    """DDP_LAB_BACKWARDS sets how many. One that stands still leaves its ranks' stacks and collectives in the folder."""
    for seed in range(BACKWARDS // _OF_A_MODEL):
        ranks(4, _train, seed, tmp_path)
