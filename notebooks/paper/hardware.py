"""The cluster and the models of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(VLDB 2020, arXiv 2006.15704), as parameters of the simulator.

Nothing here is a result: `gain`, `bucket_sweep`, `scaling` and `skip_sync` run the simulator, and `simulated` makes
rows of numbers of it for each figure. Of the parameters,

- *given by the paper*: servers of 8 V100s with a 100 Gb/s network card each; 32 GPUs on 4 servers, up to 256 in a
  shared pool; ResNet50 and BERT; buckets of 25 MB unless they are varied; NCCL and Gloo.
- *public knowledge*: the shapes of ResNet50's parameters (He et al. 2015) and BERT-large's (Devlin et al. 2018; the
  paper does not say which BERT, but that it is more than ten times as large as ResNet50); backward takes twice as
  long as forward; a V100 trains about 385 images a second in fp32, so 32 take 83 ms; Gloo runs two collectives at a
  time, NCCL one.
- *calibrated here*, since the paper does not tell them: how much of the card's bandwidth a backend gets and its latency
  for each message, the time BERT computes, and how much the shared pool's GPUs differ from step to step.

"Gain" is the part of the time without overlap that overlap saves: figure 6 normalises to the former.

Where a figure needs more, it is assumed here and named as such:

- *outliers* (figures 7 and 8): in each step each GPU is late with a probability of `LATE`, by an exponentially
  distributed time of `LATE_BY` of the step on average. All wait for the latest, so with twice as many GPUs there are
  about twice as many outliers.
- *groups that take turns* (figure 12): between two bounds. Either all groups share the bandwidth that one has
  (`shared`: only latencies overlap), or each has as much again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_lab.simulation.link_model import CommModel
from ddp_lab.simulation.simulator import Configuration, Predictions, simulate, simulate_many
from ddp_lab.simulation.workload import Workload

from .settings import EVERY, GROUPS, PARTS

__all__ = ["GAINS", "MODELS", "bucket_sweep", "gain", "scaling", "simulated", "skip_sync", "steps_of"]

LATE, LATE_BY = 0.003, 0.15
_STEPS = 400  # of a distribution
_CAPS_MB = (0, 1, 2, 5, 10, 25, 50, 100, 200)
_WORLDS = (16, 32, 64, 128, 256)
_CALLS = (*(10**power for power in range(3, 8)), 20_000_000, 60_000_000)  # parameters
_ALL = 60_000_000  # parameters that are all-reduced in calls of these sizes

# Figure 6: percent of the time without overlap; what the simulation is compared with.
GAINS = {
    ("ResNet50", "nccl"): 38.0,
    ("BERT", "nccl"): 35.2,
    ("ResNet50", "gloo"): 26.8,
    ("BERT", "gloo"): 21.5,
}
_CARD_BYTES_PER_NS = 12.5  # 100 Gb/s, given
_GPUS_A_SERVER = 8  # given
_MS = 1e6


@dataclass(frozen=True)
class _Backend:
    """How a backend uses the card. Calibrated, but for the lanes."""

    share_of_card: float
    latency_ns: float
    lanes: int


BACKENDS = {
    "nccl": _Backend(share_of_card=0.27, latency_ns=15_000, lanes=1),
    "gloo": _Backend(share_of_card=0.13, latency_ns=40_000, lanes=2),
}
# Forward and backward together; ResNet50's public, BERT's calibrated.
_COMPUTE_NS = {"ResNet50": 83 * _MS, "BERT": 900 * _MS}
_OTHER_NS = {"ResNet50": 3 * _MS, "BERT": 20 * _MS}  # SGD: three passes over the parameters at 900 GB/s, and launches
_POOL_JITTER_NS = 12 * _MS  # calibrated; only in the shared pool, beyond 32 GPUs


def link(backend: str) -> CommModel:
    """All-reduce over more than one of the paper's servers: a ring whose slowest link is the card."""
    chosen = BACKENDS[backend]
    return CommModel(
        chosen.latency_ns, 1 / (_CARD_BYTES_PER_NS * chosen.share_of_card), algorithm="ring", lanes=chosen.lanes
    )


def resnet50() -> Workload:
    """25.6 million parameters in 161 tensors; a layer computes as long as its multiplications say."""
    layers = [_conv(3, 64, 7, 112)]
    inputs, side = 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            if block == 0:
                layers.append(_conv(inputs, 4 * width, 1, side))  # of the shortcut
            layers += [_conv(inputs, width, 1, side), _conv(width, width, 3, side), _conv(width, 4 * width, 1, side)]
            inputs = 4 * width
        side //= 2
    layers.append([(2048 * 1000, 2048 * 1000), (1000, 0)])
    return _workload("ResNet50", [tensor for layer in layers for tensor in layer])


def bert() -> Workload:
    """BERT-large: 335 million parameters, 24 layers, hidden size 1024."""
    width, tokens = 1024, 30522
    tensors: list[tuple[float, float]] = [(tokens * width, 0), (512 * width, 0), (2 * width, 0), (width, 0), (width, 0)]
    for _ in range(24):
        tensors += 4 * [(width * width, width * width), (width, 0)] + [(width, 0), (width, 0)]
        tensors += 2 * [(4 * width * width, 4 * width * width), (4 * width, 0)] + [(width, 0), (width, 0)]
    tensors += [(width * width, width * width), (width, 0)]
    return _workload("BERT", tensors)


def _conv(inputs: int, outputs: int, kernel: int, side: int) -> list[tuple[float, float]]:
    """(parameters, multiplications) of a convolution and its batch norm."""
    weights = inputs * outputs * kernel**2
    return [(weights, weights * side**2), (outputs, 0), (outputs, 0)]


def _workload(name: str, tensors: Sequence[tuple[float, float]]) -> Workload:
    sizes = [int(4 * numbers) for numbers, _ in tensors]
    work = [multiplications + 1 for _, multiplications in tensors]
    compute = _COMPUTE_NS[name]
    return Workload.made_up(
        sizes, forward_ns=compute / 3, backward_ns=2 * compute / 3, other_ns=_OTHER_NS[name], shares=work
    )


MODELS = {"ResNet50": resnet50, "BERT": bert}


def _overlapped(model: str, backend: str, ranks: int) -> list[Any]:
    """A step without and with overlap."""
    return [
        simulate(MODELS[model](), Configuration(world_size=ranks, overlap=overlap), link(backend))
        for overlap in (False, True)
    ]


def gain(model: str, backend: str, ranks: int = 32) -> float:
    """Figure 6: percent of the step without overlap that overlapping communication with the backward saves."""
    without, overlapped = _overlapped(model, backend, ranks)
    return float(100 * (1 - overlapped.step_ns / without.step_ns))


def bucket_sweep(model: str, backend: str, caps_mb: Sequence[float], ranks: int = 32) -> Predictions:
    """Figures 7 (16 GPUs) and 8 (32): a step for each bucket size in MB."""
    configurations = [Configuration(bucket_cap_mb=cap, world_size=ranks) for cap in caps_mb]
    return simulate_many(MODELS[model](), configurations, link(backend))


def scaling(model: str, backend: str, ranks: Sequence[int], sync_every: int = 1) -> npt.NDArray[np.float64]:
    """Figure 9: time of a step of each world, as a multiple of one GPU's; beyond 32 GPUs in the shared pool.

    Worlds within one server are left out: their links (NVLink) are not modelled.
    """
    if min(ranks) <= _GPUS_A_SERVER:
        raise ValueError(f"a server has {_GPUS_A_SERVER} GPUs; only larger worlds are modelled, got {list(ranks)}")
    configurations = [
        Configuration(world_size=n, sync_every=sync_every, jitter_ns=_POOL_JITTER_NS if n > 32 else 0.0)
        for n in (1, *ranks)
    ]
    steps = simulate_many(MODELS[model](), configurations, link(backend)).step_ns
    return np.asarray(steps[1:] / steps[0])


def skip_sync(model: str, backend: str, every: Sequence[int], ranks: int = 256) -> npt.NDArray[np.float64]:
    """Figure 10: percent of the time that synchronising only every n-th backward saves."""
    each = np.array([scaling(model, backend, [ranks], n)[0] * _alone(model, n) for n in (1, *every)])
    return np.asarray(100 * (1 - each[1:] / each[0]))


def _alone(model: str, every: int) -> float:
    """A step on one GPU, on average over `every` backwards of which one is followed by the optimizer."""
    return simulate(MODELS[model](), Configuration(world_size=1, sync_every=every), link("nccl")).step_ns


Row = dict[str, Any]


def _communication() -> Iterator[Row]:
    """Figure 2: ``seconds`` to all-reduce `_ALL` float32 in calls of ``size`` parameters, one after the other."""
    for backend in BACKENDS:
        for size in _CALLS:
            seconds = float(link(backend).time_ns(4.0 * size, 32)) * _ALL / size / 1e9
            yield {"backend": backend, "ranks": 32, "size": size, "seconds": seconds}


def _readiness() -> Iterator[Row]:
    """Figure 2: for each model when how many ``parameters`` are ``ready``, ms since the backward began."""
    for name, make in MODELS.items():
        workload = make()
        order = list(workload.order)
        counts = np.cumsum(workload.sizes[order] / 4)
        yield {"model": name, "parameters": counts.tolist(), "ready": (workload.ready_ns[0, order] / 1e6).tolist()}


def _breakdown(model: str, backend: str, ranks: int) -> Iterator[Row]:
    """Figure 6: the parts of a step in percent of the step without overlap."""
    steps = _overlapped(model, backend, ranks)
    for overlap, step in zip((False, True), steps, strict=True):
        times = (step.forward_ns, step.compute_ns, step.exposed_ns, step.other_ns)
        parts = {part: 100 * ns / steps[0].step_ns for part, ns in zip(PARTS, times, strict=True)}
        yield {"overlap": overlap, "parts": parts}


def steps_of(ms: float, ranks: int, chance: np.random.Generator) -> list[float]:
    """Steps of which some are outliers, as the module says.

    Args:
        ms: a step in which nobody is late.
        ranks: GPUs.
        chance: where from.
    """
    late = chance.random((_STEPS, ranks)) < LATE
    by = chance.exponential(LATE_BY * ms, (_STEPS, ranks))
    return [round(one, 3) for one in (ms + (late * by).max(axis=1)).tolist()]


def _buckets(model: str, backend: str, ranks: int) -> Iterator[Row]:
    """Figures 7 (16 GPUs) and 8 (32): for each size ``ms``, and the ``steps`` of a run with outliers."""
    chance = np.random.default_rng([ranks, *model.encode(), *backend.encode()])
    steps = bucket_sweep(model, backend, _CAPS_MB, ranks).step_ns / 1e6
    for cap, ms in zip(_CAPS_MB, steps.tolist(), strict=True):
        yield {"cap_mb": cap, "ms": ms, "steps": steps_of(ms, ranks, chance)}


def _scaling(model: str, backend: str, _: int) -> Iterator[Row]:
    """Figure 9: a step in multiples of one GPU's; beyond 32 GPUs in the shared pool."""
    yield {"ranks": 1, "ratio": 1.0}
    for ranks, ratio in zip(_WORLDS, scaling(model, backend, _WORLDS).tolist(), strict=True):
        yield {"ranks": ranks, "ratio": ratio}


def _skipping(model: str, backend: str, _: int) -> Iterator[Row]:
    """Figure 10: the time of a backward in percent of that with every one averaged."""
    for ranks in _WORLDS:
        for every, saved in zip(EVERY, skip_sync(model, backend, EVERY, ranks).tolist(), strict=True):
            yield {"ranks": ranks, "every": every, "percent": 100 - saved}


def _round_robin(model: str, backend: str, ranks: int) -> Iterator[Row]:
    """Figure 12: the step in multiples of that with one group, at both bounds."""
    one, workload, asked = link(backend), MODELS[model](), Configuration(world_size=ranks)
    alone = simulate(workload, asked, one).step_ns
    for shared in (True, False):
        for groups in GROUPS:
            several = replace(one, lanes=groups * one.lanes, sharing=1.0 if shared or groups == 1 else 0.0)
            ratio = simulate(workload, asked, several).step_ns / alone
            yield {"groups": groups, "shared": shared, "ratio": ratio}


_SIMULATED = {
    6: (_breakdown, 32),
    7: (_buckets, 16),
    8: (_buckets, 32),
    9: (_scaling, 1),
    10: (_skipping, 256),
    12: (_round_robin, 16),
}


def simulated(figure: int) -> list[Row]:
    """Rows of numbers for a figure, JSON-able; none for figure 11."""
    if figure == 2:
        return [*_communication(), *_readiness()]
    if figure not in _SIMULATED:
        return []
    rows, ranks = _SIMULATED[figure]
    return [
        {"model": model, "backend": backend, "ranks": ranks} | row
        for model, backend in GAINS
        for row in rows(model, backend, ranks)
    ]
