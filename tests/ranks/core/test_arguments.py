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

from tests.ranks.conftest import Ranks
from tests.ranks.wrapping import FORWARD_SYNC, needs_forward_sync


class Embedded(nn.Module):
    """A linear layer and an embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.linear = nn.Linear(4, 2)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(index)).sum(1)


def _frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def _two_types() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def _refusals() -> list[tuple[Any, dict[str, Any]]]:
    """Modules and arguments that both classes refuse."""
    plain = nn.Linear(2, 2)
    return [
        (_frozen(), {}),
        (nn.Flatten(), {}),
        (nn.LazyLinear(2), {}),
        (_two_types(), {}),
        (plain, {"device_ids": [0, 1]}),
        (plain, {"device_ids": [0]}),
        (plain, {"output_device": 1}),
        (plain, {"delay_all_reduce_named_params": [("weight", plain.weight)]}),
        (plain, {"param_to_hook_all_reduce": plain.weight}),
        (nn.Sequential(plain, nn.SyncBatchNorm(2)), {}),
        (plain, {"no_such_argument": 1}),
    ]


def _refused(wrap: Any, module: nn.Module, given: dict[str, Any]) -> tuple[type[Exception], str]:
    with pytest.raises(Exception) as caught:
        wrap(module, **given)
    return type(caught.value), str(caught.value)


def _refusals_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    for (module, given), (again, _) in zip(_refusals(), _refusals(), strict=True):
        theirs, their_text = _refused(TorchDDP, module, given)
        ours, our_text = _refused(DistributedDataParallel, again, given)
        assert ours is theirs, (given, our_text, their_text)
        assert our_text.split()[:4] == their_text.split()[:4]


def test_refusals_are_torchs(ranks: Ranks) -> None:
    """What torch refuses (frozen, uninitialized, mixed devices, device_ids, delayed arguments, SyncBatchNorm on the
    CPU, unknown names) ours refuses with the same exception class and the same first words."""
    ranks(1, _refusals_on_rank)


def _names_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    with pytest.raises(RuntimeError, match=r"requires a gradient\. Linear .*linear\.py:\d+\) has none"):
        DistributedDataParallel(_frozen())
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(RuntimeError, match=r"correctly initialize '1\.weight' of Sequential"):
        DistributedDataParallel(lazy)
    with pytest.raises(ValueError, match=r"SyncBatchNorm layers only work with GPU modules; '1' of Sequential"):
        DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


def test_refusals_name_the_culprit(ranks: Ranks) -> None:
    """A refusal names the parameter or layer, and the module's class with the line where it is written."""
    ranks(1, _names_on_rank)


def _warned(wrap: Any, **given: Any) -> list[tuple[type[Warning], str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = wrap(nn.Linear(2, 2), **given)
    del model
    if wrap is not TorchDDP:
        line = "model = wrap(nn.Linear(2, 2), **given)"
        assert all(linecache.getline(w.filename, w.lineno).strip() == line for w in caught), caught
    return [(w.category, " ".join(str(w.message).split()[:5])) for w in caught if "/parallel/" not in w.filename]


def _deprecations_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    for given in (
        {},
        {"broadcast_buffers": True},
        {"broadcast_buffers": False},
        {"forward_sync_buffers": False},
        {"check_reduction": True},
        {"static_graph": True},
        {"static_graph": True, "find_unused_parameters": True},
    ):
        ours = _warned(DistributedDataParallel, **given)
        theirs = [(w, text) for w, text in _warned(TorchDDP, **given)]
        assert [w for w, _ in ours] == [w for w, _ in theirs] or given.get("find_unused_parameters"), (given, ours)
    both = _warned(DistributedDataParallel, broadcast_buffers=True, forward_sync_buffers=False)
    assert both[0][0] is FutureWarning
    assert both[0][1].startswith("Both `broadcast_buffers`")
    assert _warned(DistributedDataParallel, static_graph=True, find_unused_parameters=True)[0][1].startswith(
        "You passed find_unused_parameters=true"
    )


@needs_forward_sync
def test_deprecations_are_torchs(ranks: Ranks) -> None:
    """broadcast_buffers and check_reduction are deprecated, static_graph with find_unused_parameters warns; each
    warning points at the line that wraps the model."""
    ranks(1, _deprecations_on_rank)


def _attributes_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

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


@needs_forward_sync
def test_attributes_are_torchs(ranks: Ranks) -> None:
    """Arguments are kept under torch's attribute names, with torch's defaults."""
    ranks(1, _attributes_on_rank)


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


def _caps_on_rank(rank: int, size: int, given: dict[str, Any], environment: dict[str, str], first: int | None) -> None:
    from ddp_lab import DistributedDataParallel

    default = dist._DEFAULT_FIRST_BUCKET_BYTES
    os.environ.update(environment)
    dist._DEFAULT_FIRST_BUCKET_BYTES = first or default
    try:
        assert _logged(DistributedDataParallel(_net(), **given)) == _logged(TorchDDP(_net(), **given))
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = default
        for name in environment:
            del os.environ[name]


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
def test_buckets_are_torchs(
    ranks: Ranks, given: dict[str, Any], environment: dict[str, str], first: int | None
) -> None:
    """bucket_cap_mb, bucket_cap_mb_list, DDP_SET_LAST_BUCKET_CAP, the default first bucket and find_unused_parameters
    lead to torch's buckets, before and after the rebuild (which find_unused_parameters goes without)."""
    ranks(2, _caps_on_rank, given, environment, first)


def _mesh_on_rank(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from ddp_lab import DistributedDataParallel

    mesh = init_device_mesh("cpu", (size,))
    model = DistributedDataParallel(nn.Linear(2, 2), device_mesh=mesh)
    assert model.device_mesh is mesh
    assert model.process_group is mesh.get_group()
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh arguments"):
        DistributedDataParallel(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=mesh)
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported, but got"):
        DistributedDataParallel(nn.Linear(2, 2), device_mesh=init_device_mesh("cpu", (1, size)))


def test_a_device_mesh_names_the_group(ranks: Ranks) -> None:
    """device_mesh of one dimension stands for its process group; both, or several dimensions, are refused."""
    ranks(2, _mesh_on_rank)


def _sliced_mesh_on_rank(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from ddp_lab import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def gradients(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = wrap(parallelize_module(net, mesh["tensor"], plan), device_mesh=mesh["data"])
        for _ in range(3):
            model.zero_grad()
            model(torch.full((2, 4), 1.0 + rank // 2)).sum().backward()
        return [parameter.grad for parameter in model._module_parameters]

    ours, theirs = gradients(DistributedDataParallel), gradients(TorchDDP)
    assert len(ours) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_slice_of_a_mesh_goes_with_tensor_parallel(ranks: Ranks) -> None:
    """device_mesh that is a slice of a larger one: a tensor parallel module is averaged over the other dimension, with
    torch's gradients; that its forward swaps tensors is no change of the model."""
    ranks(4, _sliced_mesh_on_rank)


def _no_communication_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    if rank == 0:  # nobody to talk to
        DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), init_sync=False)
    dist.barrier()


def test_without_init_sync_nothing_is_sent(ranks: Ranks) -> None:
    """init_sync=False: the constructor communicates nothing, so that one rank alone can run it."""
    ranks(2, _no_communication_on_rank)


def _own_group_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = pairs[0] if rank < 2 else pairs[1]
    model = DistributedDataParallel(nn.Linear(2, 2, bias=False), process_group=mine)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.unique().tolist() == [0.5 if rank < 2 else 2.0]
    if rank == 2:
        with pytest.raises(ValueError, match="not in the process group"):
            DistributedDataParallel(nn.Linear(2, 2), process_group=pairs[0])
    dist.barrier()


def test_a_group_of_some_ranks(ranks: Ranks) -> None:
    """process_group may be a subgroup; on a rank outside it the model is refused."""
    ranks(3, _own_group_on_rank)


def _buffers_differ_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    net = nn.Linear(2, 2)
    net.register_buffer("own", torch.zeros(rank + 1))
    with pytest.warns(FutureWarning) if FORWARD_SYNC else contextlib.nullcontext():
        DistributedDataParallel(net, broadcast_buffers=False)


def test_buffers_that_differ_between_ranks(ranks: Ranks) -> None:
    """broadcast_buffers=False allows buffers of different sizes on the ranks, as in torch."""
    ranks(2, _buffers_differ_on_rank)


def _different_on_rank(rank: int, size: int) -> list[str]:
    from ddp_lab import DistributedDataParallel

    def refusal(net: nn.Module) -> str:
        with pytest.raises(RuntimeError) as caught:
            DistributedDataParallel(net)
        return str(caught.value)

    torch.manual_seed(0)
    order = ["a", "b"] if rank == 0 else ["b", "a"]
    return [
        refusal(nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank)))),
        refusal(nn.Linear(2 + rank, 3)),
        refusal(nn.ModuleDict({name: nn.Linear(2, 2) for name in order})),
    ]


def test_models_that_differ(ranks: Ranks) -> None:
    """Another number of parameters, another shape, or equal shapes registered in another order on one rank: every
    rank raises, in torch's words and naming the parameter and the ranks."""
    first, second = ranks(2, _different_on_rank)
    assert first == second
    count, shape, order = first
    assert count.startswith(
        "DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has inconsistent 4 params"
    )
    assert "params[0] in rank 0 with sizes [3, 2] appears not to match sizes" in shape
    assert "rank 0: parameter 'a.weight'" in order
    assert "rank 1: parameter 'b.weight'" in order
