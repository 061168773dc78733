"""Trains with Lightning. Arguments: path to save, torch or ours, the strategy, manual or automatic."""

from __future__ import annotations

import sys

import torch
from torch import nn


def main(path: str, which: str, strategy: str, optimization: str) -> None:
    if which == "ours":
        import ddp_lab

        ddp_lab.replace_torch_ddp()
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = optimization == "automatic"
            self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
            self.unused = nn.Linear(1, 1) if "unused" in strategy else None

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.body(batch[0]), batch[1])
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("loss", nn.functional.mse_loss(self.body(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

        def on_train_end(self) -> None:
            model = self.trainer.strategy.model
            assert type(model).__module__.startswith("ddp_lab" if which == "ours" else "torch")

    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    automatic = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0} if optimization == "automatic" else {}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **automatic,
    )  # fmt: skip
    net = Net()
    trainer.fit(net, loader, loader)
    if trainer.is_global_zero:
        torch.save(net.state_dict(), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
