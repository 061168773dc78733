"""Trains a small model with one planted fault, or several that come after each step (``sleep+barrier``); knows nothing
of ddp_lab. Arguments: fault, how many steps."""

from __future__ import annotations

import gc
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH, WIDTH = 128, 128
_SLEEP = 0.006
_LONG = 0.02  # more than a busy machine holds up the other rank in most steps


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random batches; each takes some seconds to load."""

    def __init__(self, count: int, size: int = BATCH, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds
        self.x, self.y = torch.randn(size, WIDTH), torch.randint(0, 10, (size,))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.x, self.y


class SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Net(nn.Module):
    """Three layers; `slow` may delay the forward, or the backward at the second one."""

    def __init__(self, fault: str, rank: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(WIDTH, 256), nn.Linear(256, 256), nn.Linear(256, 10)
        if fault == "unused_parameters":
            self.never = nn.Linear(256, 512)
        if fault == "constant_buffers":
            self.register_buffer("angles", torch.zeros(1 << 20), persistent=False)
        self.forward_s = _SLEEP if fault == "slow_forward" and rank == 1 else 0.0
        self.backward_s = _SLEEP if fault == "slow_layer" and rank == 1 else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forward_s:
            time.sleep(self.forward_s)
        x = torch.relu(self.second(torch.relu(self.first(x))))
        if self.backward_s:
            x = SleepsInBackward.apply(x, self.backward_s)  # type: ignore[no-untyped-call]
        return self.third(x)  # type: ignore[no-any-return]


@dataclass
class Run:
    """One training: what its faults may change."""

    fault: str
    steps: int
    rank: int = field(default_factory=dist.get_rank)
    options: dict[str, Any] = field(default_factory=lambda: {"gradient_as_bucket_view": True})
    batch: int = BATCH
    workers: int = 0
    seconds: float = 0.0  # of each batch
    each_step: Callable[[int, torch.Tensor], None] | None = None

    def net(self) -> nn.Module:
        if self.fault == "communication":
            return nn.Sequential(nn.Linear(WIDTH, 2_000), nn.ReLU(), nn.Linear(2_000, 2_000), nn.Linear(2_000, 10))
        return Net(self.fault, self.rank)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(Batches(self.steps, self.batch, self.seconds), batch_size=None, num_workers=self.workers)

    def train(self) -> None:
        torch.manual_seed(0)
        self.model = nn.parallel.DistributedDataParallel(self.net(), **self.options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.held_out = torch.randn(BATCH, WIDTH)
        for step, (x, y) in enumerate(self.batches()):
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            if self.fault != "accumulation" or step % 4 == 3:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.each_step is not None:
                self.each_step(step, loss.detach())

    def batches(self) -> Any:
        if self.fault == "new_loader_each_step":
            loader = DataLoader(Batches(4), batch_size=None, num_workers=1)
            return (next(iter(loader)) for _ in range(self.steps))
        return self.loader()

    def evaluate(self) -> None:
        with torch.no_grad():
            for _ in range(20):
                self.model.module(self.held_out)


def plant(run: Run) -> None:  # noqa: C901 - a list of faults
    """Changes a run as its fault says."""
    fault, rank = run.fault, run.rank
    folder = Path(tempfile.mkdtemp())
    log = logging.getLogger("training")
    log.addHandler(logging.FileHandler(folder / "log.txt"))
    log.setLevel(logging.INFO)
    if fault in ("slow_loader", "starved_workers", "starved_rank", "long_starved_rank"):
        seconds = _LONG if fault == "long_starved_rank" else _SLEEP
        run.seconds = seconds if not fault.endswith("starved_rank") or rank == 1 else 0.0
        run.workers = 1 if fault == "starved_workers" else 0
    if fault == "uneven_batches" and rank == 1:
        run.batch = 16 * BATCH
    if fault in ("unused_parameters", "find_unused"):
        run.options["find_unused_parameters"] = True
    if fault == "copies":
        run.options["gradient_as_bucket_view"] = False

    def scalars(step: int, loss: torch.Tensor) -> None:
        for _ in range(4):
            value = loss.clone()
            dist.all_reduce(value)

    def objects(step: int, loss: torch.Tensor) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {"loss": float(loss)})

    def barrier(step: int, loss: torch.Tensor) -> None:
        dist.barrier()

    def evaluation(step: int, loss: torch.Tensor) -> None:
        if step % 5 == 0:
            run.evaluate()

    def evaluation_on_rank_0(step: int, loss: torch.Tensor) -> None:
        if rank == 0:
            run.evaluate()

    def checkpoint(step: int, loss: torch.Tensor) -> None:
        if step % 4 == 0:
            torch.save([run.model.state_dict()] * 2 + [torch.zeros(1_000_000)], folder / f"{rank}.pt")

    def logs(step: int, loss: torch.Tensor) -> None:
        for number in range(200):
            log.info("step %d, number %d: loss %.3f", step, number, float(loss))

    def sleeps(step: int, loss: torch.Tensor) -> None:
        time.sleep(_SLEEP)

    def sleeps_on_rank_1(step: int, loss: torch.Tensor) -> None:
        if rank == 1:
            time.sleep(_SLEEP)

    def encodes(step: int, loss: torch.Tensor) -> None:
        json.dumps([float(loss)] * 36_000)  # more than the 5 ms for which CPython lets a thread hold the GIL

    def collects_on_rank_1(step: int, loss: torch.Tensor) -> None:
        if rank == 1:
            gc.collect()

    every = {
        "scalar_all_reduce": scalars, "gathered_objects": objects, "barrier": barrier, "evaluation": evaluation,
        "evaluation_on_rank_0": evaluation_on_rank_0, "checkpoint": checkpoint, "logging": logs, "sleep": sleeps,
        "sleep_on_rank_1": sleeps_on_rank_1, "python_line": encodes, "garbage_on_rank_1": collects_on_rank_1,
    }  # fmt: skip
    planted = [every[one] for one in fault.split("+") if one in every]

    def each_step(step: int, loss: torch.Tensor) -> None:
        for act in planted:
            act(step, loss)

    run.each_step = each_step if planted else None


def main(fault: str, steps: int) -> None:
    dist.init_process_group("gloo")
    run = Run(fault, steps)
    plant(run)
    run.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
