"""Backends and collectives of our own for torch.distributed; importing this registers the backends.

After `import ddp_lab.comm`, ``"shm"`` is a name like ``"gloo"``: `torch.distributed.init_process_group("shm")`,
`new_group(backend="shm")`, under torchrun or anywhere. `round_robin_process_group` makes one group of several.
If ddp_lab was built with MPI, so is ``"mpi"``, for processes started by mpiexec.
`all_reduce_multigpu` and similar functions take several tensors of each process. `capabilities` shows which operation
works with which backend on which device here.
"""

from __future__ import annotations

from . import mpi, round_robin, shared_memory
from .capability_table import Capabilities, capabilities
from .multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
    reduce_scatter_multigpu,
)
from .round_robin import round_robin_process_group

__all__ = [
    "Capabilities",
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "capabilities",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
    "register",
    "round_robin",
    "round_robin_process_group",
    "shared_memory",
]


def register() -> None:
    """Registers ``"shm"``, ``"round_robin"`` and, if built, ``"mpi"`` with torch.distributed; repeatable."""
    shared_memory.register()
    round_robin.register()
    mpi.register()


register()
