"""Lesson 4, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

from . import running
from .lesson_tests import test_checks as test_checks

_BATCHES = """%%distributed
def batches(epoch, size=32):
    sampler = DistributedSampler(train_set, {sampler})
    {call}
    dice = torch.Generator().manual_seed({seed})
    for images, kinds, numbers in DataLoader(train_set, batch_size=size, sampler=sampler):
        factors = 0.8 + 0.4 * torch.rand(len(images), generator=dice)
        yield images * factors.view(-1, 1, 1, 1), kinds, numbers, factors
"""
_SET, _SEED = "sampler.set_epoch(epoch)", "epoch * world_size + rank"


def _batches(sampler: str = "", call: str = _SET, seed: str = _SEED) -> str:
    return _BATCHES.format(sampler=sampler, call=call, seed=seed)


def _step(*lines: str) -> str:
    return "\n    ".join(
        (
            "%%distributed\ndef step(model, optimizer, scaler, images, kinds, limit=0.1):",
            "optimizer.zero_grad()",
            *lines,
            "scaler.update()",
        )
    )


_BACKWARD = "scaler.scale(loss_of(model(images.to(device)), kinds.to(device))).backward()"
_UNSCALE, _OPTIMIZE = "scaler.unscale_(optimizer)", "scaler.step(optimizer)"
_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), limit)"
_CLIP_EACH = "for one in model.parameters():\n        torch.nn.utils.clip_grad_norm_(one, limit)"
_HOOKS = "for one in model.parameters():\n        one.register_hook(lambda g: g * (limit / g.norm()).clamp(max=1))"
_OWN = f"with model.no_sync():\n        {_BACKWARD}"
_AVERAGE = "for one in model.parameters():\n        dist.all_reduce(one.grad)\n        one.grad /= world_size"

_EVALUATE = """%%distributed
def evaluate(network, dataset):
    {part}
    counted = torch.zeros(2, device=device)
    for images, kinds, *_ in DataLoader({data}):
        right = network(images.to(device)).argmax(1) == kinds.to(device)
        counted += torch.tensor({counted}, device=device)
    {reduce}
    return float(counted[0] / counted[1])
"""
_MINE = "mine = Subset(dataset, range(rank, len(dataset), world_size))"
_REDUCE = "dist.all_reduce(counted)"


def _evaluate(
    part: str, data: str, reduce: str = _REDUCE, counted: str = "[float(right.sum()), float(len(right))]"
) -> str:
    return _EVALUATE.format(part=part, data=data, reduce=reduce, counted=counted)


_CHECKPOINT = """%%distributed
def save(path, model, optimizer, epoch):
    {save}

def load(path, network, optimizer):
    state = torch.load(path, map_location=device)
    {load}
    return {following}
"""
_STATE = '{"network": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}'
_RANK_0 = f"if rank == 0:\n        torch.save({_STATE}, path)"
_WAIT = "\n    dist.barrier()"
_NETWORK = 'network.load_state_dict(state["network"])'
_LOAD = f'{_NETWORK}\n    optimizer.load_state_dict(state["optimizer"])'


def _checkpoint(save: str = _RANK_0 + _WAIT, load: str = _LOAD, following: str = 'state["epoch"] + 1') -> str:
    return _CHECKPOINT.format(save=save, load=load, following=following)


WRONG = {
    "1": {
        _batches(sampler="num_replicas=1, rank=0"): "the same pictures in one epoch",
        _batches(sampler="num_replicas=2 * world_size, rank=rank"): "do not have every picture once",
        _batches(call="pass"): "has the order of epoch 0",
        _batches(seed="epoch"): "draw the same factors",
        _batches(seed="rank"): "has the factors of epoch 0",
        _batches(seed="epoch + rank"): "an epoch earlier",
        _batches(seed="rank + int(torch.randint(1000, 10**9, ()))"): "no training can be repeated",
    },
    "2": {
        _step(_BACKWARD, _CLIP, _OPTIMIZE): "clipped while they were scaled.",
        _step(_HOOKS, _BACKWARD, _OPTIMIZE): "The direction is wrong, too",
        _step(_BACKWARD, _UNSCALE, _CLIP_EACH, _OPTIMIZE): "Clip all gradients together",
        _step(_BACKWARD, _OPTIMIZE): "Nothing was clipped",
        _step(_CLIP, _BACKWARD, _OPTIMIZE): "Nothing was clipped",
        _step(_BACKWARD, _OPTIMIZE, _CLIP): "Nothing was clipped",
        _step(_OWN, _UNSCALE, _CLIP, _AVERAGE, _OPTIMIZE): "clipped before the average",
        _step(_BACKWARD, _UNSCALE, _CLIP, _OPTIMIZE).removesuffix("scaler.update()"): "Call scaler.update()",
        "%%distributed\ndef step(*_):\n    pass": "have not changed",
    },
    "3": {
        _evaluate(_MINE, "mine, batch_size=64", reduce=""): "another accuracy",
        _evaluate("pass", "dataset, batch_size=64"): "Give each rank its own part",
        _evaluate(
            "sampler = DistributedSampler(dataset, shuffle=False)", "dataset, batch_size=64, sampler=sampler"
        ): "repeats some",
        _evaluate(_MINE, "mine, batch_size=64, drop_last=True"): "only 128 pictures",
        _evaluate(_MINE, "mine, batch_size=64", counted="[float(right.float().mean()), 1.0]"): "a mean of means",
    },
    "4": {
        _checkpoint(save=f"torch.save({_STATE}, path)" + _WAIT): "that write the file are 0, 1",
        _checkpoint(save="pass"): "that write the file are none",
        _checkpoint(save=_RANK_0): "before the file existed",
        _checkpoint(save=_RANK_0.replace(".module", "") + _WAIT): "begin with `module.`",
        _checkpoint(load="pass"): "does not have the saved weights",
        _checkpoint(load=_NETWORK): "without its momentum",
        _checkpoint(following='state["epoch"]'): "The next epoch is 2",
    },
}


def _numbers(lesson: running.Notebook, cell: str, pattern: str) -> list[float]:
    """The numbers that ranks print where the pattern has a group."""
    found = re.findall(pattern, running.text(running.cell(lesson, cell)))
    assert found, pattern
    return [float(number) for number in found]


def test_data(lesson: running.Notebook) -> None:
    """The training learns the pictures; two ranks without a sampler train one process's network; the order stays."""
    assert min(_numbers(lesson, "naive", r"accuracy of one process ([\d.]+)%")) > 90
    assert max(_numbers(lesson, "naive", r"difference of the weights: (\S+)")) < 1e-3
    orders = running.text(running.cell(lesson, "set-epoch"))
    for name, distinct in (("without set_epoch:", 1), ("with set_epoch:", 3)):
        [first, *_] = re.findall(rf"{name}\s+(.+)", orders)
        assert len(set(re.findall(r"\[[^]]+\]", first))) == distinct
    told = running.text(running.tagged(lesson, "compare-2"))
    assert "What happened: it has the order of the first epoch. " in told


def test_steps(lesson: running.Notebook) -> None:
    """Half the batch per rank equals one process; only the solution clips well; one rank's own decision destroys."""
    differences = _numbers(lesson, "batch", r"difference of the weights (\S+)")
    assert min(differences[:2]) > 0.01
    assert differences[2] < 1e-3
    same_rate, twice, half = _numbers(lesson, "batch", r"learning rate: accuracy ([\d.]+)%")
    assert same_rate < twice < half
    for cell, kept in (("exercise-2", False), ("solution-2", True)):
        printed = running.text(running.cell(lesson, cell))
        steps = re.findall(r"limit (\S+), scaling (\w+): length ([\d.]+), cosine ([\d.]+)", printed)
        assert {step[:2] for step in steps} == {("inf", "off"), ("0.1", "off"), ("0.1", "on")}
        for limit, scaling, length, cosine in steps:
            right = abs(float(length) - 0.1) < 0.001 and float(cosine) == 1
            assert right == (kept and limit != "inf"), printed
            assert limit == "inf" or kept or (float(length) < 0.001) == (scaling == "on"), printed
    skipped = running.text(running.cell(lesson, "skip"))
    assert re.search(r"rank 0 │ decided by the own loss: loss [\d.]+, weights finite: False", skipped)
    assert "rank 1 │ decided by the own loss: loss nan, weights finite: True" in skipped
    assert skipped.count("weights finite: False") == 1


def test_measures_and_checkpoints(lesson: running.Notebook) -> None:
    """Ranks disagree on a mean of means, rank 0 prints the accuracy, and only all three states resume a training."""
    assert len(set(_numbers(lesson, "exercise-3", r"accuracy ([\d.]+)%"))) == 2
    [accuracy] = _numbers(lesson, "solution-3", r"rank 0 │ accuracy ([\d.]+)%")
    [same_rate, *_] = _numbers(lesson, "batch", r"learning rate: accuracy ([\d.]+)%")
    assert abs(accuracy - same_rate) < 0.1
    assert running.cell(lesson, "exercise-4").outputs[-1].output_type == "error"
    weights, momentum, epoch = _numbers(lesson, "resume", r"uninterrupted training (\S+)")
    assert min(weights, momentum) > 0.005
    assert epoch < 1e-3
