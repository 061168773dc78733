"""One of the two ranks that `capability_table.capabilities` starts: tries operations and writes the results.

``python -m ddp_lab.comm.capability_trial FOLDER RANK BACKEND ...``; RANK is ``mpi`` under mpiexec. The ranks meet in
the folder; rank 0 writes a line of JSON into ``FOLDER/answers`` before each operation, and one with its result.
Operations with a result there are not tried again: if an operation has ended the ranks, new ones continue after it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.distributed import ReduceOp

from .mpi import register as register_mpi
from .mpi import started_by
from .mpi import why_not as mpi_missing
from .round_robin import register as register_round_robin
from .round_robin import round_robin_process_group
from .shared_memory import register as register_shared_memory

__all__ = ["OPERATIONS", "main", "why_not"]

DEVICES = ("cpu", "cuda")
_SIZE = 2
_TIMEOUT = timedelta(seconds=30)
_NO_GPU = "torch finds no GPU on this machine"

Make = Callable[..., torch.Tensor]


def why_not(backend: str, device: str) -> str:
    """Why a backend can't be tried on this machine; ``""`` if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return _NO_GPU
    missing = {
        "gloo": not dist.is_gloo_available(),
        "nccl": not dist.is_nccl_available(),
        "ucc": not dist.is_ucc_available(),
    }
    if missing.get(backend):
        return f"this torch was built without {backend.upper()}"
    if backend == "mpi":
        if mpi_missing():
            return mpi_missing()
        if started_by(_SIZE):
            return "" if device == "cpu" else "MPI is used only for CPU tensors"
        return "MPI groups require processes started by mpiexec, and there is no mpiexec"
    if backend == "nccl" and not torch.cuda.is_available():
        return _NO_GPU
    return ""


def _point_to_point(group: Any, rank: int, make: Make) -> Any:
    if rank == 0:
        dist.send(make(7.0), 1, group=group, tag=3)
        return None
    got = make(0.0)
    dist.recv(got, 0, group=group, tag=3)
    return got, 7.0


def _any_source(group: Any, rank: int, make: Make) -> Any:
    if rank == 0:
        dist.send(make(7.0), 1, group=group)
        return None
    got = make(0.0)
    assert dist.recv(got, None, group=group) == 0
    return got, 7.0


def _broadcast(group: Any, rank: int, make: Make) -> Any:
    tensor = make(float(rank + 1))
    dist.broadcast(tensor, 1, group=group)
    return tensor, 2.0


def _all_reduce(op: Any, expected: float, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    def call(group: Any, rank: int, make: Make) -> Any:
        tensor = make(rank + 1).to(dtype)
        dist.all_reduce(tensor, op, group=group)
        return tensor, expected

    return call


def _all_reduce_coalesced(group: Any, rank: int, make: Make) -> Any:
    tensors = [make(float(rank)), make(float(rank + 1))]
    dist.all_reduce_coalesced(tensors, group=group)
    return torch.cat(tensors), [1.0] * 4 + [3.0] * 4


def _all_reduce_sparse(group: Any, rank: int, make: Make) -> Any:
    tensor = make(float(rank + 1)).to_sparse()
    dist.all_reduce(tensor, group=group)
    return tensor.to_dense(), 3.0


def _reduce(group: Any, rank: int, make: Make) -> Any:
    tensor = make(float(rank + 1))
    dist.reduce(tensor, 0, group=group)
    return (tensor, 3.0) if rank == 0 else None


def _all_gather(group: Any, rank: int, make: Make) -> Any:
    got = [make(0.0) for _ in range(_SIZE)]
    dist.all_gather(got, make(float(rank)), group=group)
    return torch.cat(got), [0.0] * 4 + [1.0] * 4


def _all_gather_into_tensor(group: Any, rank: int, make: Make) -> Any:
    got = torch.cat([make(0.0)] * _SIZE)
    dist.all_gather_into_tensor(got, make(float(rank)), group=group)
    return got, [0.0] * 4 + [1.0] * 4


def _gather(group: Any, rank: int, make: Make) -> Any:
    got = [make(0.0) for _ in range(_SIZE)] if rank == 0 else None
    dist.gather(make(float(rank)), got, 0, group=group)
    return (torch.cat(got), [0.0] * 4 + [1.0] * 4) if got else None


def _scatter(group: Any, rank: int, make: Make) -> Any:
    got = make(0.0)
    dist.scatter(got, [make(5.0), make(6.0)] if rank == 0 else None, 0, group=group)
    return got, 5.0 + rank


def _reduce_scatter(group: Any, rank: int, make: Make) -> Any:
    got = make(0.0)
    dist.reduce_scatter(got, [make(float(rank)), make(10.0 + rank)], group=group)
    return got, (1.0, 21.0)[rank]


def _reduce_scatter_tensor(group: Any, rank: int, make: Make) -> Any:
    got = make(0.0)
    dist.reduce_scatter_tensor(got, torch.cat([make(float(rank)), make(10.0 + rank)]), group=group)
    return got, (1.0, 21.0)[rank]


def _all_to_all(group: Any, rank: int, make: Make) -> Any:
    got = [make(0.0) for _ in range(_SIZE)]
    dist.all_to_all(got, [make(10.0 * rank), make(10.0 * rank + 1)], group=group)
    return torch.cat(got), [0.0 + rank] * 4 + [10.0 + rank] * 4


def _all_to_all_single(group: Any, rank: int, make: Make) -> Any:
    got = torch.cat([make(0.0)] * _SIZE)
    dist.all_to_all_single(got, torch.cat([make(10.0 * rank), make(10.0 * rank + 1)]), group=group)
    return got, [0.0 + rank] * 4 + [10.0 + rank] * 4


def _barrier(group: Any, rank: int, make: Make) -> Any:
    make(0.0)  # a missing device fails here
    group.barrier(_barrier_options(make(0.0).device)).wait()


def _barrier_options(device: torch.device) -> Any:
    options = dist.BarrierOptions()
    options.device = device
    return options


# What is tried, with (group, rank, make): `make` makes a tensor of 4 equal elements. Returns a tensor and what it must
# hold, if it must hold something on this rank.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "send, recv": _point_to_point,
    "recv from any": _any_source,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce(ReduceOp.SUM, 3.0),
    "all_reduce (AVG)": _all_reduce(ReduceOp.AVG, 1.5),
    "all_reduce (BAND)": _all_reduce(ReduceOp.BAND, 0, torch.int64),
    "all_reduce, sparse": _all_reduce_sparse,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}


class _Trial:
    """One rank's part."""

    def __init__(self, folder: Path, rank: int | None, backends: Sequence[str]) -> None:
        """`rank`: None under mpiexec, which sets it."""
        self._backends = backends
        self._answers = folder / "answers"
        self._answers.touch()
        lines = self._answers.read_text().splitlines()  # rank 0 continues writing when both are here
        answered = [line for line in map(json.loads, lines) if "works" in line]
        self._known = {(line["operation"], line["backend"], line["device"]) for line in answered}
        self._store = FileStore(str(folder / f"store {len(lines)}"), _SIZE)
        self._store.set_timeout(2 * _TIMEOUT)
        self._count = 0
        default = "gloo" if dist.is_gloo_available() else "nccl"
        if rank is None:
            dist.init_process_group(default, init_method="mpi://")
        else:
            dist.init_process_group(default, store=PrefixStore("groups", self._store), rank=rank, world_size=_SIZE)
        self._rank = dist.get_rank()
        # With one GPU both ranks use it, which NCCL allows only for different hosts.
        os.environ["NCCL_HOSTID"] = f"rank {self._rank}"
        if torch.cuda.is_available():
            torch.cuda.set_device(self._rank % torch.cuda.device_count())

    def run(self) -> None:
        for backend in self._backends:
            for device in DEVICES:
                self._try_all(backend, device)

    def _try_all(self, backend: str, device: str) -> None:
        left = [one for one in OPERATIONS if (one, backend, device) not in self._known]
        if ("", backend, device) in self._known or not left:
            return
        about = {"operation": "", "backend": backend, "device": device}
        missing = why_not(backend, device)
        group: Any = None
        if not missing:
            self._write(about)
            group, missing = self._make(backend, device)
        if missing:
            self._write({**about, "works": False, "why_not": missing})
            return
        for operation in left:
            about = {"operation": operation, "backend": backend, "device": device}
            self._write(about)
            failed = ""
            if group is None:
                group, failed = self._make(backend, device)
            failed = failed or self._agree(partial(self._call, OPERATIONS[operation], group, device))
            self._write({**about, "works": not failed, "why_not": failed})
            if failed and group is not None:
                # It may be unusable after that, with an operation in flight that never ends.
                for kind in group._device_types:
                    group._get_backend(kind).abort()
                dist.destroy_process_group(group)
                group = None
        if group is not None:
            dist.destroy_process_group(group)

    def _make(self, backend: str, device: str) -> tuple[Any, str]:
        """A new group, or why there is none."""
        made: list[Any] = []

        def make() -> None:
            if backend == "round_robin":
                inner = "nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"
                made.append(round_robin_process_group([dist.new_group(backend=inner) for _ in range(2)]))
            else:
                made.append(dist.new_group(backend=backend, timeout=_TIMEOUT))

        why = self._agree(make)
        return (None if why else made[0]), why

    def _call(self, call: Callable[..., Any], group: Any, device: str) -> None:
        where = (
            torch.device(device, self._rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")
        )
        result = call(group, self._rank, lambda value: torch.full((4,), float(value), device=where))
        if result is not None:
            found, expected = result
            if not bool((found.cpu().double() == torch.as_tensor(expected, dtype=torch.float64)).all()):
                raise RuntimeError(f"the result is {found.tolist()}, not {expected}")

    def _agree(self, action: Callable[[], None]) -> str:
        """Runs it on both ranks; returns why it failed on one of them, ``""`` if it did not."""
        self._count += 1
        try:
            action()
            mine = ""
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
            mine = (str(error).splitlines() or [type(error).__name__])[0]
        self._store.set(f"{self._count}/{self._rank}", mine or "yes")
        answers = [self._store.get(f"{self._count}/{rank}").decode() for rank in range(_SIZE)]
        return next((answer for answer in answers if answer != "yes"), "")

    def _write(self, line: dict[str, Any]) -> None:
        if self._rank == 0:
            with self._answers.open("a") as file:
                file.write(json.dumps(line) + "\n")


def main(folder: str, rank: str, *backends: str) -> None:
    """Tries everything with these backends, as rank `rank` of two (``"mpi"``: as the one that mpiexec says)."""
    warnings.simplefilter("ignore")
    register_shared_memory()
    register_round_robin()
    register_mpi()
    trial = _Trial(Path(folder), None if rank == "mpi" else int(rank), backends)
    trial.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
