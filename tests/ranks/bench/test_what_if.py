"""The simulator and real ranks: the same buckets, a link measured alike everywhere, and the benchmark on little."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from paper.shaped_link import ShapedLink
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_lab import DistributedDataParallel, observe, recording
from ddp_lab.bench.measuring import fresh_ranks
from ddp_lab.bench.measuring.workloads import Transformer
from ddp_lab.parallel.monitoring.link import measure
from ddp_lab.simulation.link_model import CommModel
from ddp_lab.simulation.parameter_groups import groups_by_name
from ddp_lab.timeline.timeline import Timeline
from tests.ranks.compare import everywhere
from tests.ranks.conftest import Ranks
from tests.ranks.harness import on_ranks
from tests.ranks.observing import timeline_of

CAPS = [0.0, 0.05, 0.3, 1.0, 1000.0]


@on_ranks(2)
def test_a_link_is_measured_alike_on_all_ranks(rank: int, size: int) -> None:
    """All ranks get the same times, each size as often as asked, and a model can be fitted to them."""
    found = measure(sizes=[1 << 12, 1 << 16, 1 << 20], repeats=3)
    assert everywhere(found["points"]) == [found["points"]] * 2
    sizes = [one for one, _ in found["points"]]
    assert {one: sizes.count(one) for one in sizes} == {1 << 12: 3, 1 << 16: 3, 1 << 20: 3}
    assert (found["ranks"], found["backend"]) == (2, "gloo")
    assert 0 <= found["sharing"] <= 1
    link = CommModel.fitted([(one, ns, 2) for one, ns in found["points"]], per_size=False)
    assert link.fit is not None
    assert link.fit.points == 3
    assert float(link.time_ns(1 << 20, 2)) >= float(link.time_ns(1 << 12, 2)) > 0


def _train(rank: int, size: int, cap: float, path: str) -> list[list[int]]:
    """Trains and saves; returns the buckets that the reducer really has."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    first, described = recording.statistics().recorded, recording.descriptions(0)[1]
    model = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(7)], torch.nn.Linear(96, 3)), bucket_cap_mb=cap
    )
    for _ in range(6):
        model(torch.randn(4, 96)).sum().backward()
    events, dropped, _ = recording.drain(first)
    assert dropped == 0
    everywhere: list[Any] = [None] * size
    dist.all_gather_object(everywhere, (np.array(events), recording.descriptions(described)[0]))
    if rank == 0:
        timeline_of(everywhere).save(path)
    dist.barrier()
    return model._sync.assignment


def test_predicted_buckets_are_the_reducers(ranks: Ranks, tmp_path: Path) -> None:
    """From a training with one cap the simulator predicts the very buckets that other caps really make."""
    real = {cap: ranks(2, _train, cap, str(tmp_path / f"{cap}.npz"))[0] for cap in CAPS}
    assert len({len(buckets) for buckets in real.values()}) > 2
    timeline = Timeline.load(tmp_path / "0.3.npz")
    assert timeline.workload().world_size == 2
    for cap, buckets in real.items():
        predicted = timeline.simulate(CommModel(1e5, 1.0), bucket_cap_mb=cap)
        assert [sorted(bucket) for bucket in predicted.prediction.buckets] == [sorted(bucket) for bucket in buckets], (
            cap
        )


@on_ranks(2)
def test_predicted_groups_are_torchs(rank: int, size: int) -> None:
    """Names of modules make the groups that `fully_shard` makes of them."""
    import torch

    inner, layers = [f"layers.layers.{number}.linear1" for number in range(2)], ["layers.layers.0", "layers.layers.1"]
    net = Transformer(16, 8, 2, 2, 32)
    mesh = init_device_mesh("cpu", (size,))
    for modules in ([inner[0]], [inner[1]], layers, ["embedding", "head"]):
        fully_shard([net.get_submodule(name) for name in modules], mesh=mesh)
    fully_shard(net, mesh=mesh)
    net(torch.zeros(2, 4, dtype=torch.long))
    with observe(net) as observed:
        described = next(
            one
            for one in recording.descriptions(0)[0]
            if one["type"] == "assignment" and one["reducer"] == observed.model_id
        )
    names = [one["name"] for one in described["parameters"]]
    real = [sorted(names[index] for index in one["parameters"]) for one in described["buckets"]]
    made = groups_by_name(names, ["layers.layers.*.linear1", ("layers.layers.*",), ("embedding", "head")])
    assert sorted(sorted(names[index] for index in one.parameters) for one in made) == sorted(real)


def _send(size: int, repeats: int) -> float:
    """Seconds of the fastest all-reduce."""
    import torch

    buffer, best = torch.zeros(size // 4), float("inf")
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(buffer)
        best = min(best, time.perf_counter() - begin)
    return best


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="shaping a link needs root and `tc`")
def test_a_shaped_link() -> None:
    """No all-reduce between shaped ranks is faster than the link; its namespaces are gone afterwards."""
    with ShapedLink(2, mbit=200) as enter:
        assert all(Path("/run/netns", name).exists() for name in enter.namespaces)
        seconds = fresh_ranks.run(_send, 8 << 20, 2, ranks=2, prepare=enter)
    assert seconds > 0.9 * 8 * (8 << 20) / 200e6
    assert not any(Path("/run/netns", name).exists() for name in enter.namespaces)
