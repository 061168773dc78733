"""Trains with accelerate in many ways, each with torch's class and with ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType as Hook
from torch import nn

import ddp_lab
from tests.ranks.compare import assert_same, mlp, samples


class WithUnused(nn.Module):
    """A part that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = mlp(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


# By name: how many backwards make a step, arguments of DDP
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "views, accumulation": (3, {"gradient_as_bucket_view": True}),
    "static": (1, {"static_graph": True}),
    "unused, accumulation": (2, {"find_unused_parameters": True}),
    "float16 hook": (2, {"comm_hook": Hook.FP16}),
    "wrapped hook": (
        1,
        {
            "comm_hook": Hook.POWER_SGD,
            "comm_wrapper": Hook.FP16,
            "comm_state_option": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3},
        },
    ),
}


class Training:
    """A model with optimizer and data, prepared by accelerate."""

    def __init__(self, name: str, cls: type, **options: Any) -> None:
        steps, arguments = KINDS[name]
        handlers = [DistributedDataParallelKwargs(**arguments)]
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, kwargs_handlers=handlers, **options)
        torch.manual_seed(0)
        net = WithUnused() if "unused" in name else mlp()
        data = torch.utils.data.TensorDataset(samples(0, 0, rows=40))
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=0.05), torch.utils.data.DataLoader(data, batch_size=4)
        )
        wrapped = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        assert wrapped is net
        assert any(type(each) is cls for each in self.model.modules())

    def epoch(self) -> dict[str, torch.Tensor]:
        """The weights after one more epoch."""
        for (x,) in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(x).square().mean())
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return {key: value.clone() for key, value in self.accelerator.unwrap_model(self.model).state_dict().items()}


def _synchronised_late(cls: type) -> dict[str, torch.Tensor]:
    """Two forwards without synchronisation, of which the second's backward has it all the same."""
    training = Training("plain", cls)
    accelerator, model = training.accelerator, training.model
    with accelerator.no_sync(model):
        first, second = (model(x).square().mean() for (x,) in list(training.loader)[:2])
    accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    training.optimizer.step()
    return training.epoch()


def _saved(folder: Path, cls: type) -> Any:
    """Two epochs, the second of them again from a saved state."""
    training = Training("plain", cls)
    training.epoch()
    training.accelerator.save_state(str(folder))
    first = training.epoch()
    training.accelerator.load_state(str(folder))
    assert_same(training.epoch(), first, "loaded")
    training.accelerator.save_model(training.model, str(folder / "model"))
    training.accelerator.wait_for_everyone()
    return first, sorted(path.name for path in folder.iterdir())


def _both(program: Any, name: str) -> None:
    theirs = program(torch.nn.parallel.DistributedDataParallel)
    with ddp_lab.replace_torch_ddp():
        ours = program(ddp_lab.DistributedDataParallel)
    assert_same(ours, theirs, name)


def main(folder: str) -> None:
    for name in KINDS:
        _both(lambda cls, name=name: Training(name, cls).epoch(), name)
    _both(lambda cls: Training("plain", cls, dynamo_backend="eager").epoch(), "compiled")
    _both(_synchronised_late, "synchronised late")
    _both(lambda cls: _saved(Path(folder) / cls.__module__, cls), "saved")


if __name__ == "__main__":
    main(*sys.argv[1:])
