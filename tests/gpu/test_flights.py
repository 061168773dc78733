"""On a CUDA device with NCCL: what its Flight Recorder notes, as we read it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from tests.leftovers import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda is not available: no CUDA device or driver"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL"),
]


def _on_rank(rank: int, size: int, folder: str) -> None:
    os.environ["NCCL_HOSTID"] = f"host-{rank}"  # ranks that share one GPU
    torch.cuda.set_device(0)
    from ddp_lab.engine import flights, groups

    groups.install()
    flights.install(Path(folder))
    began = time.monotonic_ns()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    small, large = torch.ones(4, device="cuda"), torch.ones(1 << 18, device="cuda")
    dist.all_reduce(small)
    torch.cuda.synchronize()

    def seen() -> list[Any]:
        return [one for one in flights.flights(began) if one["backend"] == "nccl"]

    wait_until(lambda: seen() and not flights.in_flight()["count"], 60, "the end of the first")
    [first] = seen()
    assert (first["entered"], first["open_count"]) == (1, 0)
    assert first["kinds"] == [("all_reduce", "float32 [4]", 16)]
    work = dist.all_reduce(large, async_op=True) if rank == 0 else None
    if rank == 0:
        wait_until(lambda: flights.in_flight()["count"] == 1, 60, "the one in flight")
        oldest = flights.in_flight()["oldest"]
        assert (oldest["name"], oldest["number"], oldest["bytes"]) == ("all_reduce", 2, 1 << 20)
    Path(folder, f"seen-{rank}").touch()
    wait_until(lambda: all(Path(folder, f"seen-{other}").exists() for other in range(size)), 60, "the others")
    if work is None:
        dist.all_reduce(large)
    else:
        work.wait()
    torch.cuda.synchronize()
    wait_until(lambda: not flights.in_flight()["count"], 60, "the end of all")
    Path(folder, f"done-{rank}").touch()
    dist.destroy_process_group()


def test_what_nccl_has_in_flight() -> None:
    """An all-reduce that one rank alone has launched is in flight there, and is not when the other has come."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, (2, folder), nprocs=2)
        assert all(Path(folder, f"done-{rank}").exists() for rank in range(2))
