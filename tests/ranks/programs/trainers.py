"""Trains with a library that wraps the model itself; knows nothing of ddp_lab. Arguments: library, path to save."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
from torch import nn

Weights = dict[str, torch.Tensor]


def accelerate() -> Weights:
    """Accumulates two batches, clips."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    return weights


def transformers() -> Weights:
    """A small GPT-2 made from a configuration, trained and evaluated by Trainer, with accumulation and clipping."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    tokens = torch.randint(0, 64, (48, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, num_train_epochs=2, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=1e-3, lr_scheduler_type="linear",
            eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
        trainer.train()
    return model.state_dict()


def ignite() -> Weights:
    """`idist.Parallel` joins the group, `idist.auto_model` wraps, an engine trains with accumulation."""
    import ignite.distributed as idist
    from ignite.engine import create_supervised_trainer

    kept: Weights = {}

    def train(local_rank: int) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        model = idist.auto_model(net)
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
        loader = idist.auto_dataloader(data, batch_size=8, shuffle=True)
        trainer = create_supervised_trainer(
            model, optimizer, nn.functional.mse_loss, device=idist.device(), gradient_accumulation_steps=2
        )
        trainer.run(loader, max_epochs=3)
        kept.update({name: value.clone() for name, value in net.state_dict().items()})

    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train)
    return kept


def lightning() -> Weights:
    """Its Trainer with accumulation, clipping and validation."""
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.body(batch[0]), batch[1])

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("loss", nn.functional.mse_loss(self.body(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    net = Net()
    trainer.fit(net, loader, loader)
    return net.state_dict()


def main(library: str, path: str) -> None:
    weights = globals()[library]()
    torch.save({name: value.clone() for name, value in weights.items()}, f"{path}.{os.environ['RANK']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
