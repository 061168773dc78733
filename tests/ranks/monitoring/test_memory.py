"""Measured memory of a step on real ranks, and predictions from it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard

import ddp_lab
from ddp_lab import Timeline, native
from tests.ranks.harness import RankPool, on_ranks

WIDTH, LAYERS = 256, 4
LAYER = 4 * WIDTH * (WIDTH + 1)


def _step_of(model: Any, optimizer: Any) -> Any:
    import torch

    batch = torch.randn(8, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(4):
        step()
    return step


def _network() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def _measure(rank: int, size: int, strategy: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    network: Any = _network()
    if strategy == "fully_shard":
        for layer in network:
            fully_shard(layer)
        model = fully_shard(network)
    elif strategy == "pairs":
        fully_shard([network[0], network[1]])
        fully_shard([network[2], network[3]])
        model = fully_shard(network)
    elif strategy == "apart":
        fully_shard([network[0], network[3]], reshard_after_forward=False)
        model = fully_shard(network)
    elif strategy == "ahead":
        for layer in network:
            fully_shard(layer)
        model = fully_shard(network)
        for layer, following in itertools.pairwise(network):
            layer.register_forward_pre_hook(lambda *_, following=following: following.unshard(async_op=True) and None)
    elif strategy == "torch":
        model = torch.nn.parallel.DistributedDataParallel(network)
        ddp_lab.observe(model)
    else:
        model = ddp_lab.DistributedDataParallel(network, gradient_as_bucket_view=strategy == "ddp, views")
    if strategy == "zero-1":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam)
    else:
        optimizer = torch.optim.Adam(model.parameters())
    cursor = ddp_lab.recording.descriptions(0)[1]
    found = vars(ddp_lab.measure_memory(_step_of(model, optimizer), model, optimizer))
    described = ddp_lab.recording.descriptions(cursor)[0]
    return found, [one for one in described if one["type"] in ("assignment", "memory")]


def _timeline(measured: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> Any:
    timeline = Timeline()
    for rank, (_, described) in enumerate(measured):
        for one in described:
            timeline.describe(rank, one)
    return timeline


@pytest.fixture(scope="module")
def measured(_pools: dict[int, RankPool]) -> Callable[[str], Any]:
    """What `_measure` returned on two ranks for a strategy, each of which is measured once."""
    return functools.cache(lambda strategy: _pools.setdefault(2, RankPool(2)).run(_measure, strategy))


def test_what_ddp_holds(measured: Callable[[str], Any]) -> None:
    """Parameters, gradients and buckets are of one size, Adam's state is twice that; the peak is more."""
    for strategy in ("ddp", "torch"):
        for found, described in measured(strategy):
            sizes = [found[part] for part in ("parameters", "gradients", "buckets")]
            assert sizes == [LAYERS * LAYER] * 3
            assert 2 * LAYERS * LAYER <= found["optimizer"] < 2.01 * LAYERS * LAYER
            assert found["peak"] > 5 * LAYERS * LAYER
            assert [one["type"] for one in described].count("memory") == 1


def test_predictions(measured: Callable[[str], Any]) -> None:
    """From a DDP run of our class or torch's, each strategy's peak on fresh models is predicted within 5 %."""
    for source in ("ddp", "torch"):
        timeline = _timeline(measured(source))
        rows = timeline.predicted_memory().set_index("strategy")
        for strategy, peak in rows["peak_bytes"].items():
            real = max(found["peak"] for found, _ in measured(strategy))
            assert peak == pytest.approx(real, rel=0.05), (source, strategy)


def test_predictions_of_other_groups(measured: Callable[[str], Any]) -> None:
    """Groups of several modules, next to each other or apart, and of all-gathers in the forward that start earlier."""
    timeline = _timeline(measured("ddp"))
    ways: dict[str, dict[str, Any]] = {
        "pairs": {"groups": [("0", "1"), ("2", "3")]},
        "apart": {"groups": [("0", "3")], "reshard_after_forward": False},
        "ahead": {"prefetch": 1},
    }
    for name, options in ways.items():
        predicted = timeline.predicted_memory(**options).set_index("strategy")["peak_bytes"]["fully_shard"]
        real = max(found["peak"] for found, _ in measured(name))
        assert predicted == pytest.approx(real, rel=0.05), name


def test_a_saved_timeline_predicts_the_same(measured: Callable[[str], Any], tmp_path: Any) -> None:
    """What was measured is in the file; other groups, world sizes and options give other peaks."""
    timeline = _timeline(measured("ddp"))
    again = Timeline.load(timeline.save(tmp_path / "run.npz"))
    assert again.predicted_memory().equals(timeline.predicted_memory())

    def peak(**options: Any) -> int:
        return int(again.predicted_memory(**options).set_index("strategy")["peak_bytes"]["fully_shard"])

    assert peak(groups=[]) > peak(reshard_after_forward=False) > peak() > peak(world_size=8)
    assert peak(groups="*") == peak(groups=["*"]) == peak()
    assert peak(prefetch=True) == peak() > peak(prefetch=False) == peak(prefetch=0)
    with pytest.raises(ValueError, match="prefetch must be at least 0"):
        peak(prefetch=-1)


@on_ranks(1)
def test_errors(rank: int, size: int) -> None:
    """A function that trains nothing, and zero steps, are refused; nothing measured is said."""
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    messages = []
    for step, options in ((lambda: None, {}), (_step_of, {"steps": 0})):
        try:
            ddp_lab.measure_memory(step, model, optimizer, **options)  # type: ignore[arg-type]
        except ValueError as error:
            messages.append(str(error))
    assert "did not run the model" in messages[0]
    assert "0 steps can't be measured" in messages[1]
    with pytest.raises(ValueError, match="the memory of no step was measured"):
        Timeline().predicted_memory()


@on_ranks(1)
def test_bytes_are_counted_on_all_threads(rank: int, size: int) -> None:
    """An allocation on another thread is in the peak; one that is freed after counting is subtracted all the same."""
    import threading

    import torch

    extension = native.load()
    extension.count_tensor_memory(True)
    extension.restart_tensor_memory_peak()
    before = extension.tensor_memory()[0]
    thread = threading.Thread(target=lambda: torch.empty(1 << 20, dtype=torch.uint8).fill_(1))
    thread.start()
    thread.join()
    held = torch.empty(1 << 10, dtype=torch.uint8)
    extension.count_tensor_memory(False)
    uncounted = torch.empty(1 << 12, dtype=torch.uint8)
    now, peak = extension.tensor_memory()
    del held, uncounted
    assert (peak - before, now - before, extension.tensor_memory()[0] - before) == (1 << 20, 1 << 10, 0)


@on_ranks(1)
def test_garbage_is_collected_between_steps(rank: int, size: int) -> None:
    """In a step none is, and before each only what is new, so that measured steps are about as long as others."""
    import gc

    import torch

    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = _step_of(model, optimizer)
    automatic: list[bool] = []
    generations: list[int] = []

    def training_step() -> None:
        automatic.append(gc.isenabled())
        step()

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and 0 < len(automatic) < 4:
            generations.append(about["generation"])

    gc.callbacks.append(note)
    ddp_lab.measure_memory(training_step, model, optimizer, steps=3)
    gc.callbacks.remove(note)
    assert generations == [1, 1, 1]
    assert not any(automatic)
    assert gc.isenabled()


@on_ranks(1)
def test_what_is_freed_late_is_not_taken_from_the_next_step(rank: int, size: int) -> None:
    """As by a thread of the backend: held at the end of one step, freed in the middle of the next."""
    import torch

    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = _step_of(model, optimizer)
    held: list[torch.Tensor] = []
    number = itertools.count()

    def training_step() -> None:
        held.clear()
        step()
        if next(number) in late:
            held.append(torch.ones(WIDTH, WIDTH))

    late: tuple[int, ...] = ()
    usual = ddp_lab.measure_memory(training_step, model, optimizer)
    number, late = itertools.count(), (0, 3)
    assert ddp_lab.measure_memory(training_step, model, optimizer) == usual
