"""Runs a collective step by step on the real ranks, with small tensors, and tells who held what after each step.

[Note: numbers that tell where they have been]
Rank r begins with the number 2**r in every element that it contributes, and 0 where it holds nothing. Sums of different
ranks' contributions have one bit for each of them, so what a rank holds is read off the data that really arrived there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .collective_schedules import Transfer, schedule

__all__ = ["Demonstration", "DemonstrationStep", "demonstrate"]

_MOST_RANKS = 53  # bits of a float64


@dataclass(frozen=True)
class DemonstrationStep:
    """One step of an algorithm.

    Attributes:
        transfers: what was sent, all at once.
        bytes: of each transfer.
        holds: after the step, by rank and part: whose contributions are in it.
        ms: how long the step took, of the slowest rank.
    """

    transfers: tuple[Transfer, ...]
    bytes: tuple[int, ...]
    holds: tuple[tuple[tuple[int, ...], ...], ...]
    ms: float


@dataclass(frozen=True)
class Demonstration:
    """A collective, step by step; the same on all ranks.

    Attributes:
        collective: e.g. ``"all_reduce"``.
        algorithm: e.g. ``"ring"``.
        ranks: how many.
        begin: what each rank held before, as `DemonstrationStep.holds`.
        steps: one after the other.
    """

    collective: str
    algorithm: str
    ranks: int
    begin: tuple[tuple[tuple[int, ...], ...], ...]
    steps: tuple[DemonstrationStep, ...]

    def bytes_sent(self, rank: int) -> int:
        """By one rank, in all steps."""
        return sum(
            size
            for step in self.steps
            for transfer, size in zip(step.transfers, step.bytes, strict=True)
            if transfer.source == rank
        )


def demonstrate(
    collective: str,
    algorithm: str = "ring",
    *,
    part_numel: int = 256,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Demonstration:
    """Runs a collective by sends and receives between the ranks. All ranks of the group call it.

    Args:
        collective: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"broadcast"`` (from rank 0).
        algorithm: ``"ring"``, ``"tree"``, ``"chain"``, ``"halving"`` or ``"doubling"``, where the collective has it.
        part_numel: elements of a part; a buffer has as many parts as there are ranks, float64.
        process_group: the ranks; None for the default group. Numbers of ranks are places in it.
        device: of the buffers.

    Raises:
        ValueError: there is no such algorithm, or it can't run on so many ranks.
    """
    ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if ranks > _MOST_RANKS:
        raise ValueError(f"at most {_MOST_RANKS} ranks, not {ranks}")
    steps = schedule(collective, algorithm, ranks)
    parts = _first_parts(collective, rank, ranks, part_numel, torch.device(device))
    began = _held(parts)
    seen = []
    for step in steps:
        begin = time.perf_counter()
        _run(step, parts, rank, process_group)
        held = _held(parts)  # waits for a device
        seen.append((held, (time.perf_counter() - begin) * 1e3))
    everyone: list[tuple[list[int], list[tuple[list[int], float]]]] = [([], [])] * ranks
    dist.all_gather_object(everyone, (began, seen), group=process_group)
    size = parts[0].nbytes
    return Demonstration(
        collective,
        algorithm,
        ranks,
        _holders([before for before, _ in everyone]),
        tuple(
            DemonstrationStep(
                tuple(step),
                tuple(size * len(transfer.parts) for transfer in step),
                _holders([told[index][0] for _, told in everyone]),
                max(told[index][1] for _, told in everyone),
            )
            for index, step in enumerate(steps)
        ),
    )


def _first_parts(collective: str, rank: int, ranks: int, numel: int, device: torch.device) -> list[torch.Tensor]:
    def contributes(part: int) -> bool:
        return {"all_gather": part == rank, "broadcast": rank == 0}.get(collective, True)

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
        for part, arrived in zip(transfer.parts, buffer.chunk(len(transfer.parts)), strict=True):
            if transfer.reduces:
                parts[part].add_(arrived)
            else:
                parts[part].copy_(arrived)


def _held(parts: list[torch.Tensor]) -> list[int]:
    for part in parts:
        if not bool((part == part[0]).all()):
            raise AssertionError("a part arrived incomplete")
    return [int(part[0]) for part in parts]


def _holders(by_rank: list[list[int]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    ranks = range(len(by_rank))
    return tuple(tuple(tuple(r for r in ranks if value >> r & 1) for value in values) for values in by_rank)
