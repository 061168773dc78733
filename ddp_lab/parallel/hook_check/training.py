"""Some training steps with a comm hook, compared with the same steps with the plain average."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ... import native
from ...analysis.check_reports import HookProblem, TrainingCheck
from ...formatting import label_of
from ..distributed import DistributedDataParallel
from ..monitoring.drift import digest_of
from . import trial
from .verdict import problem

__all__ = ["Loss", "default_loss", "default_model", "judge", "train"]

_C = native.load()

Loss = Callable[[nn.Module, int], torch.Tensor]

_FEATURES, _CLASSES = 32, 10


def default_model() -> nn.Module:
    """A small classifier, the same on all ranks and in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(_FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, _CLASSES))


def default_loss(rank: int, device: torch.device) -> Loss:
    """The loss of one rank's batch of that step, for `default_model`: classes that a linear map decides."""
    truth = torch.randn(_FEATURES, _CLASSES, generator=torch.Generator().manual_seed(2))

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        inputs = torch.randn(64, _FEATURES, generator=torch.Generator().manual_seed(1000 * step + rank))
        wanted = (inputs @ truth).argmax(1)
        return nn.functional.cross_entropy(model(inputs.to(device)), wanted.to(device))

    return loss


def train(
    hook: Callable[..., Any],
    state: object,
    module: nn.Module,
    loss: Loss,
    *,
    group: dist.ProcessGroup,
    steps: int,
    several_buckets: bool,
    seconds: float,
) -> dict[str, Any]:
    """This rank's results for the others: losses and times of both, bytes, and a digest of the parameters.

    Args:
        hook: the hook.
        state: a copy, which is modified.
        module: is not changed; on the device where it trains.
        loss: of this rank's batch of a step.
        group: the ranks.
        steps: how many.
        several_buckets: cut the model into about four; False: one.
        seconds: time limit of one step.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    cap = max(size / 4, 1) / 2**20 if several_buckets else 2 * size / 2**20 + 1
    models = [DistributedDataParallel(copy.deepcopy(module), process_group=group, bucket_cap_mb=cap) for _ in range(2)]
    models[0].register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    runs = [_Run(model, loss) for model in models]

    def take_steps() -> None:
        for _ in range(steps):
            for run in runs:
                run.step()

    _C.open_collective_log()
    try:
        trial.run_with_deadline(take_steps, seconds, lambda: [len(run.losses) for run in runs])
    except trial.Stuck as error:
        return {"broken": ["never completes", f"in training, step {len(runs[0].losses)}: {error}"]}
    except Exception as error:  # noqa: BLE001 - whatever the hook raises is a finding
        return {"broken": ["fails in training", f"step {len(runs[0].losses)}: {trial.words_of(error)}"]}
    finally:
        _C.close_collective_log()
    return {
        "broken": None,
        "losses": [run.losses for run in runs],
        "ms": [median(run.ms) for run in runs],
        "payload": [median(run.payloads) for run in runs],
        "digest": digest_of(models[0].module.parameters()),
    }


class _Run:
    def __init__(self, model: DistributedDataParallel, loss: Loss) -> None:
        self._model, self._loss = model, loss
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.losses: list[float] = []
        self.ms: list[float] = []
        self.payloads: list[int] = []

    def step(self) -> None:
        number = len(self.losses)
        torch.manual_seed(number)  # the same dropout in both runs
        self._optimizer.zero_grad()
        begin = time.perf_counter()
        loss = self._loss(self._model, number)
        loss.backward()
        self._optimizer.step()
        value = float(loss.detach())
        self.ms.append((time.perf_counter() - begin) * 1e3)
        self.payloads.append(trial.traffic(_C.take_collectives()).payload)
        self.losses.append(value)


def judge(
    name: str, answers: list[dict[str, Any]], *, expect_equal: bool
) -> tuple[TrainingCheck | None, list[HookProblem]]:
    """The report's entry and problems, from the numbers of all ranks."""
    broken = [(rank, *one["broken"]) for rank, one in enumerate(answers) if one["broken"]]
    if broken:
        causes = [one for one in broken if one[1] == "fails in training"] or broken
        ranks = label_of(rank for rank, *_ in causes).capitalize()
        return None, [problem(causes[0][1], f"{ranks}: {causes[0][2]}.")]
    losses, plain = (
        tuple(sum(step) / len(answers) for step in zip(*(one["losses"][which] for one in answers), strict=True))
        for which in (0, 1)
    )
    made = TrainingCheck(
        model=name,
        losses=losses,
        plain_losses=plain,
        step_ms=max(one["ms"][0] for one in answers),
        plain_step_ms=max(one["ms"][1] for one in answers),
        payload_bytes=max(one["payload"][0] for one in answers),
        plain_payload_bytes=max(one["payload"][1] for one in answers),
        equal=all(one["digest"] == answers[0]["digest"] for one in answers),
    )
    found = []
    if not made.equal and expect_equal:
        found.append(
            problem("ranks differ", f"After {len(losses)} training steps the ranks have different parameters.")
        )
    return made, found + _compare(made)


def _compare(made: TrainingCheck) -> list[HookProblem]:
    few = max(1, len(made.losses) // 10)
    last, plain = (sum(losses[-few:]) / few for losses in (made.losses, made.plain_losses))
    if not math.isfinite(plain):
        return []
    told = f"In {len(made.losses)} steps the loss went from {made.losses[0]:.4g} to {last:.4g}, with the plain average"
    if not math.isfinite(last):
        return [problem("training diverges", f"{told} to {plain:.4g}.")]
    if last > plain + 0.5 * max(0.0, made.plain_losses[0] - plain):
        return [problem("learns less", f"{told} to {plain:.4g}.")]
    return []
