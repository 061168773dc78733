"""What `observe()` returns: how long it lasts, what it survives, and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddp_lab
from ddp_lab.parallel.monitoring.inspection import request_inspection
from ddp_lab.parallel.observe import observe_every_model
from ddp_lab.protocol.events import Kind
from tests.ranks.compare import everywhere, mlp, samples
from tests.ranks.harness import on_ranks
from tests.ranks.observing import CAP_MB, check_backwards, recorded, train


@on_ranks(2)
def test_remove_leaves_nothing(rank: int, size: int) -> None:
    """After remove() nothing is recorded and no hook is left; observing again works. Until then a second call gives the
    same observation, whose number is the same on all ranks."""
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    observation = ddp_lab.observe(model)
    assert ddp_lab.observe(model) is observation
    assert len(set(everywhere(observation.model_id))) == 1
    train(model, rank, 1)
    observation.remove()
    observation.remove()
    _, events, _ = recorded(lambda: train(model, rank, 2))
    assert len(events) == 0
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with ddp_lab.observe(model):
        _, events, _ = recorded(lambda: train(model, rank, 2))
    assert (events["kind"] == Kind.BACKWARD_END).sum() == 2


@on_ranks(2)
def test_a_model_that_is_observed_can_be_freed(rank: int, size: int) -> None:
    """Neither the observation nor what it returned keeps the model alive."""
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    observation = ddp_lab.observe(model)
    train(model, rank, 2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    observation.remove()


@on_ranks(2)
def test_copies_are_not_observed(rank: int, size: int) -> None:
    """An observed model can be copied and pickled; the copies train, unobserved."""
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    ddp_lab.observe(model)
    train(model, rank, 2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _, events, _ = recorded(lambda twin=twin: train(twin, rank, 2))
        assert len(events) == 0
    _, events, _ = recorded(lambda: train(model, rank, 2))
    assert len(events)


@on_ranks(2)
def test_a_backward_that_fails_is_abandoned(rank: int, size: int) -> None:
    """An exception in a backward reads as in our events; what torch then says is torch's."""
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    ddp_lab.observe(model)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("from the test")

    def fail_once() -> None:
        train(model, rank, 2)
        handle = next(model.parameters()).register_hook(fail)
        with pytest.raises(RuntimeError, match="from the test"):
            train(model, rank, 1)
        handle.remove()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(samples(rank, 0))

    _, events, _ = recorded(fail_once)
    assert (events["kind"] == Kind.BACKWARD_END).sum() == 2
    assert events[events["kind"] == Kind.ABANDONED]["step"].tolist() == [2]
    dist.barrier()


@on_ranks(2)
def test_models_that_share_a_backward_are_told_apart(rank: int, size: int) -> None:
    """Two observed models in one backward: each launch belongs to its own."""
    models = [TorchDDP(mlp(), bucket_cap_mb=CAP_MB) for _ in range(2)]
    numbers = [ddp_lab.observe(model).model_id for model in models]

    def train_both() -> None:
        for step in range(3):
            x = samples(rank, step)
            outputs = [model(x) for model in models]
            (outputs[0].square().mean() + outputs[1].square().mean()).backward()

    _, events, descriptions = recorded(train_both)
    for number in numbers:
        own = [one for one in descriptions if one.get("reducer") == number]
        first = [one for one in ddp_lab.recording.descriptions(0)[0] if one.get("reducer") == number]
        check_backwards(events[events["reducer"] == number], [*first, *own])


@on_ranks(2)
def test_every_model_of_a_program_can_be_observed(rank: int, size: int) -> None:
    """observe_every_model() reaches models that are wrapped later, until it is removed."""
    every = observe_every_model()
    try:
        _, events, _ = recorded(lambda: train(TorchDDP(mlp()), rank, 2))
        _, of_ours, _ = recorded(lambda: train(ddp_lab.DistributedDataParallel(mlp()), rank, 2))
    finally:
        every.remove()
    assert (events["kind"] == Kind.BACKWARD_END).sum() == 2
    assert (of_ours["kind"] == Kind.BACKWARD_END).sum() == 2
    _, events, _ = recorded(lambda: train(TorchDDP(mlp()), rank, 2))
    assert len(events) == 0


@on_ranks(2)
def test_other_models_are_refused(rank: int, size: int) -> None:
    """observe() says which class it expects."""
    with pytest.raises(TypeError, match=r"ddp_lab\.DistributedDataParallel records by itself"):
        ddp_lab.observe(ddp_lab.DistributedDataParallel(mlp()))
    with pytest.raises(TypeError, match="got Sequential: pass the wrapped model"):
        ddp_lab.observe(mlp())  # type: ignore[arg-type]
    net = mlp()
    net[0].bias.requires_grad_(False)
    trained = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    delayed = TorchDDP(net, delay_all_reduce_named_params=trained, param_to_hook_all_reduce=net[0].weight)
    with pytest.raises(ValueError, match=r"without buckets \(delay_all_reduce_named_params\)"):
        ddp_lab.observe(delayed)


@on_ranks(2)
def test_gradients_can_be_inspected_on_request(rank: int, size: int) -> None:
    """A request is carried out at the end of the step that it names; checksums are equal on all ranks."""
    model = TorchDDP(mlp(), bucket_cap_mb=CAP_MB)
    observation = ddp_lab.observe(model)
    train(model, rank, 2)
    known = ddp_lab.recording.descriptions(0)[1]
    request_inspection(observation.model_id, 3)
    for step in range(3):
        model.zero_grad()
        model(samples(rank, step)).square().mean().backward()
        if step == 1:  # the model's step 3
            gradients = [p.grad.clone() for p in model.parameters()]
    (found,) = [one for one in ddp_lab.recording.descriptions(known)[0] if one["type"] == "inspection"]
    assert (found["reducer"], found["step"]) == (observation.model_id, 3)
    norm = sum(bucket["norm"] ** 2 for bucket in found["buckets"]) ** 0.5
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).norm()), rel=1e-5)
    assert everywhere(found["buckets"]) == [found["buckets"]] * size
