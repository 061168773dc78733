"""The rank side of `ddp-lab bench tune`: trains until it is given the buckets that mean the end."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .measuring.workloads import WORKLOADS, training_step

__all__ = ["END_MB", "train"]

END_MB = 12_345.0
"""A bucket cap that nobody uses: all ranks get it before the same step, and stop there."""


def train(model: str, endpoint: Mapping[str, str]) -> int:
    """Trains a model with torch's default buckets.

    Args:
        model: of `WORKLOADS`.
        endpoint: of the wire over which it is changed and seen.

    Returns:
        How many steps it trained.
    """
    import torch.distributed as dist

    from .. import DistributedDataParallel, recording
    from ..engine import model_control
    from ..engine.telemetry import Telemetry

    recording.enable()
    telemetry = Telemetry(endpoint, dist.get_rank(), dist.get_world_size())
    model_control.install(telemetry)
    telemetry.start()
    torch.manual_seed(0)
    module, batch = WORKLOADS[model]()
    ddp = DistributedDataParallel(module)
    step, steps = training_step(ddp, batch), 0
    while ddp.bucket_bytes_cap != int(END_MB * 2**20):
        step()
        steps += 1
    telemetry.stop()
    return steps
