"""Models of an all-reduce's time: formulas, and fits that find the parameters that made the times."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.simulation.link_model import CommModel, Point, hops, traffic

SIZES = [2**power for power in range(10, 27, 2)]


def points(link: CommModel, worlds: list[int], noise: float = 0.0, repeats: int = 1) -> list[Point]:
    random = np.random.default_rng(0)
    return [
        (size, float(link.time_ns(size, n)) * random.lognormal(0, noise), n)
        for size in SIZES
        for n in worlds
        for _ in range(repeats)
    ]


def test_formulas() -> None:
    """Hops and traffic are those of the published algorithms, counted by hand for 8 ranks. A ring of 4 with 1 µs
    latency and 1 GB/s takes 6 µs and 1.5 ns for each byte, plus the overhead."""
    assert [hops(name, 8) for name in ("ring", "tree", "halving_doubling")] == [14, 6, 6]
    assert [traffic(name, 8) for name in ("ring", "tree", "halving_doubling")] == [1.75, 2.0, 1.75]
    assert [hops("ring", 1), traffic("ring", 1)] == [0, 0]
    assert [hops("one_host", 8), traffic("one_host", 8)] == [14, 14]
    link = CommModel(latency_ns=1000, ns_per_byte=1.0, overhead_ns=500)
    assert link.time_ns([0, 1000], 4).tolist() == [6500.0, 8000.0]
    assert float(link.time_ns(1000, 1)) == 0.0


def test_hierarchical() -> None:
    """Two nodes of 4: a ring of 4 inside, a ring of 2 between the nodes on which every byte passes once each way. With
    16,384 ranks and small buffers logarithmic latency wins."""
    inside = CommModel(latency_ns=10, ns_per_byte=0.01)
    link = CommModel(100, 1.0, algorithm="hierarchical", inside=inside, ranks_per_node=4)
    assert float(link.time_ns(1000, 8)) == pytest.approx(6 * 10 + 2 * 100 + 1.5 * 0.01 * 1000 + 1.0 * 1000)
    assert float(link.time_ns(1000, 4)) == pytest.approx(float(inside.time_ns(1000, 4)))
    inside = CommModel(1000, 0.01)
    ring, tree = (
        CommModel(5000, 0.1, algorithm="hierarchical", inside=inside, ranks_per_node=8, between=between)
        for between in ("ring", "tree")
    )
    assert float(tree.time_ns(1 << 20, 16384)) < float(ring.time_ns(1 << 20, 16384)) / 10


def test_fits_of_exact_and_noisy_times() -> None:
    """From exact times of two worlds the fit recovers overhead, latency and bandwidth, and says that it is perfect.
    Noise of 10 % and two sizes measured five times too slow move no parameter by more than a fifth."""
    made = CommModel(latency_ns=20_000, ns_per_byte=0.5, overhead_ns=70_000)
    found = CommModel.fitted(points(made, [2, 4]), per_size=False)
    assert found.latency_ns == pytest.approx(20_000, rel=1e-6)
    assert found.overhead_ns == pytest.approx(70_000, rel=1e-6)
    assert found.ns_per_byte == pytest.approx(0.5, rel=1e-6)
    assert found.fit.r2 == pytest.approx(1.0)
    assert float(found.time_ns(3 << 20, 8)) == pytest.approx(float(made.time_ns(3 << 20, 8)))
    made = CommModel(latency_ns=50_000, ns_per_byte=0.3)
    given = [
        (size, ns * (5 if size in (SIZES[1], SIZES[6]) else 1), n)
        for size, ns, n in points(made, [2], noise=0.1, repeats=5)
    ]
    found = CommModel.fitted(given, per_size=False)
    assert found.latency_ns == pytest.approx(50_000, rel=0.2)
    assert found.ns_per_byte == pytest.approx(0.3, rel=0.2)
    assert found.fit.worst_error > 0.5


@pytest.mark.parametrize("algorithm", ["ring", "tree", "one_host"])
def test_a_fit_finds_the_algorithm(algorithm: str) -> None:
    """From times of three worlds the fit says which formula made them."""
    made = CommModel(20_000, 0.5, 5_000, algorithm)
    assert CommModel.fitted(points(made, [2, 4, 8], noise=0.02, repeats=5), algorithm=None).algorithm == algorithm


def test_corrections_reproduce_the_measured_sizes() -> None:
    """With corrections a link that no formula fits is met at each measured size, and in between by neighbours."""
    odd = [(size, 1e5 + size * (0.2 if size < 1 << 20 else 0.6), 2) for size in SIZES]
    found = CommModel.fitted(odd)
    for size, ns, _ in odd:
        assert float(found.time_ns(size, 2)) == pytest.approx(ns)
    low, high = sorted(ns for size, ns, _ in odd if size in (1 << 20, 1 << 22))
    assert low < float(found.time_ns(1 << 21, 2)) < high


def test_refusals() -> None:
    """Too few sizes, impossible points and impossible links are refused with the reason."""
    with pytest.raises(ValueError, match="at least two sizes"):
        CommModel.fitted([(1024, 1000, 2)] * 5)
    with pytest.raises(ValueError, match="ranks ≥ 2"):
        CommModel.fitted([(1024, 1000, 1), (2048, 1000, 2)])
    with pytest.raises(ValueError, match="choose one of"):
        CommModel(1, 1, algorithm="carrier pigeons")
    with pytest.raises(ValueError, match="inside"):
        CommModel(1, 1, algorithm="hierarchical")
    with pytest.raises(ValueError, match="at least 0"):
        CommModel(-1, 1)
