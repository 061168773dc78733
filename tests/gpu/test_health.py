"""On a CUDA device: a rank tells how full and busy its GPU is, and asking makes no CUDA context."""

from __future__ import annotations

import pytest
import torch

from ddp_lab import Cluster
from ddp_lab.engine.gpu import Gpu
from ddp_lab.output.board import SilentBoard
from tests.gpu.ranks import NEEDS_CUDA
from tests.waiting import wait_until

pytestmark = NEEDS_CUDA

FILL = "kept = torch.ones(256 << 20, dtype=torch.uint8, device=device); torch.cuda.synchronize()"
BUSY = """
big = torch.ones(4096, 4096, device=device)
while True:
    for _ in range(20): big @ big
    torch.cuda.synchronize()
"""


def test_a_rank_tells_of_its_gpu() -> None:
    """Memory grows with what a cell keeps, also while the rank trains; the share of busy time is seen."""
    with Cluster(1) as lab:
        (before,) = lab.health()
        assert before.gpu_used is not None
        lab.run(FILL, board=SilentBoard())
        run = lab.run(BUSY, wait=False, board=SilentBoard())
        wait_until(lambda: (lab.health()[0].gpu_percent or 0) > 20, "a busy GPU")
        (during,) = lab.health()
        assert during.record.state == "running"
        assert during.gpu_used is not None
        assert during.gpu_total is not None
        assert before.gpu_used + (200 << 20) < during.gpu_used <= during.gpu_total
        lab.interrupt()
        with pytest.raises(Exception, match="interrupted"):
            run.wait()


def test_a_cpu_rank_has_none() -> None:
    """A rank on the CPU is not asked for a GPU, and has no CUDA context."""
    assert Gpu.of(torch.device("cpu")) is None
    with Cluster(1, backend="gloo") as lab:
        (one,) = lab.health()
        assert (one.gpu_used, one.gpu_total, one.gpu_percent) == (None, None, None)
        assert lab.run("torch.cuda.is_initialized()", board=SilentBoard()).values == {0: False}
