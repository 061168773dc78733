"""Findings about the program around the model: data loading, other collectives, its own lines, cores and contexts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from ...formatting import counted, enumeration, ms
from ..step_parts import PARTS, STARTS, Place
from .facts import Facts, Finding

__all__ = ["REPLAYED", "cause", "collectives", "contexts", "copies", "data_loading", "lines", "seldom_work"]
__all__ += ["shared_cores", "shares_cores", "values_read"]

_LEAST_PERCENT, _LEAST_OF_LINES, _LEAST_ON_DEVICE = 5.0, 10.0, 2.0  # of the step
_MUCH_STARTING = 0.1  # share of the time in data loaders that starts workers
_EXPLAINS = 0.4  # share of a rank's delay that a part must explain to be its cause
_LEAST_EXCESS_S = 0.0005
_READS: Final = (".item(", ".cpu(", ".tolist(", ".numpy(", "float(loss", "print(loss")
_MOVES: Final = (".to(", ".cuda(")
_SELDOM: Final = {
    "evaluation": "Evaluate less often, on fewer batches, or with each rank on a part of the data.",
    "logging": "Log every tenth step, and on rank 0 only.",
    "checkpoint": "Save less often, on rank 0 only, or in the background (torch.distributed.checkpoint.async_save).",
}
REPLAYED: Final = ("bucket-too-big", "bucket-too-small", "first-bucket-late", "parameter-last", "order-changed")
"""Kinds that a replay of the recorded steps estimates: it knows nothing of cores that ranks share."""


def _on_device(facts: Facts) -> bool:
    return any(not device.startswith("cpu") for _, device in facts.keys)


def shares_cores(facts: Facts) -> list[tuple[str, int, int, int]]:
    """Hosts whose ranks have more threads than the host has cores: (host, ranks, threads of all, cores)."""
    if _on_device(facts):
        return []
    by_host: dict[str, list[Mapping[str, object]]] = {}
    for rank in facts.steps.ranks:
        if rank in facts.processes:
            by_host.setdefault(str(facts.processes[rank]["host"]), []).append(facts.processes[rank])
    made = []
    for host, ranks in by_host.items():
        threads, cores = sum(int(str(one["threads"])) for one in ranks), int(str(ranks[0]["cores"]))
        if len(ranks) > 1 and threads > cores:
            made.append((host, len(ranks), threads, cores))
    return made


def shared_cores(facts: Facts) -> Iterator[Finding]:
    """Ranks that have more threads than there are cores."""
    found = shares_cores(facts)
    if not found or not facts.together:
        return
    host, ranks, threads, cores = max(found, key=lambda one: one[2] / one[3])
    waited = facts.percent_of_mean(float(facts.replay.waited.sum(axis=0).mean()))
    fewer = max(1, cores // ranks)
    remedy = (
        f"Start at most {counted(cores, 'rank')} here"
        if ranks > cores
        else f"Give each rank {counted(fewer, 'thread')} (OMP_NUM_THREADS)"
    )
    yield Finding(
        kind="shared-cores",
        title=f"The ranks share cores: {ranks} ranks with {threads} threads run on {counted(cores, 'core')}.",
        evidence=f"On {host} a rank computes only while others pause; the ranks wait {waited:.0f} % of the step for "
        f"each other. Which bucket size is best can't be estimated from these steps.",
        remedy=f"{remedy}. To find the bucket size all the same, measure it: lab.tune(), or ddp-lab tune for a script.",
        gain_percent=waited,
    )


def data_loading(facts: Facts) -> Iterator[Finding]:
    """Ranks that wait for their data loader in most steps."""
    if facts.parts is None or not facts.parts.by_rank:
        return
    by_rank = facts.parts.seconds("data")
    late = {facts.steps.ranks[one.rank] for one in facts.late}
    rank = max(by_rank, key=lambda one: by_rank[one])
    seconds = min(by_rank.values()) if rank in late else by_rank[rank]  # a late rank's finding names its cause
    percent = facts.percent_of_parts(seconds)
    if percent < _LEAST_OF_LINES:
        return
    yield Finding(
        kind="data-loading",
        title="The training waits for its data loader.",
        evidence=f"Each step, {ms(1e3 * seconds)} ({percent:.0f} %) pass in the data loader{_workers(facts)}.",
        remedy=_of_loader(facts),
        gain_percent=percent,
    )


def _loader(facts: Facts) -> Place | None:
    """The data loader that most time is spent in."""
    known = facts.parts.lines("data") if facts.parts is not None else ()
    return next((place for place, _ in known if place.workers >= 0), None)


def _workers(facts: Facts) -> str:
    loader = _loader(facts)
    return "" if loader is None else f" of {loader.name} ({counted(loader.workers, 'worker')})"


def _of_loader(facts: Facts) -> str:
    loader = _loader(facts)
    if loader is None or loader.workers <= 0:
        return "Load batches in the background: DataLoader(..., num_workers=2, persistent_workers=True)."
    known = [(place, sum(by_rank.values())) for place, by_rank in facts.parts.lines("data")] if facts.parts else []
    starts = sum(seconds for place, seconds in known if place.name.endswith(STARTS))
    if starts > _MUCH_STARTING * sum(seconds for _, seconds in known):
        return "Keep the loader's workers and its iterator: persistent_workers=True, and one iterator for an epoch."
    return "The workers can't keep up: use more (num_workers), a larger prefetch_factor, or do less work per sample."


def cause(facts: Facts, rank: int, delay_ns: float) -> tuple[str, str]:
    """Why a rank is late before its backward, as far as the parts of its step tell.

    Returns:
        A sentence and a suggested fix; both empty if no part explains the delay.
    """
    if facts.parts is None or rank not in facts.parts.by_rank or len(facts.parts.by_rank) < 2:
        return "", ""
    excess = {}
    for part in PARTS:
        if part in ("alone", "hidden", "exposed", "written", "unnamed"):
            continue
        by_rank = facts.parts.seconds(part)
        others = float(np.median([seconds for other, seconds in by_rank.items() if other != rank]))
        excess[part] = (by_rank[rank] - others, by_rank[rank], others)
    part = max(excess, key=lambda one: excess[one][0])
    more, own, others = excess[part]
    if more < max(_LEAST_EXCESS_S, _EXPLAINS * delay_ns / 1e9):
        return "", ""
    lines = [place for place, by_rank in facts.parts.lines(part) if by_rank.get(rank, 0) > own / 2]
    at = f", at {lines[0]}" if lines else ""
    said = f"{PARTS[part]} {ms(1e3 * own)} per step, {ms(1e3 * others)} on the others{at}."
    return f"It spends in {said}", _of_loader(facts) if part == "data" else _SELDOM.get(part, "")


def collectives(facts: Facts) -> Iterator[Finding]:
    """Collectives between the backwards, for example of a scalar that is logged."""
    yield from _of_part(
        facts,
        "collectives",
        "other-collectives",
        _LEAST_PERCENT,
        "Each step also waits in other collectives.",
        "Join scalars into one tensor, and reduce it every tenth step, or asynchronously (async_op=True).",
    )


def seldom_work(facts: Facts) -> Iterator[Finding]:
    """Evaluation, logging and checkpoints that take much of the time."""
    for part, remedy in _SELDOM.items():
        title = f"Much of the time goes to {PARTS[part]}."
        yield from _of_part(facts, part, f"{part}-cost", _LEAST_PERCENT, title, remedy)


def _of_part(facts: Facts, part: str, kind: str, least: float, title: str, remedy: str) -> Iterator[Finding]:
    if facts.parts is None or not facts.parts.by_rank:
        return
    by_rank = facts.parts.seconds(part)
    seconds = float(np.mean(list(by_rank.values())))
    percent = facts.percent_of_parts(seconds)
    if percent < least:
        return
    where = enumeration([str(place) for place, _ in facts.parts.lines(part)[:2]])
    evidence = f"On average {ms(1e3 * seconds)} of each step ({percent:.0f} %): {where}."
    yield Finding(kind=kind, title=title, evidence=evidence, remedy=remedy, gain_percent=percent)


def lines(facts: Facts) -> Iterator[Finding]:
    """One line between the steps that takes long."""
    yield from _line(
        facts,
        "program-line",
        _LEAST_OF_LINES,
        "One line of the program takes long in each step, outside of the model.",
        "Do it less often, ahead of the step, or in another thread or process.",
    )


def values_read(facts: Facts) -> Iterator[Finding]:
    """Values that are read from a device in each step: the program waits until the device has computed them."""
    if _on_device(facts):
        yield from _line(
            facts,
            "value-read",
            _LEAST_ON_DEVICE,
            "Each step waits for a value from the device.",
            "Read values every tenth step, or keep them on the device: total += loss.detach().",
            _READS,
        )


def _line(
    facts: Facts, kind: str, least: float, title: str, remedy: str, texts: Sequence[str] = ("",)
) -> Iterator[Finding]:
    """The line outside of all named parts that takes longest, of those that hold one of the texts."""
    if facts.parts is None or not facts.parts.by_rank:
        return
    for place, by_rank in facts.parts.lines("code"):
        seconds = sum(by_rank.values()) / len(facts.parts.by_rank)
        percent = facts.percent_of_parts(seconds)
        if percent >= least and any(text in place.text for text in texts):
            evidence = f"{ms(1e3 * seconds)} of each step ({percent:.0f} %) are spent at {place}."
            yield Finding(kind=kind, title=title, evidence=evidence, remedy=remedy, gain_percent=percent)
            return


def copies(facts: Facts) -> Iterator[Finding]:
    """Copies to a device that the program waits for."""
    if facts.parts is None or not _on_device(facts):
        return
    moves = [(place, by_rank) for place, by_rank in facts.parts.lines("code") if any(m in place.text for m in _MOVES)]
    moves += facts.parts.lines("copies")
    seconds = sum(sum(by_rank.values()) for _, by_rank in moves) / max(1, len(facts.parts.by_rank))
    percent, loader = facts.percent_of_parts(seconds), _loader(facts)
    pinned = loader is not None and loader.pin_memory
    waits = any("non_blocking" not in place.text for place, _ in moves)
    if percent < _LEAST_ON_DEVICE or (pinned and not waits):
        return
    yield Finding(
        kind="blocking-copies",
        title="Each step waits while its batch is copied to the device.",
        evidence=f"{ms(1e3 * seconds)} of each step ({percent:.0f} %) are spent at {moves[0][0]}; the loader's batches "
        f"are {'' if pinned else 'not '}in pinned memory.",
        remedy="Build the loader with pin_memory=True, and copy with tensor.to(device, non_blocking=True).",
        gain_percent=percent,
    )


def contexts(facts: Facts) -> Iterator[Finding]:
    """Ranks whose process holds a context on a GPU besides its own."""
    for rank in facts.steps.ranks:
        held = facts.processes.get(rank, {}).get("contexts", ())
        if len(held) > 1:
            gpus = enumeration([str(one) for one in held])
            yield Finding(
                kind="context-on-other-gpu",
                title=f"Rank {rank} holds CUDA contexts on {len(held)} GPUs: {gpus}.",
                evidence="A context takes some hundred MB of a GPU that another rank uses.",
                remedy="Call torch.cuda.set_device(local_rank) before anything else uses a GPU, and load checkpoints "
                'with map_location="cpu".',
                gain_percent=0.0,
                rank=rank,
            )
