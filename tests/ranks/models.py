"""Models that differ in what their parameters are like, for comparisons between reducers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Case", "batch_of"]


class Shared(nn.Module):
    """One weight under two names, and used three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(12, 12)
        self.decode = nn.Linear(12, 12)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.tanh(self.encode(torch.tanh(self.encode(x)))))


class Strided(nn.Module):
    """Parameters that are transposed, sliced (not dense), 0-dimensional and empty."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(0.1 * torch.randn(9, 12).t())
        self.sliced = nn.Parameter((0.1 * torch.randn(9, 14))[:, ::2])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.transposed @ self.sliced) * self.scale + self.empty.sum()


class MixedDtypes(nn.Module):
    """Parameters of float32, float64, bfloat16 and complex64."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(12, 8)
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.brain = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
        self.twist = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(self.single(x).double()).float() + self.brain.float()
        return (y * self.twist).abs()


class ManyDtypes(nn.Module):
    """Parameters of five dtypes, and of a sixth one that has no element."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128):
            name = str(dtype).removeprefix("torch.")
            self.register_parameter(f"{name}_long", nn.Parameter(torch.randn(12, dtype=dtype)))
            self.register_parameter(
                f"{name}_matrix", nn.Parameter(torch.randn(12, 3, dtype=dtype).t().contiguous().t())
            )
        self.empty = nn.Parameter(torch.empty(0, 5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros((len(x), 3), dtype=torch.complex128) + self.empty.sum().to(torch.complex128)
        for name, parameter in self.named_parameters():
            if name.endswith("long"):
                matrix = getattr(self, name.replace("long", "matrix"))
                total = total + (x.to(torch.complex128) * parameter.to(torch.complex128)) @ matrix.to(torch.complex128)
        return 0.01 * total.abs()


class SeveralOutputs(nn.Module):
    """A dict with a list: each output is used in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 12)
        self.heads = nn.ModuleList(nn.Linear(12, size) for size in (1, 3))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        body = torch.relu(self.body(x))
        return {"heads": [head(body) for head in self.heads], "body": body}


class Undefined(nn.Module):
    """A parameter that is in the graph but whose gradient autograd leaves undefined."""

    class _Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grads[0], None

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(12, 4)
        self.dropped = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._Drop.apply(self.used(x), self.dropped)


def _frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))
    net[2].requires_grad_(False)
    return net


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(12, 12), nn.Tanh()]
    return nn.Sequential(*layers)


def _conv(last: bool) -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last) if last else net


@dataclass(frozen=True)
class Case:
    """How to build a model and what it is fed; `whole_batch`: each sample counts alike, as in one process."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (12,)
    whole_batch: bool = True


MODELS = {
    "mlp": Case(_mlp),
    "shared": Case(Shared),
    "frozen": Case(_frozen),
    "strided": Case(Strided),
    "mixed_dtypes": Case(MixedDtypes),
    "many_dtypes": Case(ManyDtypes, whole_batch=False),  # float16 rounds
    "several_outputs": Case(SeveralOutputs),
    "undefined": Case(Undefined),
    "conv": Case(lambda: _conv(False), (3, 7, 7), whole_batch=False),  # BatchNorm sees its rank's samples alone
    "channels_last": Case(lambda: _conv(True), (3, 7, 7), whole_batch=False),
}


def batch_of(case: Case, rank: int, step: int, samples: int = 6) -> torch.Tensor:
    """Samples of one rank in one step, the same in every process that asks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(samples, *case.shape, generator=generator)


def loss_of(output: Any) -> torch.Tensor:
    """A mean over the samples of all tensors in the output."""
    if isinstance(output, torch.Tensor):
        return output.square().mean()
    parts = output.values() if isinstance(output, dict) else output
    return torch.stack([loss_of(part) for part in parts]).sum()
