"""Which GPUs ranks can use, and how many threads each rank gets; without torch, so no CUDA context is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...documentation import with_help
from ...machine import visible_gpus

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_DEFAULT_CPU_RANKS = 2


@dataclass(frozen=True)
class Placement:
    """Where the ranks of one host run.

    Attributes:
        world_size: number of ranks.
        devices: each rank's device as torch names it there, e.g. ``"cuda:0"`` or ``"cpu"``.
        environment: variables of the process that imports torch, from which all ranks are forked.
        rank_environments: rank -> variables that it sets once it is forked, its threads among them.
    """

    world_size: int
    devices: tuple[str, ...]
    environment: dict[str, str]
    rank_environments: dict[int, dict[str, str]]


def place(
    n: int | None,
    devices: Sequence[int] | None,
    environment: Mapping[str, str],
    backend: str = "auto",
    gpus: Sequence[str] | None = None,
    cores: int | None = None,
    inherited: Mapping[str, str] = os.environ,
) -> Placement:
    """Decides how many ranks run, and where: one per GPU, or 2 CPU ranks if there is none.

    Args:
        n: number of ranks; None for one per device.
        devices: indices into the visible GPUs; None for all of them.
        environment: variables the user sets for the ranks.
        backend: ``"gloo"``, ``"mpi"`` and ``"shm"`` mean CPU ranks unless `devices` are given.
        gpus: the visible GPUs; None: detected.
        cores: number of the machine's; None: detected.
        inherited: variables that the ranks have besides.

    Raises:
        ValueError: no such device, or no rank at all.
    """
    gpus = visible_gpus({**inherited, **environment}) if gpus is None else list(gpus)
    if devices is not None:
        bad = [index for index in devices if not 0 <= index < len(gpus)]
        if bad or not devices:
            have = f"{len(gpus)} GPUs are visible" if gpus else "no GPU is visible"
            said = f"devices={list(devices)}: {have}" + (f"; there is no device {bad[0]}" if bad else "")
            raise ValueError(said if gpus else with_help(said, "no-gpu"))
        gpus = [gpus[index] for index in devices]
    elif backend in ("gloo", "mpi", "shm"):
        gpus = []
    world_size = n if n is not None else len(gpus) or _DEFAULT_CPU_RANKS
    if world_size < 1:
        raise ValueError(f"a cluster needs at least one rank, got n={n}")
    threads = max(1, (cores or len(os.sched_getaffinity(0))) // world_size)
    unset = [name for name in _THREAD_VARIABLES if name not in {**inherited, **environment}]
    of_ranks = {rank: dict.fromkeys(unset, str(threads)) for rank in range(world_size)}
    # One thread while torch is imported: OpenBLAS would start the others before the ranks are forked.
    variables = {**dict.fromkeys(unset, "1"), **environment}
    if not gpus:
        return Placement(world_size, ("cpu",) * world_size, variables, of_ranks)
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if world_size > len(gpus):  # NCCL refuses two ranks on one GPU of one host: each gets a host id of its own
        for rank, own in of_ranks.items():
            own["NCCL_HOSTID"] = f"ddp_lab-{rank}"
    devices_of_ranks = tuple(f"cuda:{rank % len(gpus)}" for rank in range(world_size))
    return Placement(world_size, devices_of_ranks, variables, of_ranks)
