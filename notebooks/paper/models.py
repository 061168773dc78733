"""The models of the paper's figures: those of `ddp-lab bench step`, and a ResNet."""

from __future__ import annotations

import torch

from ddp_lab.bench.measuring.workloads import WORKLOADS, Workload

__all__ = ["PAPER_MODELS", "resnet"]


class _Residual(torch.nn.Module):
    """ResNet's basic block (He et al. 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        nn = torch.nn
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """float32 (batch, inputs, side, side) -> (batch, outputs, side / stride, side / stride)."""
        return torch.relu(self.main(features) + self.shortcut(features))


def resnet(inputs: int = 3, width: int = 64, classes: int = 10, stride: int = 2) -> torch.nn.Module:
    """A ResNet with one block in each of its four stages; with the defaults 4.9 million parameters."""
    nn = torch.nn
    widths = [width, 2 * width, 4 * width, 8 * width]
    blocks = [_Residual(a, b, 1 if a == b else 2) for a, b in zip([width, *widths], widths, strict=False)]
    return nn.Sequential(
        nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes),
    )  # fmt: skip


def _resnet() -> tuple[torch.nn.Module, torch.Tensor]:
    return resnet(), torch.randn(4, 3, 32, 32)


PAPER_MODELS: dict[str, Workload] = {"resnet": _resnet, **WORKLOADS}
"""What can be trained; the defaults are ``resnet`` and ``transformer``, which stands for BERT."""
