"""Communication that the program could leave out, on real ranks: buffers that never change, and gradients that are
reduced although the next backward adds to them."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddp_lab
from ddp_lab import recording
from ddp_lab.analysis.findings import Accumulation
from tests.ranks.conftest import Ranks
from tests.ranks.monitoring.test_parameter_groups import records
from tests.ranks.observing import timeline_of

KINDS = ("ours", "observed", "sharded")


def wrapped(kind: str, net: nn.Module) -> Any:
    if kind == "ours":
        return ddp_lab.DistributedDataParallel(net)
    if kind == "observed":
        net = TorchDDP(net)
        ddp_lab.observe(net)
        return net
    fully_shard(net)
    ddp_lab.observe(net)
    return net


# ---- buffers --------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Tables that nobody writes to; others that change in each way."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("cosines", torch.randn(1 << 20), persistent=False)
        self.forwards, self.changes = 0, changes
        if changes:
            self.norm = nn.BatchNorm1d(8)  # whose kernel does not count what it writes
            for name in ("written", "replaced", "by_data", "on_one_rank"):
                self.register_buffer(name, torch.zeros(4))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        self.forwards += 1
        if not self.changes:
            return self.linear(x)
        if self.forwards == 19:
            self.written += 1
        if self.forwards == 3:
            self.by_data.data.fill_(1)
        self.replaced = self.replaced.clone()
        if rank == 1:
            self.on_one_rank.data.add_(1)
        return self.norm(self.linear(x))


@records
def _with_buffers(rank: int, size: int, kind: str, changes: bool) -> None:
    torch.manual_seed(0)
    net = wrapped(kind, Rotary(changes=changes))
    for _ in range(24):
        net(torch.randn(4, 8), rank).square().sum().backward()


@pytest.mark.parametrize("kind", ["ours", "observed"])
def test_buffers_that_never_change(recording_ranks: Ranks, kind: str) -> None:
    """They are named, and what their broadcast takes; no other one is, however it changes, and on which rank."""
    timeline = timeline_of(recording_ranks(2, _with_buffers, kind, False))
    model = timeline.reducers()[-1].reducer
    (found,) = [one for one in timeline.findings(model) if one.kind == "unchanged-buffers"]
    assert "for the broadcast of 1 buffer (4 MiB) that has not changed: cosines." in found.title
    assert found.evidence == "On all ranks they had the same values in 5 looks, the last at step 15."
    assert 0.5 < found.gain_percent <= 100
    timeline = timeline_of(recording_ranks(2, _with_buffers, kind, True))
    told = timeline.noticed("unchanged_buffers", timeline.reducers()[-1].reducer)
    names = {rank: [one["name"] for one in made["buffers"]] for rank, made in told.items()}
    assert names == {0: ["cosines", "on_one_rank"], 1: ["cosines"]}
    assert told[0]["step"] == 19, "the forward after the one that writes"
    facts = timeline.analysis_input(timeline.reducers()[-1].reducer)
    assert facts is not None
    assert facts.unchanged is not None
    assert (facts.unchanged.names, facts.unchanged.ns > 0) == (["cosines"], True)


def _copied(rank: int, size: int) -> list[bool]:
    model = wrapped("observed", Rotary(changes=False))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model._sync_buffers()
    return [one._sync_buffers.__self__ is one for one in copies]


def test_a_copy_of_an_observed_model_has_its_own_buffers(recording_ranks: Ranks) -> None:
    """What watches a model's buffers does not follow a copy of it."""
    assert recording_ranks(2, _copied) == [[True, True]] * 2


# ---- accumulation ---------------------------------------------------------------------------------------


class Training:
    """A model, its optimizer, and what a program does with them."""

    def __init__(self, kind: str, rank: int) -> None:
        torch.manual_seed(0)
        self.kind, self.rank = kind, rank
        self.net = wrapped(kind, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def backward(self) -> None:
        self.net(torch.randn(4, 8)).square().sum().backward()

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        if self.kind != "sharded":
            with self.net.no_sync():
                yield
            return
        self.net.set_requires_gradient_sync(False)
        yield
        self.net.set_requires_gradient_sync(True)


def adds_up(one: Training) -> None:
    for _ in range(4):
        one.backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def adds_up_to_zeros(one: Training) -> None:
    one.optimizer.zero_grad(set_to_none=False)
    for _ in range(4):
        one.backward()
    one.optimizer.step()


def adds_up_unevenly(one: Training) -> None:
    adds_up(one)
    for _ in range(2):
        one.backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def steps_each_time(one: Training) -> None:
    one.optimizer.zero_grad()
    one.backward()
    one.optimizer.step()


def steps_another_optimizer_each_time(one: Training) -> None:
    other = torch.optim.SGD([next(one.net.parameters())], lr=0.01)
    for _ in range(4):
        one.backward()
        other.step()
    one.optimizer.step()
    one.optimizer.zero_grad()


def synchronises_the_last(one: Training) -> None:
    with one.without_sync():
        for _ in range(3):
            one.backward()
    one.backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def clears(set_to_none: bool) -> Callable[[Training], None]:
    """As for the discriminator of a GAN, which gets gradients from the generator's loss, too."""

    def run(one: Training) -> None:
        one.backward()
        output = one.net(torch.randn(4, 8))
        one.optimizer.zero_grad(set_to_none=set_to_none)
        output.square().sum().backward()
        one.optimizer.step()

    return run


def discards(one: Training) -> None:
    """A step that is left out now and then, as by a scaler of gradients."""
    one.optimizer.zero_grad()
    one.backward()
    one.optimizer.zero_grad()
    one.backward()
    one.optimizer.step()


def calls_a_closure(one: Training) -> None:
    if not isinstance(one.optimizer, torch.optim.LBFGS):
        one.optimizer = torch.optim.LBFGS(one.net.parameters(), lr=0.01, max_iter=3)

    def closure() -> torch.Tensor:
        loss = one.net(torch.ones(4, 8)).square().sum()
        one.optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    one.optimizer.step(closure)


PROGRAMS: dict[str, tuple[Callable[[Training], None], tuple[int, int] | None]] = {
    "adds up": (adds_up, (4, 4)),
    "adds up to zeros": (adds_up_to_zeros, (4, 4)),
    "adds up unevenly": (adds_up_unevenly, (2, 4)),
    "steps each time": (steps_each_time, None),
    "steps another optimizer each time": (steps_another_optimizer_each_time, None),
    "synchronises the last": (synchronises_the_last, None),
    "clears to None": (clears(set_to_none=True), None),
    "clears to zeros": (clears(set_to_none=False), None),
    "discards": (discards, None),
    "calls a closure": (calls_a_closure, None),
}
WANTED = {name: wanted for name, (_, wanted) in PROGRAMS.items()}


def _noticed(rank: int, size: int, kind: str) -> tuple[dict[str, tuple[int, int] | None], tuple[int, int]]:
    """Program -> fewest and most backwards of its optimizer steps, if it was told that they add up; and how often that
    was said of a program that does so only at first, and in how many optimizer steps at last."""
    found = {}
    for name, (run, _) in PROGRAMS.items():
        if kind == "sharded" and name == "calls a closure":  # LBFGS has no sharded parameters
            found[name] = None
            continue
        one = Training(kind, rank)
        for _ in range(12):
            run(one)
        told = _of(one)
        found[name] = (told[-1]["fewest"], told[-1]["most"]) if told else None
    one = Training(kind, rank)
    for run in [adds_up] * 11 + [steps_each_time] * 12:
        run(one)
    told = _of(one)
    return found, (len(told), told[-1]["optimizer_steps"])


def _of(one: Training) -> list[dict[str, Any]]:
    number = ddp_lab.observe(one.net).model_id if one.kind != "ours" else one.net.model_id
    known, _ = recording.descriptions(0)
    return [made for made in known if made["type"] == "accumulation" and made["reducer"] == number]


@pytest.mark.parametrize("kind", KINDS)
def test_backwards_that_add_up(recording_ranks: Ranks, kind: str) -> None:
    """Only programs that add up the gradients of several backwards before an optimizer step, and reduce each, are
    noticed; when they stop, that is noticed, too."""
    for found, afterwards in recording_ranks(2, _noticed, kind):
        assert found == WANTED
        assert afterwards == (3, 0)


@records
def _adding_up(rank: int, size: int) -> None:
    one = Training("ours", rank)
    for _ in range(8):
        adds_up(one)


def test_the_facts_of_a_run_have_it(recording_ranks: Ranks) -> None:
    """What findings are made of has the backwards of all optimizer steps that were looked at."""
    timeline = timeline_of(recording_ranks(2, _adding_up))
    facts = timeline.analysis_input(timeline.reducers()[-1].reducer)
    assert facts is not None
    assert facts.accumulation == Accumulation(optimizer_steps=5, backwards=20, fewest=4, most=4)
