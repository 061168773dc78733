"""The rank side of figure 11: the effect of `no_sync` on convergence, with real data from installed packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_lab.bench.measuring.workloads import Transformer

from .models import resnet
from .settings import EVERY, Settings

__all__ = ["CASES", "on_ranks"]

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What is trained. ``batch`` counts what each rank takes for one backward; ``lr`` is plain SGD's."""

    data: str
    batch: int
    lr: float


CASES = (Case("digits", 8, 0.02), Case("digits", 256, 0.06), Case("text", 16, 0.06))
"""The first two pairs of batch and learning rate are the paper's, for a ResNet on MNIST."""
_LENGTH, _HIDDEN, _MASK = 24, 0.15, 0  # bytes of a piece of text, how many of them are hidden, and what is seen there
_HELD_OUT = 360


def _digits(generator: torch.Generator) -> tuple[Batch, Batch]:
    """1,797 images of handwritten digits, 8 x 8."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=generator)
    test, train = order[:_HELD_OUT], order[_HELD_OUT:]
    return (images[train], labels[train]), (images[test], labels[test])


def _text(generator: torch.Generator) -> tuple[Batch, Batch]:
    """Python's own help texts in pieces; bytes that are not masked have the label -100, which cross entropy ignores."""
    from pydoc_data.topics import topics

    whole = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
    pieces = whole[: len(whole) // _LENGTH * _LENGTH].view(-1, _LENGTH)
    pieces = pieces[torch.randperm(len(pieces), generator=generator)[:8000]]
    hidden = torch.rand(pieces.shape, generator=generator) < _HIDDEN
    seen, labels = pieces.masked_fill(hidden, _MASK), pieces.masked_fill(~hidden, -100)
    return (seen[_HELD_OUT:], labels[_HELD_OUT:]), (seen[:_HELD_OUT], labels[:_HELD_OUT])


_DATA: dict[str, tuple[Callable[[torch.Generator], tuple[Batch, Batch]], Callable[[], torch.nn.Module]]] = {
    "digits": (_digits, lambda: resnet(inputs=1, width=16)),
    # BERT's task in small: hidden bytes of a text, guessed from those on both sides; 0.1 million parameters.
    "text": (_text, lambda: Transformer(64, 128, heads=4, layers=2, inner=128, length=_LENGTH)),
}


def on_ranks(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Trains every case, averaging the gradients every 1, 2, 4, 8 backwards; called on all ranks of the default group.

    The gradients of the backwards between are summed up, as `no_sync` does it: an optimizer step follows each average.

    Args:
        settings: how many backwards.
        seed: of the model, the order of the data, and what is held out.

    Returns:
        JSON-able, for each case and each n: ``data``, ``batch``, ``lr``, ``every``, ``losses`` (of each backward, mean
        over the ranks), ``held_out`` (loss) and ``accuracy``.
    """
    return [
        {"data": case.data, "batch": case.batch, "lr": case.lr, "every": every}
        | _train(case, every, settings.backwards, seed)
        for case in CASES
        for every in EVERY
    ]


def _train(case: Case, every: int, backwards: int, seed: int) -> dict[str, Any]:
    from ddp_lab import DistributedDataParallel

    load, make = _DATA[case.data]
    torch.manual_seed(seed)
    train, test = load(torch.Generator().manual_seed(seed))
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    losses = []
    for number, (inputs, labels) in zip(range(backwards), _batches(train, case.batch, seed), strict=False):
        averaged = not (number + 1) % every
        with nullcontext() if averaged else model.no_sync():
            loss = _loss(model(inputs), labels)
            loss.backward()
        if averaged:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    of_ranks = torch.stack(losses)
    dist.all_reduce(of_ranks)
    return {"losses": (of_ranks / dist.get_world_size()).tolist()} | _judged(model.module, test)


def _loss(guessed: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of guesses ``(..., classes)`` for labels ``(...)``."""
    return F.cross_entropy(guessed.flatten(0, -2), labels.flatten())


def _batches(data: Batch, size: int, seed: int) -> Iterator[Batch]:
    """This rank's batches, endlessly: in each epoch the ranks divide the data in a new order."""
    inputs, labels = data
    world, generator = dist.get_world_size(), torch.Generator().manual_seed(seed)
    size = min(size, len(inputs) // world)
    while True:
        mine = torch.randperm(len(inputs), generator=generator)[dist.get_rank() :: world]
        for first in range(0, len(inputs) // world - size + 1, size):
            chosen = mine[first : first + size]
            yield inputs[chosen], labels[chosen]


def _judged(module: torch.nn.Module, test: Batch) -> dict[str, float]:
    inputs, labels = test
    module.eval()
    with torch.no_grad():
        guessed = module(inputs)
        loss = _loss(guessed, labels).item()
    asked = labels >= 0
    right = (guessed.argmax(dim=-1) == labels)[asked].float().mean().item()
    return {"held_out": loss, "accuracy": right}
