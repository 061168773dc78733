"""Are ranks and layers that were made late named, and nobody else?

Real Gloo ranks train in episodes of some steps. In half of them, shuffled among the others, one layer of one rank
sleeps for some milliseconds before it computes its gradients; in the other half nothing is done. What
`Timeline.stragglers` says of each episode's events is compared with what was done. The whole (600 episodes of 20
steps) takes about 6 minutes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ddp_lab.bench.measuring import fresh_ranks
from ddp_lab.bench.measuring.command import option
from ddp_lab.command_line import count, number_from
from ddp_lab.protocol.events import Batch
from ddp_lab.timeline.timeline import LatePlace, Timeline

_LAYERS, _WIDTH, _BATCH = 12, 128, 32


@dataclass(frozen=True)
class Delay:
    """What is done in an episode: `rank` sleeps `ms` before layer `layer`'s gradients."""

    rank: int
    layer: int
    ms: float


@dataclass(frozen=True)
class Judged:
    """An episode: what was done to it, and who was named, the most costly first."""

    delay: Delay | None
    named: list[LatePlace] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether the most costly place is the delayed layer of the delayed rank; without a delay: nobody is named."""
        if self.delay is None or not self.named:
            return self.delay is None and not self.named
        return _is_delayed(self.named[0], self.delay)

    @property
    def also_named(self) -> int:
        """How many other places were named beside the delayed one."""
        return sum(not _is_delayed(one, self.delay) for one in self.named) if self.delay else 0


def _is_delayed(found: LatePlace, delay: Delay) -> bool:
    return found.rank == delay.rank and (found.parameter or "").startswith(f"layers.{delay.layer}.")


def plan(
    delayed: int, clean: int, ranks: int, *, shortest_ms: float = 5.0, longest_ms: float = 50.0, seed: int = 0
) -> list[Delay | None]:
    """Episodes in random order: `delayed` with a random rank, layer and length, `clean` with None."""
    draw = random.Random(seed)
    made: list[Delay | None] = [None] * clean
    for _ in range(delayed):
        made.append(Delay(draw.randrange(ranks), draw.randrange(_LAYERS), draw.uniform(shortest_ms, longest_ms)))
    draw.shuffle(made)
    return made


class _Net(torch.nn.Module):
    """Linear layers; `sleeps[n]` seconds pass before layer n's gradients are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))
        self.sleeps = [0.0] * _LAYERS

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            batch = layer(batch)
            batch.register_hook(lambda _, number=number: time.sleep(self.sleeps[number]))
        return torch.tanh(batch)  # not the last layer itself: a backward begins with the gradient of what is returned


def train(episodes: Sequence[Delay | None], steps: int) -> list[Timeline]:
    """Trains all episodes, each on all ranks; on rank 0 returns a timeline of each, elsewhere none."""
    from ddp_lab import DistributedDataParallel, recording

    recording.enable()
    torch.manual_seed(0)
    net = _Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.14)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(_BATCH, _WIDTH)).square().mean().backward()
        optimizer.step()

    known = recording.descriptions(0)[1] - 1  # the constructor's
    for _ in range(10):  # buckets are assigned anew, memory is warm
        step()
    descriptions = recording.descriptions(known)[0]
    recorded = []
    for delay in episodes:
        if delay is not None and delay.rank == dist.get_rank():
            net.sleeps[delay.layer] = delay.ms / 1e3
        dist.barrier()
        cursor = recording.statistics().recorded
        for _ in range(steps):
            step()
        recorded.append(_drained(cursor))
        net.sleeps = [0.0] * len(net.sleeps)
    return _timelines(recorded, [one for one in descriptions if one["type"] == "assignment"])


def _drained(cursor: int) -> npt.NDArray[np.void]:
    from ddp_lab import recording

    parts = []
    end = recording.statistics().recorded
    while cursor < end:
        events, dropped, cursor = recording.drain(cursor)
        if dropped:
            raise RuntimeError(f"{dropped} events of an episode were overwritten")
        parts.append(events)
    return np.concatenate(parts)


def _timelines(recorded: list[npt.NDArray[np.void]], described: list[dict[str, Any]]) -> list[Timeline]:
    of_ranks: list[list[npt.NDArray[np.void]]] = [[] for _ in range(dist.get_world_size())]
    dist.gather_object(recorded, of_ranks if dist.get_rank() == 0 else None)
    made = []
    for number in range(len(of_ranks[0])):
        timeline = Timeline()
        for rank, episodes in enumerate(of_ranks):
            for description in described:
                timeline.describe(rank, description | {"session": 1})
            events = episodes[number]
            timeline.extend(Batch(rank, 1, int(events["sequence"][0]), 0, events))
        made.append(timeline)
    return made


def judge(episodes: Sequence[Delay | None], timelines: Sequence[Timeline]) -> list[Judged]:
    """Asks each episode's timeline who was late, with the defaults that a user gets."""
    return [Judged(delay, timeline.stragglers()) for delay, timeline in zip(episodes, timelines, strict=True)]


def _run(delays: Sequence[Delay | None], steps: int) -> list[dict[str, Any]]:
    timelines = train(delays, steps)
    if not timelines:
        return []
    return [asdict(one) | {"is_right": one.is_right, "also": one.also_named} for one in judge(delays, timelines)]


def measure(*, delayed: int = 300, clean: int = 300, steps: int = 20, ranks: int = 2, seed: int = 0) -> dict[str, Any]:
    """Runs the episodes on fresh ranks.

    Args:
        delayed: episodes with a delay of 5 to 50 ms in each step.
        clean: episodes without.
        steps: of each episode.
        ranks: Gloo processes.
        seed: of the random ranks, layers and lengths.

    Returns:
        ``named`` (delayed episodes whose rank and layer were named first), ``delayed``, ``false_alarms`` (clean
        episodes in which anybody was named), ``clean``, ``also_named`` (delayed episodes in which something else was
        named as well), ``error_percent`` (median difference of stated from injected delay), ``wrong`` (the episodes
        that were not right).
    """
    began = time.monotonic()
    episodes = plan(delayed, clean, ranks, seed=seed)
    found: list[dict[str, Any]] = fresh_ranks.run(_run, episodes, steps, ranks=ranks)
    late = [one for one in found if one["delay"]]
    right = [one for one in late if one["is_right"]]
    errors = [abs(one["named"][0]["delay_ms"] / one["delay"]["ms"] - 1) for one in right]
    return {
        "ranks": ranks,
        "steps": steps,
        "delayed": len(late),
        "named": len(right),
        "clean": len(found) - len(late),
        "false_alarms": sum(not one["is_right"] for one in found if not one["delay"]),
        "also_named": sum(one["also"] > 0 for one in late),
        "error_percent": 100 * float(np.median(errors)) if errors else None,
        "seconds": time.monotonic() - began,
        "wrong": [one for one in found if not one["is_right"]],
    }


def table(found: dict[str, Any]) -> str:
    """The figures as lines."""
    share = 100 * found["named"] / max(found["delayed"], 1)
    lines = [
        f"{found['ranks']} Gloo ranks, {found['steps']} steps an episode, {found['seconds']:.0f} s",
        f"{found['delayed']} delays of 5 to 50 ms: rank and layer named in {found['named']} ({share:.1f} %)",
        f"{found['clean']} clean episodes: {found['false_alarms']} false alarms",
        f"{found['also_named']} delayed episodes in which another place was named as well",
    ]
    if found["error_percent"] is not None:
        lines.append(f"the stated delay differs from the injected one by {found['error_percent']:.1f} % (median)")
    return "\n".join(lines)


OPTIONS = (
    option("--delayed", type=count, help="episodes with a delay (%(default)s)"),
    option("--clean", type=count, help="episodes without (%(default)s)"),
    option("--steps", type=count, help="of an episode (%(default)s)"),
    option("--ranks", type=count),
    option("--seed", type=number_from(0)),
)
