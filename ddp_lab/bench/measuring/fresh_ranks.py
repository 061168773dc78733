"""Fresh sets of Gloo processes for a measurement."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["run"]


Prepare = Callable[[int], None]


def _run_rank(
    rank: int,
    size: int,
    folder: str,
    threads: int,
    device: str,
    prepare: Prepare | None,
    function: Callable[..., Any],
    args: Any,
) -> None:
    if prepare is not None:
        prepare(rank)
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")  # what is measured is its cost
    torch.set_num_threads(threads)
    if device == "cuda":
        if size > torch.cuda.device_count():  # they share GPUs, which NCCL allows to processes of different hosts alone
            os.environ["NCCL_HOSTID"] = f"rank {rank}"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    found = function(*args)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    threads: int = 1,
    device: str = "cpu",
    prepare: Prepare | None = None,
) -> Any:
    """Calls ``function(*args)`` on each of `ranks` new processes that form one Gloo group.

    Args:
        function: module-level, since processes are spawned; its result must survive JSON.
        args: its arguments.
        ranks: processes.
        threads: intra-op threads of each.
        device: ``"cuda"``: each has a GPU as its current device, in turns where there are fewer.
        prepare: is called with the rank before the process forms the group; a picklable object.

    Returns:
        What rank 0 returned.
    """
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (ranks, folder, threads, device, prepare, function, args), nprocs=ranks)
        return json.loads(Path(folder, "result.json").read_text())
