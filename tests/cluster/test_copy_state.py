"""A rank that died gets a new process, and its variables from a living rank; then training goes on as before."""

from __future__ import annotations

import pytest

import ddp_lab
from ddp_lab import CellError
from tests.cluster.conftest import Lab

REPLACES_PROCESSES = True

PARTS = """
import math, os, signal
def batch_of(step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 8, generator=generator) / math.sqrt(8)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)], torch.nn.Linear(8, 1))
        self.norm = torch.nn.BatchNorm1d(8)
    def forward(self, x):
        return self.layers(self.norm(x)).square().mean()
torch.manual_seed(0)
model = {kind}(Net(), {arguments})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
step, losses = 0, []
def train(until, dies_at=None):
    global step
    while step < until:
        optimizer.zero_grad()
        loss = model(batch_of(step))
        if step == dies_at and rank == {victim}:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step(); schedule.step()
        losses.append(loss.item()); step += 1
"""
LOSSES = "total = torch.tensor(losses); dist.all_reduce(total); total.tolist()"
KINDS = [
    ("ddp_lab.DistributedDataParallel", "bucket_cap_mb=0.0005", 1),
    ("ddp_lab.DistributedDataParallel", "static_graph=True", 0),
    ("torch.nn.parallel.DistributedDataParallel", "bucket_cap_mb=0.0005", 1),
]
COMPRESS = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
"""


@pytest.mark.parametrize(("kind", "arguments", "victim"), KINDS)
def test_training_goes_on_after_a_death(lab: Lab, kind: str, arguments: str, victim: int) -> None:
    """A rank is killed in its backward; after `copy_state_from` the losses are those of an undisturbed run."""
    parts = PARTS.replace("{kind}", kind).replace("{arguments}", arguments).replace("{victim}", str(victim))
    lab.run(parts + COMPRESS)
    lab.run("train(16)")
    undisturbed = lab.values(LOSSES)[0]
    lab.run(parts + COMPRESS)
    with pytest.raises(CellError, match=f"rank {victim} was killed by SIGKILL"):
        lab.run("train(16, dies_at=7)")
    kept = lab.pids()
    copied = lab.values(f"ddp_lab.copy_state_from({1 - victim})")
    assert {"model", "optimizer", "schedule", "train", "batch_of", "Net", "math", "step", "losses"} <= set(copied[0])
    assert copied[0] == copied[1]
    assert lab.values("rank, dist.get_rank(), step") == {0: (0, 0, 7), 1: (1, 1, 7)}
    # The survivor's losses so far are its own; those of the new rank are copies of them.
    lab.run("losses = losses[:0]")
    lab.run("train(16)")
    assert lab.values(LOSSES)[0] == undisturbed[7:]
    # What a cell's functions see on the new rank is its own namespace.
    assert lab.values("batch_of.__globals__ is globals()") == {0: True, 1: True}
    assert lab.values("len(model._comm_hooks)") == {0: 1, 1: 1}
    assert lab.pids().items() >= kept.items()
    if kind.startswith("ddp_lab"):
        assert set(lab.step_state()) == {0, 1}, "both ranks have the model that trained last"
        newest = lab.timeline.reducers()[-1].reducer
        last = lab.timeline.steps(newest).groupby("rank").step.max()
        assert last.loc[victim] == last.loc[1 - victim] >= 15


def test_ranks_that_have_them_load_their_states(lab: Lab) -> None:
    """A rank that has the variables keeps its objects; other variables of its own are left alone, or copied by name."""
    lab.run(
        "net = torch.nn.Linear(2, 2); torch.nn.init.constant_(net.weight, float(rank))\n"
        "same, mine = net, {'of': rank}\nsampler = torch.utils.data.DistributedSampler(range(8))"
    )
    assert {"net", "same"} <= set(lab.values("ddp_lab.copy_state_from(1)")[0])
    assert lab.values("net.weight.mean().item(), same is net, mine['of']") == {0: (1.0, True, 0), 1: (1.0, True, 1)}
    lab.run("ddp_lab.copy_state_from(1, 'mine', 'sampler')")
    assert lab.values("mine['of'], sampler.rank") == {0: (1, 0), 1: (1, 1)}
    lab.run("del net, same, mine, sampler")


def test_what_can_not_be_copied(lab: Lab) -> None:
    """It is named with the reason: an error if it was asked for, a warning on ranks that go without it otherwise."""
    lab.run("import threading\nif rank == 0: lock, kept = threading.Lock(), 5")
    with pytest.raises(CellError, match=r"lock: .*pickle"):
        lab.run("ddp_lab.copy_state_from(0, 'lock')")
    caught = (
        "import warnings\nwith warnings.catch_warnings(record=True) as caught:\n"
        "    names = ddp_lab.copy_state_from(0)\n"
        "names, kept, [str(one.message) for one in caught if 'lock' in str(one.message)]"
    )
    found = lab.values(caught)
    assert {"kept"} <= set(found[0][0]) == set(found[1][0])
    assert "lock" not in found[0][0]
    assert found[0][1:] == (5, [])
    assert found[1][1] == 5
    assert found[1][2][0].startswith("not copied from rank 0: lock (")
    with pytest.raises(CellError, match="has no variable nothing"):
        lab.run("ddp_lab.copy_state_from(0, 'nothing')")
    with pytest.raises(CellError, match="same arguments"):
        lab.run("ddp_lab.copy_state_from(rank)")
    with pytest.raises(CellError, match="there is no rank 7"):
        lab.run("ddp_lab.copy_state_from(7)")
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_what_can_not_be_sent_ends_no_rank(lab: Lab) -> None:
    """An object that fails to tell its state, and a model that only the source knows by a name: errors on all ranks."""
    lab.run(
        "class Shy:\n    def state_dict(self): raise ValueError('tells nothing')\n"
        "    def load_state_dict(self, state): pass\nshy = Shy()\n"
        "holder = [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))]"
    )
    with pytest.raises(CellError) as failed:
        lab.run("ddp_lab.copy_state_from(0, 'shy')")
    for failure in failed.value.failures.values():
        assert "the variables of rank 0 can't be sent: tells nothing" in failure.message
    assert set(failed.value.failures) == {0, 1}
    with pytest.raises(CellError, match=r"the model \(no variable of its own\) of the source has no counterpart here"):
        lab.run("ddp_lab.copy_state_from(0, 'holder')")
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
    lab.run("del shy, holder")


def test_it_is_called_on_ranks() -> None:
    """Elsewhere it says where."""
    with pytest.raises(RuntimeError, match="copies between ranks: call it in a %%distributed cell, on all ranks"):
        ddp_lab.copy_state_from(0)
