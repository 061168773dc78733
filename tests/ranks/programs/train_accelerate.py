"""Trains with accelerate: accumulation, clipping, a late synchronisation. Arguments: path to save, torch or ours."""

from __future__ import annotations

import sys

import torch
from torch import nn


def main(path: str, which: str) -> None:
    if which == "ours":
        import ddp_lab

        ddp_lab.replace_torch_ddp()
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    assert type(model).__module__.startswith("ddp_lab" if which == "ours" else "torch")
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    batches = list(loader)
    with accelerator.no_sync(model):
        first, second = (nn.functional.mse_loss(model(x), y) for x, y in batches[:2])
    accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    optimizer.step()
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(state, path)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
