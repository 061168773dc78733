"""The simulator against the published figures of the DDP paper, from its hardware's parameters."""

from __future__ import annotations

import pytest
from paper import hardware

CAPS_MB = [0, 1, 2, 5, 10, 25, 50, 100, 200, 5000]


def test_the_models_are_the_published_ones() -> None:
    """ResNet50 has 25.56 million parameters in 161 tensors, BERT-large 335 million."""
    resnet, bert = hardware.resnet50(), hardware.bert()
    assert (len(resnet.sizes), resnet.bytes) == (161, 4 * 25_557_032)
    assert bert.bytes / 4e6 == pytest.approx(335.1, abs=0.2)


@pytest.mark.parametrize(("model", "backend"), hardware.GAINS)
def test_overlap_gains(model: str, backend: str) -> None:
    """Figure 6: overlap saves what the paper says, within 5 points of the step."""
    assert hardware.gain(model, backend) == pytest.approx(hardware.GAINS[model, backend], abs=5)


@pytest.mark.parametrize(
    ("model", "backend", "best_mb"),
    [("ResNet50", "nccl", (10, 25)), ("ResNet50", "gloo", (2, 10)), ("BERT", "nccl", (50, 100))],
)
def test_bucket_sizes(model: str, backend: str, best_mb: tuple[float, float]) -> None:
    """Figures 7 and 8: the best bucket lies where the paper's does; one per parameter and one for all are worse."""
    steps = hardware.bucket_sweep(model, backend, CAPS_MB).step_ns
    best = CAPS_MB[int(steps.argmin())]
    assert best_mb[0] <= best <= best_mb[1]
    assert steps[0] > 1.05 * steps.min()
    assert steps[-1] > 1.2 * steps.min()


def test_more_ranks_prefer_larger_buckets() -> None:
    """Figures 7 and 8: from 16 to 32 GPUs the best bucket does not shrink, and one per parameter costs more."""
    for model in hardware.MODELS:
        small, large = (hardware.bucket_sweep(model, "nccl", CAPS_MB, ranks).step_ns for ranks in (16, 32))
        assert small.argmin() <= large.argmin()
        assert small[0] / small.min() < large[0] / large.min()


def test_scaling() -> None:
    """Figure 9: with NCCL 256 GPUs take about twice (ResNet50) and 1.65 times (BERT) as long as one, never less. Figure
    10: on 256 GPUs one synchronisation in 8 steps saves about 38 % (NCCL) and 57 % (Gloo) of the time."""
    for model, expected in (("ResNet50", 2.0), ("BERT", 1.65)):
        times = hardware.scaling(model, "nccl", [16, 32, 64, 128, 256])
        assert sorted(times) == times.tolist()
        assert times[-1] == pytest.approx(expected, abs=0.2)
    assert hardware.scaling("ResNet50", "gloo", [256])[0] > 2.2
    for backend, expected in (("nccl", 38), ("gloo", 57)):
        saved = hardware.skip_sync("ResNet50", backend, [2, 4, 8])
        assert sorted(saved) == saved.tolist()
        assert saved[-1] == pytest.approx(expected, abs=10)


def test_no_result_is_stored() -> None:
    """Figures follow from parameters: twice the card's bandwidth changes the gains."""
    before = hardware.gain("BERT", "gloo")
    card = hardware._CARD_BYTES_PER_NS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "_CARD_BYTES_PER_NS", 2 * card)
        assert hardware.gain("BERT", "gloo") > before + 5
