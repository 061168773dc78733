"""Which GPU the default group is given."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import distributed_c10d

from ddp_lab.engine.groups.registry import bound_to


@pytest.mark.parametrize(
    ("device", "backend", "setting", "by_nccl2"),
    [
        ("cuda:1", "cpu:gloo,cuda:nccl", None, True),
        ("cuda:1", "nccl", "1", True),
        ("cuda:1", "nccl", "0", False),
        ("cuda:1", "gloo", None, False),
        ("cpu", "cpu:gloo,cuda:nccl", None, False),
    ],
)
def test_device_of_a_group(
    device: str, backend: str, setting: str | None, by_nccl2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nccl2 is told the rank's GPU, by a torch that builds it; no other backend is told anything."""
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if setting is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", setting)
    told = by_nccl2 and hasattr(distributed_c10d, "_nccl2_device")
    assert bound_to(torch.device(device), backend) == ({"device_id": torch.device(device)} if told else {})
