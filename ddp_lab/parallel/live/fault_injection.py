"""Fault injection in a user's program: `with ddp_lab.fault_injection.slow_layer(model, "0.weight", 0.02):`.

Each happens on the rank that calls it, from the next forward on. Faults are real: a slow rank sleeps, a lost rank
kills its process. From a notebook `Cluster.inject` does the same while a cell runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from ... import faults
from .model import LiveModel

__all__ = ["active", "die", "drop_gradient", "end", "inject", "slow_layer", "slow_link", "slow_rank"]


class Model(Protocol):
    """A `ddp_lab.DistributedDataParallel`."""

    _live: LiveModel


def inject(model: Model, fault: faults.Fault) -> int | None:
    """Injects a fault from the model's next forward on; does nothing on other ranks than the fault's.

    Returns:
        The fault's number, for `end`; None on other ranks.

    Raises:
        ValueError: it is invalid for this model.
    """
    return model._live.inject(fault)


def end(model: Model, number: int | None = None) -> None:
    """Ends one fault of this rank, or all of the model's, before its next forward."""
    model._live.end_faults(number)


def active(model: Model) -> list[dict[str, Any]]:
    """The model's faults on this rank: the fields of each, its ``number``, and whether it has ``begun``."""
    return model._live.faults()


@contextmanager
def slow_rank(model: Model, seconds: float) -> Iterator[None]:
    """Each forward inside takes `seconds` longer on this rank."""
    with _during(model, faults.SlowRank(dist.get_rank(), seconds)):
        yield


@contextmanager
def slow_layer(model: Model, parameter: str, seconds: float) -> Iterator[None]:
    """In each backward inside, the gradient of the named parameter is `seconds` late on this rank."""
    with _during(model, faults.SlowLayer(dist.get_rank(), parameter, seconds)):
        yield


@contextmanager
def slow_link(model: Model, latency_seconds: float = 0.0, mb_per_second: float | None = None) -> Iterator[None]:
    """Delays buckets of this rank before their collectives start, as on a slow link."""
    with _during(model, faults.SlowLink(dist.get_rank(), latency_seconds, mb_per_second)):
        yield


def drop_gradient(model: Model, parameter: str) -> None:
    """Drops the gradient of the named parameter in this rank's next synchronised backward."""
    inject(model, faults.DroppedGradient(dist.get_rank(), parameter))


def die(model: Model) -> None:
    """Kills this rank's process at its next forward."""
    inject(model, faults.DeadRank(dist.get_rank()))


@contextmanager
def _during(model: Model, fault: faults.Fault) -> Iterator[None]:
    number = inject(model, fault)
    try:
        yield
    finally:
        end(model, number)
