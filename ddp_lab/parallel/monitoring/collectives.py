"""Runs a collective step by step on the real ranks, with small tensors, and records each rank's parts after each step.

[Note: numbers that tell where they have been]
Rank r begins with the number 2**r in every element that it contributes, and 0 elsewhere. Sums of different ranks'
contributions have one bit for each of them, so the data that arrived on a rank show its contributions.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from ...analysis.collectives import CollectiveRun, CollectiveStep, Transfer, schedule

__all__ = ["demonstrate"]

_MOST_RANKS = 53  # bits of a float64


def demonstrate(
    collective: str,
    algorithm: str = "ring",
    *,
    part_numel: int = 256,
    repeats: int = 1,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> CollectiveRun:
    """Runs a collective by sends and receives between the ranks. All ranks of the group must call it.

    Args:
        collective: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"``, ``"reduce"``,
            ``"gather"``, ``"scatter"`` or ``"all_to_all"``; the root is rank 0.
        algorithm: ``"ring"``, ``"tree"``, ``"chain"``, ``"halving"``, ``"doubling"`` or ``"direct"``, where the
            collective has it.
        part_numel: elements of a part; a buffer has as many parts as there are ranks, float64.
        repeats: how often it is run; of several runs the first, which makes connections, is not timed.
        process_group: the ranks; None for the default group. Rank numbers are relative to it.
        device: of the buffers; None: the GPUs if the default group has NCCL, else the CPU.

    Raises:
        ValueError: there is no such algorithm, or it does not support this number of ranks.
    """
    ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if ranks > _MOST_RANKS:
        raise ValueError(f"at most {_MOST_RANKS} ranks, not {ranks}")
    steps = schedule(collective, algorithm, ranks)
    if device is None:
        device = "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"
    where = torch.device(device)
    runs = []
    for _ in range(repeats):
        parts = _first_parts(collective, rank, ranks, part_numel, where)
        began = _held(parts)
        runs.append([_timed(step, parts, rank, process_group) for step in steps])
    held = [one for one, _ in runs[-1]]
    times = [[ms for _, ms in run] for run in runs[1:] or runs]
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (began, held, times), group=process_group)
    size = part_numel * torch.float64.itemsize
    return CollectiveRun(
        collective,
        algorithm,
        ranks,
        size * ranks,
        _holders([before for before, _, _ in everyone]),
        tuple(
            CollectiveStep(
                tuple(step),
                tuple(size * len(transfer.parts) for transfer in step),
                _holders([told[1][index] for told in everyone]),
                _slowest(everyone, index),
            )
            for index, step in enumerate(steps)
        ),
    )


def _slowest(everyone: list[Any], step: int) -> float:
    """The median of the runs' times on the slowest rank."""
    runs = range(len(everyone[0][2]))
    return float(statistics.median(max(times[run][step] for _, _, times in everyone) for run in runs))


def _first_parts(collective: str, rank: int, ranks: int, numel: int, device: torch.device) -> list[torch.Tensor]:
    def contributes(part: int) -> bool:
        own, root = part == rank, rank == 0
        return {"all_gather": own, "gather": own, "broadcast": root, "scatter": root}.get(collective, True)

    mine = [float(2**rank) if contributes(part) else 0.0 for part in range(ranks)]
    return [torch.full((numel,), value, dtype=torch.float64, device=device) for value in mine]


def _run(step: list[Transfer], parts: list[torch.Tensor], rank: int, group: dist.ProcessGroup | None) -> None:
    """This rank's part of one step."""
    incoming, operations = [], []
    for transfer in step:
        if transfer.target == rank:
            buffer = torch.empty_like(torch.cat([parts[part] for part in transfer.parts]))
            incoming.append((transfer, buffer))
            operations.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=transfer.source))
        if transfer.source == rank:
            sent = torch.cat([parts[part] for part in transfer.parts])
            operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=transfer.target))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for transfer, buffer in incoming:
        for part, arrived in zip(transfer.places, buffer.chunk(len(transfer.parts)), strict=True):
            if transfer.reduces:
                parts[part].add_(arrived)
            else:
                parts[part].copy_(arrived)


def _timed(
    step: list[Transfer], parts: list[torch.Tensor], rank: int, group: dist.ProcessGroup | None
) -> tuple[list[int], float]:
    """This rank's parts after the step, and its duration in ms."""
    begin = time.perf_counter()
    _run(step, parts, rank, group)
    float(parts[-1][-1])  # waits for a device
    ms = (time.perf_counter() - begin) * 1e3
    return _held(parts), ms


def _held(parts: list[torch.Tensor]) -> list[int]:
    for part in parts:
        if not bool((part == part[0]).all()):
            raise AssertionError("a part arrived incomplete")
    return [int(part[0]) for part in parts]


def _holders(by_rank: list[list[int]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    ranks = range(len(by_rank))
    return tuple(tuple(tuple(r for r in ranks if value >> r & 1) for value in values) for values in by_rank)
