"""The constructor's arguments: defaults, refusals and deprecations are torch's, with more to read in the messages."""

from __future__ import annotations

import contextlib
import linecache
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks
from tests.ranks.wrapping import FORWARD_SYNC, needs_forward_sync


def _warned(wrap: Any, **given: Any) -> list[tuple[type[Warning], str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = wrap(nn.Linear(2, 2), **given)
    del model
    if wrap is not TorchDDP:
        line = "model = wrap(nn.Linear(2, 2), **given)"
        assert all(linecache.getline(w.filename, w.lineno).strip() == line for w in caught), caught
    return [
        (w.category, " ".join(str(w.message).split()[:5]).rstrip(".,"))
        for w in caught
        if "/parallel/" not in w.filename
    ]


@needs_forward_sync
@on_ranks(1)
def test_deprecations_are_torchs(rank: int, size: int) -> None:
    """broadcast_buffers and check_reduction are deprecated, static_graph with find_unused_parameters warns, each once
    and in torch's first words; the warning points at the line that wraps the model."""
    for given in (
        {},
        {"broadcast_buffers": True},
        {"broadcast_buffers": False},
        {"broadcast_buffers": True, "forward_sync_buffers": False},
        {"forward_sync_buffers": False},
        {"check_reduction": True},
        {"static_graph": True},
        {"static_graph": True, "find_unused_parameters": True},
    ):
        ours, theirs = _warned(DistributedDataParallel, **given), _warned(TorchDDP, **given)
        assert ours == theirs or given.get("find_unused_parameters"), (given, ours)
    assert _warned(DistributedDataParallel, static_graph=True, find_unused_parameters=True)[0][1].startswith(
        "You passed find_unused_parameters=true"
    )


@needs_forward_sync
@on_ranks(1)
def test_attributes_are_torchs(rank: int, size: int) -> None:
    """Arguments are kept under torch's attribute names, with torch's defaults."""
    for given in (
        {},
        {"bucket_cap_mb": 0.5},
        {"bucket_cap_mb_list": [1, 2]},
        {"dim": 1, "gradient_as_bucket_view": True},
    ):
        ours = DistributedDataParallel(nn.Linear(2, 2), **given)
        theirs = TorchDDP(nn.Linear(2, 2), **given)
        for name in (
            "bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default", "dim", "device", "device_type",
            "device_ids", "output_device", "find_unused_parameters", "static_graph", "gradient_as_bucket_view",
            "forward_sync_buffers", "broadcast_buffers", "require_backward_grad_sync", "require_forward_param_sync",
            "broadcast_bucket_size", "is_multi_device_module", "parameters_to_ignore", "mixed_precision",
            "use_side_stream_for_tensor_copies", "skip_all_reduce_unused_params", "batched_grad_copy",
        ):  # fmt: skip
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.broadcast_buffers is True
        ours.broadcast_buffers = False
        assert ours.forward_sync_buffers is False


def _net(layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))


def _logged(model: Any, steps: int = 3) -> dict[str, Any]:
    for _ in range(steps):
        model(torch.randn(2, 16)).sum().backward()
    data = model._get_ddp_logging_data()
    return {
        name: data.get(name)
        for name in ("bucket_sizes", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "has_rebuilt_buckets")
    }


@pytest.mark.parametrize(
    ("given", "environment", "first"),
    [
        ({}, {}, None),
        ({}, {}, 1100),
        ({}, {"DDP_SET_LAST_BUCKET_CAP": "1"}, 1100),
        ({"bucket_cap_mb": 0.002}, {}, None),
        ({"bucket_cap_mb": 0.002}, {"DDP_SET_LAST_BUCKET_CAP": "1"}, None),
        ({"bucket_cap_mb_list": [0.001, 0.003, 0.002]}, {}, None),
        ({"find_unused_parameters": True}, {}, 1100),
        ({"find_unused_parameters": True, "bucket_cap_mb": 0.003}, {}, None),
        ({"find_unused_parameters": True, "bucket_cap_mb_list": [0.001, 0.003]}, {}, None),
    ],
)
@on_ranks(2)
def test_buckets_are_torchs(
    rank: int, size: int, given: dict[str, Any], environment: dict[str, str], first: int | None
) -> None:
    """bucket_cap_mb, bucket_cap_mb_list, DDP_SET_LAST_BUCKET_CAP, the default first bucket and find_unused_parameters
    lead to torch's buckets, before and after the rebuild (which find_unused_parameters goes without)."""
    default = dist._DEFAULT_FIRST_BUCKET_BYTES
    os.environ.update(environment)
    dist._DEFAULT_FIRST_BUCKET_BYTES = first or default
    try:
        assert _logged(DistributedDataParallel(_net(), **given)) == _logged(TorchDDP(_net(), **given))
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = default
        for name in environment:
            del os.environ[name]


@on_ranks(2)
def test_without_init_sync_nothing_is_sent(rank: int, size: int) -> None:
    """init_sync=False: the constructor communicates nothing, so that one rank alone can run it."""
    if rank == 0:  # nobody to talk to
        DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), init_sync=False)
    dist.barrier()


@on_ranks(3)
def test_a_group_of_some_ranks(rank: int, size: int) -> None:
    """process_group may be a subgroup; on a rank outside it the model is refused."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = pairs[0] if rank < 2 else pairs[1]
    model = DistributedDataParallel(nn.Linear(2, 2, bias=False), process_group=mine)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.unique().tolist() == [0.5 if rank < 2 else 2.0]
    if rank == 2:
        with pytest.raises(ValueError, match="not in the process group"):
            DistributedDataParallel(nn.Linear(2, 2), process_group=pairs[0])
    dist.barrier()


@on_ranks(2)
def test_buffers_that_differ_between_ranks(rank: int, size: int) -> None:
    """broadcast_buffers=False allows buffers of different sizes on the ranks, as in torch."""
    net = nn.Linear(2, 2)
    net.register_buffer("own", torch.zeros(rank + 1))
    with pytest.warns(FutureWarning) if FORWARD_SYNC else contextlib.nullcontext():
        DistributedDataParallel(net, broadcast_buffers=False)
