"""Ranks with NCCL on a GPU that they share, and what their tests need."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from ddp_lab.engine.groups.registry import bound_to

BOTH = "cpu:gloo,cuda:nccl"
NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda is not available: no CUDA device or driver"),
]
NEEDS_NCCL = [
    *NEEDS_CUDA,
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL"),
]


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any, backend: str = BOTH, devices: int = 1) -> list[Any]:
    """What `work(rank, *arguments)` returns on each rank.

    Args:
        size: number of ranks.
        work: a function of a module, called once there is a default process group.
        backend: of that group.
        devices: number of GPUs that the ranks take in turns.

    Raises:
        Exception: with the traceback of a rank on which `work` failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, (size, folder, backend, devices, work, arguments), nprocs=size)
        return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(size)]


def _on_rank(
    rank: int, size: int, folder: str, backend: str, devices: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    # Ranks that share one GPU: NCCL must take them for processes of different hosts.
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    device = torch.device("cuda", rank % devices)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", size)
    bound = bound_to(device, backend)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **bound)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(work(rank, *arguments)))
    dist.destroy_process_group()
