"""_get_ddp_logging_data: torch's keys and values, its sampling, its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks

# Values that measure this run
_MEASURED = ("time", "num_buckets_reduced")
# torch writes it only when its logger is destroyed, where nobody can read it
_OURS = {"can_set_static_graph"}


class Net(nn.Module):
    """Two dtypes, a reversed order of use, one layer that is never used."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.first = nn.Linear(8, 8)
        if unused:
            self.unused = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.first(x).double())


def _data(wrap: Any, steps: int, **given: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = wrap(Net("find_unused_parameters" in given), bucket_cap_mb=0.0003, **given)
    for _ in range(steps):
        model(torch.randn(3, 8)).sum().backward()
    return model._get_ddp_logging_data()


@on_ranks(2)
def test_keys_and_values_are_torchs(rank: int, size: int) -> None:
    """At construction and in training, in four modes: torch's keys, and torch's values wherever they do not measure."""
    for given in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        for steps in (0, 1, 2, 4):
            ours, theirs = _data(DistributedDataParallel, steps, **given), _data(TorchDDP, steps, **given)
            if "static_graph" in given:  # torch knows the order of a static graph a step later
                for data in (ours, theirs):
                    for name in [n for n in data if "ready_order" in n]:
                        del data[name]
            assert set(ours) - _OURS == set(theirs), f"{given}, {steps} steps: {sorted(set(ours) ^ set(theirs))}"
            same = [name for name in theirs if not any(part in name for part in _MEASURED)]
            different = {name: (ours[name], theirs[name]) for name in same if ours[name] != theirs[name]}
            assert different == {}, f"{given}, {steps} steps: {different}"


@on_ranks(2)
def test_sampling(rank: int, size: int) -> None:
    """Data is taken in the first ten iterations, then at the given rate; times are in order."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    model._set_ddp_runtime_logging_sample_rate(3)
    for step in range(16):
        model(torch.randn(2, 4)).sum().backward()
        data = model._get_ddp_logging_data()
        assert data["iteration"] == (step if step <= 10 else max(10, step - step % 3))
        if step:
            assert data["forward_compute_time_start"] <= data["backward_compute_time_start"]
            assert data["backward_compute_time_start"] <= data["backward_comm_time_start"]
            assert data["backward_comm_time_start"] <= data["backward_comm_time_end"]
            for name in ("forward_compute_time", "backward_compute_time", "backward_comm_time"):
                assert data[name] >= 1
                assert data[f"avg_{name}"] >= 1
            overlap = data["backward_compute_comm_overlap_time"]
            assert 0 <= overlap <= min(data["backward_compute_time"], data["backward_comm_time"])
    assert data["can_set_static_graph"] is True


@on_ranks(2)
def test_errors_are_kept(rank: int, size: int) -> None:
    """An error of the reducer is found in the logging data (of the front: torch's test_ddp_python_error_logged)."""
    net = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    net.forward = lambda x: net[0](x)  # type: ignore[method-assign]
    model = DistributedDataParallel(net)
    model(torch.randn(2, 4)).sum().backward()
    assert "has_error" not in model._get_ddp_logging_data()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
        model(torch.randn(2, 4))
    assert str(caught.value).split("\nException raised")[0] in model._get_ddp_logging_data()["error"]
    assert model._get_ddp_logging_data()["has_error"] == 1
    dist.barrier()
