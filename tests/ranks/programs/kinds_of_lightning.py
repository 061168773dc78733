"""Fits one Lightning module with many settings of trainer and strategy, each with torch's class and with ours."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ddp_lab
from tests.ranks.compare import assert_same


class Net(lightning.LightningModule):
    """A generator and a critic. `manual`: None, "plain", "accumulate" or "adversarial"."""

    def __init__(self, manual: str | None = None, *, critic: bool = False, normalize: bool = False) -> None:
        super().__init__()
        self.manual, self.automatic_optimization = manual, manual is None
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if normalize else nn.Tanh(), nn.Linear(8, 1))
        self.critic = nn.Linear(1, 1) if critic else None
        self.wrapper = self.refusal = ""

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor | None:
        self.wrapper = type(self.trainer.strategy.model).__module__.split(".")[0]
        loss = nn.functional.mse_loss(self.body(batch[0]), batch[1])
        if self.manual is None:
            return loss
        if self.manual == "adversarial":
            self._adversarial_step(batch)
        elif self.manual == "plain":
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        else:
            with self.trainer.strategy.model.no_sync() if index % 2 == 0 else contextlib.nullcontext():
                self.manual_backward(loss)
            if index % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()
        return None

    def _adversarial_step(self, batch: list[torch.Tensor]) -> None:
        for place, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            output = self.critic(self.body(batch[0]) if place == 0 else self.body(batch[0]).detach())
            self.manual_backward(output.mean() if place == 0 else (output - batch[1]).square().mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        if self.manual == "adversarial":
            return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.body, self.critic)]
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)


# By name: arguments of the module, of the strategy, of the trainer
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "manual accumulation": ({"manual": "accumulate"}, {}, {}),
    "adversarial": ({"manual": "adversarial", "critic": True}, {"find_unused_parameters": True}, {}),
    "static, manual": ({"manual": "plain"}, {"static_graph": True}, {}),
    "static, unused": ({"critic": True}, {"static_graph": True}, {}),
    "unused, accumulation": ({"critic": True}, {"find_unused_parameters": True}, {"accumulate_grad_batches": 3}),
    "views, accumulation": ({}, {"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 2}),
    "hook, accumulation": ({}, {"ddp_comm_hook": default_hooks.fp16_compress_hook}, {"accumulate_grad_batches": 2}),
    "stateful hook in a wrapper": (
        {},
        {
            "ddp_comm_state": _power_sgd,
            "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
            "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
        },
        {},
    ),
    "bfloat16": ({}, {}, {"precision": "bf16-mixed"}),
    "unused, refused": ({"critic": True}, {}, {}),
    "SyncBatchNorm, refused": ({"normalize": True}, {}, {"sync_batchnorm": True}),
}


def fit(name: str) -> Net:
    """The module after two epochs, with the beginning of the text of an error if there was one."""
    arguments, strategy, options = KINDS[name]
    if "ddp_comm_state" in strategy:
        strategy = strategy | {"ddp_comm_state": strategy["ddp_comm_state"]()}
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
    net = Net(**arguments)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(**strategy), max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    try:
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=2))
    except (RuntimeError, ValueError) as error:
        net.refusal = str(error)[:45]
    return net


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name in KINDS:
        theirs = fit(name)
        with ddp_lab.replace_torch_ddp():
            ours = fit(name)
        assert ours.refusal == theirs.refusal, (name, ours.refusal, theirs.refusal)
        assert bool(ours.refusal) == name.endswith("refused"), (name, ours.refusal)
        if "SyncBatchNorm" not in name:
            assert (ours.wrapper, theirs.wrapper) == ("ddp_lab", "torch"), name
        assert_same(dict(ours.state_dict()), dict(theirs.state_dict()), name)


if __name__ == "__main__":
    main()
