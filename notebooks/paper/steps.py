"""The rank side of the figures about training steps: alternating variants."""

from __future__ import annotations

import copy
import gc
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.bench.measuring.fresh_ranks import take_turns

from .models import PAPER_MODELS
from .settings import PARTS, Series, Settings, Variant

__all__ = ["TimedStep", "on_ranks"]

_WARM_UP = 4  # steps: the first bucket assignment, the rebuild, and two as all others
_OVERLAPPED = 2  # steps with overlap before one without: buckets are rebuilt in the order that a backward shows


class TimedStep:
    """A step of plain SGD that records the times of its parts.

    Attributes:
        parts: part -> ms of each call so far, on average over its backwards.
    """

    def __init__(self, model: Any, batch: torch.Tensor, variant: Variant) -> None:
        self.parts: dict[str, list[float]] = {part: [] for part in PARTS}
        self._model, self._batch, self._variant = model, batch, variant
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def __call__(self) -> None:
        """One step: `every` backwards, of which the last one's gradients are averaged."""
        model, every = self._model, self._variant.every
        overlap = self._variant.overlap or len(self.parts["forward"]) < _OVERLAPPED
        taken = dict.fromkeys(PARTS, 0.0)
        at = time.perf_counter()

        def note(part: str) -> None:
            nonlocal at
            now = time.perf_counter()
            taken[part] += 1e3 * (now - at) / every
            at = now

        self._optimizer.zero_grad()
        note("optimizer")
        for number in range(every):
            averaged = number == every - 1 and overlap and not self._variant.alone
            with nullcontext() if averaged else model.no_sync():
                loss = model(self._batch).square().mean()
                note("forward")
                loss.backward()
                note("backward")
        if not overlap:
            model.sync_gradients()
            note("communication")
        self._optimizer.step()
        note("optimizer")
        for part, ms in taken.items():
            self.parts[part].append(ms)


class _Groups:
    """Process groups, each made once; all ranks make the same ones in the same order."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], list[Any]] = {}

    def of(self, variant: Variant) -> Any:
        """This rank's group for a variant."""
        from ddp_lab.comm import round_robin_process_group

        ranks = dist.get_world_size()
        world = variant.world or ranks
        plain = self._made.setdefault((variant.backend, world), [])
        while len(plain) < variant.groups:
            made = [
                dist.new_group(list(range(first, first + world)), backend=variant.backend)
                for first in range(0, ranks, world)
            ]
            plain.append(made[dist.get_rank() // world])
        wanted = plain[: variant.groups]
        return wanted[0] if len(wanted) == 1 else round_robin_process_group(wanted)


def on_ranks(series: Sequence[Series], settings: Settings, seed: int) -> dict[str, Any]:
    """Trains each model in all variants; called on all ranks of the default group.

    Args:
        series: variants that take turns.
        settings: models and seconds.
        seed: of the order of turns.

    Returns:
        JSON-able: model -> variant -> ``turns`` (median step of each turn, ms), ``steps`` (all that were counted, ms)
        and ``parts`` (part -> median ms).
    """
    from ddp_lab import comm

    comm.register()
    groups, found = _Groups(), {}
    for number, model in enumerate(settings.models):
        of_model: dict[str, Any] = {}
        for one in series:
            of_model |= _take_turns(model, one.variants, settings.seconds, groups, random.Random(seed + number))
        found[model] = of_model
    return found


def _take_turns(
    model: str, variants: Mapping[str, Variant], seconds: float, groups: _Groups, shuffle: random.Random
) -> dict[str, Any]:
    from ddp_lab import DistributedDataParallel

    torch.manual_seed(0)
    module, batch = PAPER_MODELS[model]()
    steps = {
        name: TimedStep(
            DistributedDataParallel(
                copy.deepcopy(module), process_group=groups.of(variant), bucket_cap_mb=variant.cap_mb
            ),
            batch,
            variant,
        )
        for name, variant in variants.items()
    }
    each: dict[str, list[float]] = {}
    until = time.monotonic() + seconds * len(variants)
    turns = take_turns(steps, dict.fromkeys(steps, _WARM_UP), until, shuffle, each)
    found = {}
    for name, step in steps.items():
        every = variants[name].every
        found[name] = {
            "turns": [ms / every for ms in turns[name]],
            "steps": [round(ms / every, 4) for ms in each[name]],
            "parts": {part: statistics.median(times[_WARM_UP:]) for part, times in step.parts.items()},
        }
    del steps, step
    gc.collect()
    return found
