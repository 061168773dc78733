"""The models that `ddp-lab bench` trains, and the modes in which they are wrapped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

__all__ = [
    "CONTESTANTS",
    "MODES",
    "WORKLOADS",
    "Step",
    "Transformer",
    "training_step",
    "wrappers",
]

Step = Callable[[], None]
Workload = Callable[[], tuple[torch.nn.Module, torch.Tensor]]

# Torch's class appears twice: the difference between its two instances is the noise of the machine.
CONTESTANTS = ("torch", "ours", "torch again")


def _mlp() -> tuple[torch.nn.Module, torch.Tensor]:
    width = 2048
    layers: list[torch.nn.Module] = []
    for _ in range(6):  # 6 * 2048 * 2049 = 25.2 million parameters
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers), torch.randn(32, width)


class Transformer(torch.nn.Module):
    """A language model, with the defaults of 10.0 million parameters: embedding 0.6, five layers 8.9, head 0.6.

    Args:
        width: of a word's vector.
        words: there are.
        heads, layers: how many.
        inner: width of each layer's feed-forward part.
        length: of a text, whose places are learned; 0: any, places are not told apart.
    """

    def __init__(
        self, width: int = 384, words: int = 1500, heads: int = 6, layers: int = 5, inner: int = 1536, length: int = 0
    ) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, heads, inner, dropout=0.0, batch_first=True)
        self.embedding = torch.nn.Embedding(words, width)
        self.position = torch.nn.Parameter(0.02 * torch.randn(length, width)) if length else None
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the words: int64 (batch, length) -> float32 (batch, length, words)."""
        vectors = self.embedding(tokens)
        if self.position is not None:
            vectors = vectors + self.position
        logits: torch.Tensor = self.head(self.layers(vectors))
        return logits


def _transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    return Transformer(), torch.randint(1500, (4, 16))


def _conv_net() -> tuple[torch.nn.Module, torch.Tensor]:
    nn = torch.nn
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip
    return net, torch.randn(16, 3, 32, 32)


def _small_tensors() -> tuple[torch.nn.Module, torch.Tensor]:
    layers: list[torch.nn.Module] = []
    for _ in range(200):  # weight and bias each: 400 tensors
        layers += [torch.nn.Linear(16, 16), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers), torch.randn(32, 16)


WORKLOADS: dict[str, Workload] = {
    "mlp": _mlp,
    "transformer": _transformer,
    "conv_net": _conv_net,
    "small_tensors": _small_tensors,
}

MODES: dict[str, dict[str, bool]] = {
    "plain": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


def wrappers() -> dict[str, Callable[..., torch.nn.Module]]:
    """The class of each contestant."""
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    from ddp_lab import DistributedDataParallel

    return dict(zip(CONTESTANTS, (TorchDDP, DistributedDataParallel, TorchDDP), strict=True))


def training_step(
    model: torch.nn.Module, batch: torch.Tensor, *, alone: bool = False, after: Callable[[], None] | None = None
) -> Step:
    """One step of plain SGD, as a function to be called again and again.

    Args:
        model: wrapped or not.
        batch: its input.
        alone: under the wrapper's ``no_sync``: this rank's gradients, without communication.
        after: is called between the backward and the optimizer.

    Returns:
        It; on a GPU it returns when the device has done all of it.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    context: Callable[[], AbstractContextManager[None]] = cast(Any, model).no_sync if alone else nullcontext

    def step() -> None:
        optimizer.zero_grad()
        with context():
            model(batch).square().mean().backward()
        if after is not None:
            after()
        optimizer.step()
        if batch.is_cuda:
            torch.cuda.synchronize(batch.device)

    return step
