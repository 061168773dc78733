"""Settings: which are tried, how they are asked for and written down."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ddp_lab.simulation.link_model import CommModel
from ddp_lab.simulation.settings import HOOKS, Setting, candidates, grid, spread
from ddp_lab.simulation.simulator import Assignment, simulate
from ddp_lab.simulation.workload import Workload

MEBIBYTE = 1 << 20
DEFAULT = Setting((1.0, 25.0))


def _model(layers: int = 20, layer_mb: float = 1.0) -> Workload:
    made = Workload.made_up([int(layer_mb * MEBIBYTE)] * layers, forward_ns=2e7, backward_ns=4e7)
    return replace(made, world_size=2)


def test_the_best_candidate_is_the_best_of_the_grid() -> None:
    """On a slow link with latency the first candidate is what the simulator finds best in the whole grid."""
    workload, link = _model(), CommModel(latency_ns=2e6, ns_per_byte=2.0)
    found = candidates(workload, link, DEFAULT, 3)
    best = min(simulate(workload, one.configuration, link).step_ns for one in grid(workload))
    assert found[0][1] == pytest.approx(best)
    assert [ns for _, ns in found] == sorted(ns for _, ns in found)


def test_candidates_differ() -> None:
    """Candidates differ from each other and from the user's by more than 1.7 in a cap, and in their buckets. However
    sure the simulator is, one candidate has clearly fewer buckets than its best, and one clearly more."""
    workload = _model()
    found = [setting for setting, _ in candidates(workload, CommModel(1e5, 1.0), DEFAULT, 4)]
    assert len(found) == 4
    buckets = [Assignment.of(workload, one.configuration, {}).buckets for one in [DEFAULT, *found]]
    assert len(set(buckets)) == 5
    for index, one in enumerate(found):
        for other in [DEFAULT, *found[:index]]:
            ratios = (one.caps_mb[0] / other.caps_mb[0], one.caps_mb[-1] / other.caps_mb[-1])
            assert max(abs(math.log(ratio)) for ratio in ratios) > math.log(1.7)
    found = [setting for setting, _ in candidates(workload, CommModel(1e6, 1.0), DEFAULT, 3)]
    counts = [len(Assignment.of(workload, one.configuration, {}).buckets) for one in found]
    assert 1 < counts[0] < 20
    assert min(counts) * 1.7 <= counts[0] <= max(counts) / 1.7


def test_how_far_settings_reach() -> None:
    """The grid reaches from one bucket to one for (almost) each parameter; without a link all caps are covered; of one
    parameter nothing is tried."""
    for workload in (_model(20, 0.01), _model(), _model(40, 50.0)):
        counts = [len(Assignment.of(workload, one.configuration, {}).buckets) for one in grid(workload)]
        assert min(counts) == 1
        assert max(counts) >= min(len(workload.sizes), 4) / 2
    found = spread(_model(), DEFAULT, 4)
    caps = [one.caps_mb[0] for one in found]
    assert len(set(caps)) == 4
    assert max(caps) / min(caps) >= 4
    assert candidates(_model(1), CommModel(1e5, 1.0), DEFAULT, 4) == []
    assert spread(_model(1), DEFAULT, 4) == []


def test_hooks() -> None:
    """No candidate has a hook unless hooks are asked for. A hook is asked for by name, taken away by "none", and
    written down as torch's call."""
    workload, link = _model(), CommModel(1e5, 10.0)
    assert {one.hook for one, _ in candidates(workload, link, DEFAULT, 8)} == {None}
    assert candidates(workload, link, DEFAULT, 1, ("fp16",))[0][0].hook == "fp16"
    assert set(HOOKS) == {"fp16", "bf16"}
    hooked = Setting(DEFAULT.caps_mb, "fp16")
    assert hooked.change(DEFAULT) == {"comm_hook": "fp16"}
    assert DEFAULT.change(hooked) == {"comm_hook": "none"}
    assert "fp16_compress_hook" in hooked.arguments


@pytest.mark.parametrize(
    ("setting", "change", "arguments"),
    [
        (DEFAULT, {}, "DistributedDataParallel(model)"),
        (
            Setting((4.0,)),
            {"bucket_cap_mb": 4.0, "first_bucket_mb": 4.0},
            "DistributedDataParallel(model, bucket_cap_mb=4)",
        ),
        (
            Setting((0.25, 2.5)),
            {"bucket_cap_mb": 2.5, "first_bucket_mb": 0.25},
            "DistributedDataParallel(model, bucket_cap_mb_list=[0.25, 2.5])",
        ),
        (
            Setting((1.0, 2.0, 4.0)),
            {"bucket_cap_mb_list": [1.0, 2.0, 4.0]},
            "DistributedDataParallel(model, bucket_cap_mb_list=[1, 2, 4])",
        ),
    ],
)
def test_how_a_setting_is_asked_for(setting: Setting, change: dict[str, object], arguments: str) -> None:
    """Each setting becomes arguments of reconfigure, and of the constructor."""
    assert setting.change(DEFAULT) == change
    assert setting.arguments == arguments
