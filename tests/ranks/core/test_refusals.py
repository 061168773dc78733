"""What torch's class refuses ours refuses too: same exception class, words that people search for, and more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks


@dataclass(frozen=True)
class Refusal:
    """A wrong use: `provoke(class)` raises with `words` in both texts, and with `ours` in ours alone."""

    provoke: Callable[[Any], Any]
    words: str
    ours: tuple[str, ...] = ()
    everywhere: bool = True  # False: torch does not refuse it in a build for GPUs


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def _frozen() -> nn.Module:
    return _net().requires_grad_(False)


def _on_two_device_types() -> nn.Module:
    net = _net()
    net[1].to("meta")
    return net


def _without_group(cls: Any) -> Any:
    default = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(None)
    try:
        return cls(_net())
    finally:
        dist.distributed_c10d._update_default_pg(default)


def _hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def _hook_of_a_list(state: Any, bucket: list) -> torch.futures.Future[torch.Tensor]:  # type: ignore[type-arg]
    raise AssertionError("is not called")


def _hook_that_gives_a_tensor(state: Any, bucket: dist.GradBucket) -> torch.Tensor:
    raise AssertionError("is not called")


# Torch compares the annotations themselves, which this module's are not: they are postponed.
_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
_hook_of_a_list.__annotations__ = {"bucket": list}
_hook_that_gives_a_tensor.__annotations__ = {"return": torch.Tensor}


def _two_hooks(cls: Any) -> None:
    model = cls(_net())
    model.register_comm_hook(None, _hook)
    model.register_comm_hook(None, _hook)


def _static_too_late(cls: Any) -> None:
    model = cls(_net())
    model(torch.ones(1, 2)).sum().backward()
    model._set_static_graph()


def _names_for(cls: Any, more: int) -> None:
    model = cls(_net())
    parameters, _ = model._build_params_for_reducer()
    extra = [nn.Parameter(torch.ones(1)) for _ in range(max(more, 0))]
    model._build_debug_param_to_name_mapping((parameters + extra) if more > 0 else parameters[:more])


def _lazy(cls: Any) -> Any:
    return cls(nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(2)))


def _two_dimensional_mesh(cls: Any) -> Any:
    return cls(_net(), device_mesh=init_device_mesh("cpu", (1, dist.get_world_size())))


def _mesh_and_group(cls: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return cls(_net(), device_mesh=mesh, process_group=dist.group.WORLD)


def _half_of_a_delay(cls: Any) -> Any:
    net = _net()
    return cls(net, delay_all_reduce_named_params=[("0.weight", net[0].weight)])


REFUSALS = {
    "nothing to train": Refusal(
        lambda cls: cls(_frozen()),
        "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.",
        ("Sequential", "container.py:"),
    ),
    "parameter without a shape": Refusal(
        _lazy,
        "Modules with uninitialized parameters can't be used with `DistributedDataParallel`.",
        ("'1.weight' of Sequential",),
    ),
    "two types of devices": Refusal(
        lambda cls: cls(_on_two_device_types()),
        "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
        "locate in",
        ("cpu", "meta"),
    ),
    "several device_ids": Refusal(
        lambda cls: cls(_net(), device_ids=[0, 1]), "device_ids can only be None or contain a single element"
    ),
    "device_ids on the CPU": Refusal(
        lambda cls: cls(_net(), device_ids=[0]),
        "DistributedDataParallel device_ids and output_device arguments only work with",
        ("cpu", "device_ids [0]"),
    ),
    "output_device on the CPU": Refusal(
        lambda cls: cls(_net(), output_device=1),
        "DistributedDataParallel device_ids and output_device arguments only work with",
        ("output_device 1",),
    ),
    "no process group": Refusal(_without_group, "init_process_group"),
    "mesh and group": Refusal(_mesh_and_group, "Cannot specify both process_group and device_mesh arguments."),
    "two-dimensional mesh": Refusal(_two_dimensional_mesh, "Only 1D device mesh is supported, but got"),
    "half of a delay": Refusal(
        _half_of_a_delay,
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time",
    ),
    "unknown argument": Refusal(lambda cls: cls(_net(), unknown=1), "got an unexpected keyword argument 'unknown'"),
    "SyncBatchNorm on the CPU": Refusal(
        lambda cls: cls(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))),
        "SyncBatchNorm layers only work with GPU modules",
        ("'1' of Sequential",),
    ),
    "hook that can't be called": Refusal(
        lambda cls: cls(_net()).register_comm_hook(None, 1), "Communication hook must be callable"
    ),
    "hook of a list": Refusal(
        lambda cls: cls(_net()).register_comm_hook(None, _hook_of_a_list),
        "Communication hook: bucket annotation should be dist.GradBucket.",
    ),
    "hook that gives a tensor": Refusal(
        lambda cls: cls(_net()).register_comm_hook(None, _hook_that_gives_a_tensor),
        "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
    ),
    "bfloat16 hook without NCCL": Refusal(
        lambda cls: cls(_net()).register_comm_hook(None, default_hooks.bf16_compress_hook),
        "BF16 all reduce communication hook required",
        everywhere=False,
    ),
    "two hooks": Refusal(
        _two_hooks, "register_comm_hook or register_builtin_comm_hook can only be called once.", ("_hook",)
    ),
    "sample rate of zero": Refusal(
        lambda cls: cls(_net())._set_ddp_runtime_logging_sample_rate(0),
        "DDP runtime logging sample rate should be equal or greater than 1",
    ),
    "static graph too late": Refusal(
        _static_too_late,
        "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
        "constructed",
    ),
    "names of too many parameters": Refusal(
        lambda cls: _names_for(cls, 2), "Expected param to name mapping to cover all parameters, but"
    ),
    "names of too few parameters": Refusal(
        lambda cls: _names_for(cls, -1), "found in module parameters, but not DDP parameters.", ("1.bias",)
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
@on_ranks(2)
def test_refused_as_by_torch(rank: int, size: int, case: str) -> None:
    """Errors of the constructor and of the methods: torch's exception class and words, and the names of culprits."""
    refusal, found = REFUSALS[case], {}
    for name, cls in {"torch": nn.parallel.DistributedDataParallel, "ours": DistributedDataParallel}.items():
        try:
            refusal.provoke(cls)
        except Exception as error:  # noqa: BLE001 - which one is compared
            found[name] = (type(error).__name__, str(error))
        else:
            found[name] = ("nothing", "")
    kind, text = found["ours"]
    assert kind == found["torch"][0], found
    if kind == "nothing" and torch.version.cuda and not refusal.everywhere:
        return
    assert refusal.words in " ".join(found["torch"][1].split())
    assert refusal.words in " ".join(text.split())
    for words in refusal.ours:
        assert words in text
