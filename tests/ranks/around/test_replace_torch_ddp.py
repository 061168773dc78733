"""`ddp_lab.replace_torch_ddp()`: torch's name becomes ours, in this process."""

from __future__ import annotations

import sys
import types

import torch
from torch import nn

import ddp_lab
from tests.ranks.compare import samples
from tests.ranks.harness import on_ranks


@on_ranks(1)
def test_every_holder_of_the_name_gets_ours(rank: int, size: int) -> None:
    """Modules that imported torch's class, under any name, hold ours until the end of the block or `undo`."""
    torchs = torch.nn.parallel.DistributedDataParallel
    assert torchs is not ddp_lab.DistributedDataParallel
    holder = types.ModuleType("a_module_of_the_user")
    exec("from torch.nn.parallel import DistributedDataParallel as DDP; import torch", vars(holder))
    sys.modules[holder.__name__] = holder
    try:
        with ddp_lab.replace_torch_ddp():
            assert holder.DDP is torch.nn.parallel.DistributedDataParallel is ddp_lab.DistributedDataParallel
            assert torch.nn.parallel.distributed.DistributedDataParallel is ddp_lab.DistributedDataParallel
            assert ddp_lab.parallel.distributed.TorchDDP is torchs
            model = holder.DDP(nn.Linear(10, 2))
            model(samples(rank, 0)).sum().backward()
            assert isinstance(model, torchs)
            assert issubclass(holder.DDP, torchs)
            with ddp_lab.replace_torch_ddp():  # once more: the end of this block undoes nothing of the outer one
                pass
            assert holder.DDP is ddp_lab.DistributedDataParallel
        assert holder.DDP is torch.nn.parallel.DistributedDataParallel is torchs
        installed = ddp_lab.replace_torch_ddp()
        assert holder.DDP is ddp_lab.DistributedDataParallel
        installed.undo()
        installed.undo()
        assert holder.DDP is torchs
    finally:
        del sys.modules[holder.__name__]
