"""The rank side of figure 2: all-reduces of different sizes, and readiness of gradients."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_lab.bench.measuring.fresh_ranks import rank_zeros

from .models import PAPER_MODELS
from .settings import Settings

__all__ = ["on_ranks"]

_SIZES = tuple(10**power for power in range(3, 9))  # parameters of a call
_TURNS = 3
_AT_ONCE = 64  # works that are kept before they are waited for
_BACKWARDS = 7


def on_ranks(settings: Settings, seed: int) -> dict[str, Any]:
    """Measures both halves of the figure; called on all ranks of the default group.

    Args:
        settings: how many parameters, which backends and models, and seconds for each size.
        seed: of the order of turns.

    Returns:
        JSON-able: ``seconds`` (backend -> size as text -> of each turn; where there was no time for all calls, what all
        would take) and ``ready`` (model -> ``parameters``: how many, ``backward`` and ``forward``: when they were
        ready and used, ms since each began).
    """
    from ddp_lab import comm

    comm.register()
    groups = {backend: dist.new_group(backend=backend) for backend in settings.backends}
    sizes = [size for size in _SIZES if size < settings.parameters] + [settings.parameters]
    data = torch.zeros(settings.parameters)
    found: dict[str, dict[str, list[float]]] = {name: {str(size): [] for size in sizes} for name in groups}
    shuffle, turns = random.Random(seed), [(name, size) for name in groups for size in sizes]
    counts = {turn: _count(data, turn[1], groups[turn[0]], settings.seconds / _TURNS) for turn in turns}
    for _ in range(_TURNS):
        shuffle.shuffle(turns)
        for name, size in turns:
            count = counts[name, size]
            taken = _all_reduces(data, size, count, groups[name])
            found[name][str(size)].append(taken * len(data) / min(count * size, len(data)))
    return {"seconds": found, "ready": {model: _readiness(model) for model in settings.models}}


def _all_reduces(data: torch.Tensor, size: int, count: int, group: Any) -> float:
    """Seconds of so many calls, launched without waiting for the ones before."""
    pieces = data.split(size)
    dist.barrier()
    begin, works = time.perf_counter(), []
    for number in range(count):
        works.append(dist.all_reduce(pieces[number % len(pieces)], group=group, async_op=True))
        if len(works) == _AT_ONCE:
            _wait(works)
    _wait(works)
    return time.perf_counter() - begin


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
    works.clear()


def _count(data: torch.Tensor, size: int, group: Any, seconds: float) -> int:
    """How many calls of a size fit into the time; at most all of them."""
    calls = -(-len(data) // size)
    tried = min(calls, 2)
    _all_reduces(data, size, tried, group)
    each = _all_reduces(data, size, tried, group) / tried
    return rank_zeros(max(1, min(calls, int(seconds / each))))


def _readiness(model: str) -> dict[str, list[float]]:
    torch.manual_seed(0)
    module, batch = PAPER_MODELS[model]()
    backwards, forwards = [], []
    for _ in range(_BACKWARDS):
        module.zero_grad()
        used, output = _noted(lambda: module(batch), _leaves(module))
        loss = output.square().mean()
        ready, _ = _noted(loss.backward, ((one, one.register_post_accumulate_grad_hook) for one in module.parameters()))
        backwards.append(ready)
        forwards.append(used)
    return {
        **dict(zip(("parameters", "backward"), _median(backwards), strict=True)),
        **dict(zip(("used", "forward"), _median(forwards), strict=True)),
    }


_Hooked = Iterable[tuple[Any, Callable[..., Any]]]  # what is counted, and how to hear of it


def _leaves(module: torch.nn.Module) -> _Hooked:
    """The modules that have parameters of their own, each with these; attention calls no modules in it."""
    whole = [one for one in module.modules() if isinstance(one, torch.nn.MultiheadAttention)]
    inside = {id(below) for one in whole for below in one.children()}
    for one in module.modules():
        parameters = list(one.parameters(recurse=isinstance(one, torch.nn.MultiheadAttention)))
        if parameters and id(one) not in inside:
            yield parameters, one.register_forward_hook


def _noted(call: Callable[[], Any], hooked: _Hooked) -> tuple[list[tuple[int, float]], Any]:
    """(parameters, ms since the call began) of all observed events, in order; and the result of the call."""
    notes: list[tuple[int, float]] = []

    def hearing(what: Any) -> Callable[..., None]:
        count = sum(one.numel() for one in (what if isinstance(what, list) else [what]))
        return lambda *_: notes.append((count, 1e3 * (time.perf_counter() - begin)))

    begin = 0.0
    handles = [register(hearing(what)) for what, register in hooked]
    begin = time.perf_counter()
    returned = call()
    for handle in handles:
        handle.remove()
    return notes, returned


def _median(runs: list[list[tuple[int, float]]]) -> tuple[list[float], list[float]]:
    """How many parameters so far, and when; the median over the runs after the first."""
    counts = np.cumsum([count for count, _ in runs[0]]).tolist()
    times = np.median([[at for _, at in run] for run in runs[1:]], axis=0).tolist()
    return counts, times
