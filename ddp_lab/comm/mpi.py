"""The backend "mpi" for a torch without one: `_mpi`, which exists if ddp_lab was built with MPI (`make mpi`).

[Note: in torch's place for MPI]
torch treats the name "mpi" specially: `init_process_group("mpi")` needs no rendezvous, because MPI itself assigns the
ranks; the group is made by `ProcessGroupMPI.create`. Wheels lack this class. `register` puts `_Creator` in its place,
and makes `torch.distributed.is_mpi_available` return True. So torch's documentation of MPI holds: processes started by
mpiexec only call `init_process_group("mpi")`. Where another launcher has started several processes it returns False:
libraries that choose a backend by it (accelerate) would train alone in each process.

Such a group has no store. If one is needed (for groups of other backends), use ``"mpi://"`` as `init_method` with any
backend, including "cpu:mpi": ranks are MPI's, and rank 0 sends the others the address of its store through MPI.
"""

from __future__ import annotations

import atexit
import inspect
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import register_rendezvous_handler

from .. import native
from ..errors import ExtensionError

__all__ = ["LAUNCHED", "NAME", "check_started", "ours", "register", "started_by", "why_not"]

NAME = "mpi"
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # Open MPI's and MPICH's mpiexec

LAUNCHED = (
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_",
    "MPI_LOCALNRANKS",
)  # variables that mpiexec, or srun with MPI, sets
_START = "start the program with `mpiexec -n {} python ...`, from which MPI knows the other processes"

_EXTENSION = "_mpi"
_REMEDY = (
    "install MPI's compiler (Debian: apt install libopenmpi-dev openmpi-bin), then build ddp_lab with `make mpi` or "
    "`MPICXX=mpicxx pip install --no-build-isolation --force-reinstall --no-deps .`"
)
_ENDING_SECONDS = 10.0

_module: Any = None
_failed = False  # whether the program ends with an exception


def why_not() -> str:
    """Why there is no backend "mpi" here, with a fix; ``""`` if there is one, torch's or ours."""
    if dist.is_mpi_available() or native.path_of(_EXTENSION, torch.__version__) is not None:
        return ""
    return f"neither this torch nor ddp_lab was built with MPI: {_REMEDY}"


def register() -> None:
    """Makes ``"mpi"`` usable unless this torch has its own or there is no extension; can be called repeatedly."""
    if ours() or dist.is_mpi_available() or why_not():
        return
    torchs: Any = distributed_c10d
    torchs.ProcessGroupMPI = _Creator
    torchs._MPI_AVAILABLE = True
    dist.is_mpi_available = _knows_ranks
    dist.Backend.backend_capability[NAME] = ["cpu"]
    register_rendezvous_handler(NAME, _rendezvous)


def _knows_ranks() -> bool:
    """Whether MPI knows all ranks: mpiexec has started this process, or no other launcher has started more than one."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or any(name.startswith(LAUNCHED) for name in os.environ)


def ours() -> bool:
    """Whether ``"mpi"`` is this package's, not torch's own."""
    torchs: Any = distributed_c10d
    return getattr(torchs, "ProcessGroupMPI", None) is _Creator


def started_by(size: int) -> bool:
    """Whether mpiexec started this process as one of `size`."""
    return str(size) in (os.environ.get(name) for name in _SIZES)


def check_started(world_size: int) -> None:
    """Refuses the backend if MPI can't know all ranks, before it begins.

    Raises:
        RuntimeError: there is no MPI, or mpiexec did not start these ranks; the message has a fix.
    """
    missing = why_not()
    if missing:
        raise RuntimeError(f"the backend 'mpi' is not available: {missing}")
    if world_size > 1 and not started_by(world_size):
        raise RuntimeError(
            f"backend 'mpi' needs {world_size} processes started by one mpiexec, which did not start this rank "
            f"(a cluster forks its ranks): run a script with `mpiexec -n {world_size} python ...`, or use the backend "
            "'shm' or 'gloo'"
        )


class _Creator:
    """Replaces the class that torch calls to make a group of MPI."""

    @staticmethod
    def create(ranks: Sequence[int]) -> Any:
        """The c10d backend on one of its ranks; no ranks: of all processes that mpiexec started together.

        Raises:
            RuntimeError: MPI's ranks differ from torch's.
        """
        # torch passes only the ranks, but the caller knows more.
        frame = inspect.currentframe()
        asking = frame.f_back.f_locals if frame is not None and frame.f_back is not None else {}
        if "opts" in asking:  # from torch 2.14 on
            asking = {name: getattr(asking["opts"], name) for name in ("group_rank", "group_size", "timeout")}
        if dist.is_initialized():
            wanted = dist.get_rank(), dist.get_world_size()
        else:
            wanted = asking.get("group_rank", -1), asking.get("group_size", -1)
        if wanted[1] > 1 and not any(name.startswith(LAUNCHED) for name in os.environ):
            # Otherwise MPI would start a daemon for this single process.
            raise RuntimeError(
                f"mpiexec did not start this process, which is rank {wanted[0]} of {wanted[1]} for torch.distributed: "
                + _START.format(wanted[1])
            )
        rank, size = _begin()
        if wanted != (-1, -1):  # else MPI decides
            _check_place((rank, size), wanted)
        backend = _module.backend(list(ranks) or list(range(size)))
        if isinstance(asking.get("timeout"), timedelta):
            backend.set_timeout(asking["timeout"])
        return backend


def _check_place(found: tuple[int, int], wanted: tuple[int, int]) -> None:
    if found != wanted:
        started = any(name in os.environ for name in _SIZES)
        why = "all ranks must be started by one mpiexec, in its order" if started else _START.format(wanted[1])
        raise RuntimeError(
            f"this process is rank {found[0]} of {found[1]} for MPI, but rank {wanted[0]} of {wanted[1]} for "
            f"torch.distributed: {why}"
        )


def _begin() -> tuple[int, int]:
    """Begins MPI in this process; returns rank and number of processes."""
    global _module
    if _module is None:
        try:
            _module = native.load(_EXTENSION)
        except ExtensionError as error:
            raise RuntimeError(f"the backend 'mpi' can't be loaded: {error}; {_REMEDY}") from error
        _end_with_process()
    rank, size = _module.begin()
    return int(rank), int(size)


def _end_with_process() -> None:
    """Lets MPI end when the program ends.

    Not after an exception: MPI's end waits for all processes, and those that wait for this one would never arrive.
    mpiexec ends them when it sees the exit code.
    """
    pid = os.getpid()
    former = sys.excepthook

    def hook(*args: Any) -> None:
        global _failed
        _failed = True
        former(*args)

    def end() -> None:
        if not _failed and os.getpid() == pid and not _module.end(_ENDING_SECONDS):
            print("ddp_lab: operations of MPI are still in flight at the program's end", file=sys.stderr)

    sys.excepthook = hook
    atexit.register(end)


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Serves ``init_method="mpi://"``: MPI's rank and number of processes, and a store of rank 0's."""
    mine = _begin()
    given = tuple(own if asked == -1 else asked for asked, own in zip((rank, world_size), mine, strict=True))
    _check_place(mine, (int(given[0]), int(given[1])))
    timeout = options.get("timeout", timedelta(minutes=30))
    host = socket.gethostname()
    if mine[0] == 0:
        store = TCPStore("localhost", 0, mine[1], is_master=True, timeout=timeout, wait_for_workers=False)
        _module.tell_all(f"{host} {store.port}")
    else:
        there, port = _module.tell_all("").split()
        store = TCPStore("localhost" if there == host else there, int(port), mine[1], timeout=timeout)
    yield store, mine[0], mine[1]
    raise RuntimeError("the ranks of mpi:// can't meet a second time")
