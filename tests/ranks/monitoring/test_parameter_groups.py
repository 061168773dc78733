"""`fully_shard` and `replicate`, observed on real ranks: what was recorded, and that nothing else changes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ddp_lab
from ddp_lab import recording
from ddp_lab.parallel.monitoring import group_collectives
from ddp_lab.parallel.observe_shards import observe_every_root
from ddp_lab.protocol.events import DTYPE
from ddp_lab.timeline.timeline import Timeline
from tests.ranks.conftest import Ranks
from tests.ranks.observing import timeline_of

STEPS = 4
WIDTH = 16


class Block(nn.Module):
    """A layer that may take its time in its forward or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.forward_delay = self.backward_delay = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_delay)
        found = torch.tanh(self.linear(x))
        if self.backward_delay and found.requires_grad:
            found.register_hook(lambda gradient: time.sleep(self.backward_delay))
        return found


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sharded(size: int, kind: str = "shard") -> Net:
    """The net with each block, and then the whole, in parameter groups."""
    net = Net()
    if kind == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("replicate",))
        apply: Callable[..., Any] = replicate
    else:
        shape, names = ((2, size // 2), ("replicate", "shard")) if kind == "hybrid" else ((size,), ("shard",))
        mesh, apply = init_device_mesh("cpu", shape, mesh_dim_names=names), fully_shard
    for block in net.blocks:
        apply(block, mesh=mesh)
    apply(net, mesh=mesh)
    return net


def batch(rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, 8)


def train(net: nn.Module, rank: int, steps: int = STEPS) -> list[bytes]:
    """Some steps; the parameters of this rank afterwards."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        net(batch(rank, step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(net)


def parameters_of(net: nn.Module) -> list[bytes]:
    return [getattr(one, "to_local", lambda one=one: one)().detach().numpy().tobytes() for one in net.parameters()]


Recorded = tuple[np.ndarray, list[dict[str, Any]]]


def recorded(train: Callable[..., Any]) -> Callable[..., tuple[Any, Recorded]]:
    """Makes a function return what it did and the events that it caused, with all descriptions."""

    @functools.wraps(train)
    def run(*args: Any) -> tuple[Any, Recorded]:
        group_collectives.record()
        cursor = recording.statistics().recorded
        answer, parts = train(*args), [np.empty(0, DTYPE)]
        while cursor < recording.statistics().recorded:
            events, _, cursor = recording.drain(cursor)
            parts.append(events)
        return answer, (np.concatenate(parts), recording.descriptions(0)[0])

    return run


def records(train: Callable[..., None]) -> Callable[..., Recorded]:
    """Makes a function of a rank return what it recorded."""
    return functools.wraps(train)(lambda *args: recorded(train)(*args)[1])


def rows_of(answers: list[Recorded]) -> tuple[Timeline, pd.DataFrame]:
    timeline = timeline_of(answers)
    model = max(one.reducer for one in timeline.reducers())
    return timeline, timeline.parameter_groups(model)


def with_and_without(trained: Callable[[bool], list[bytes]]) -> tuple[bool, Recorded]:
    """Whether a training has equal parameters observed and not; what was recorded of the observed one."""
    with recording.suspended():
        without = trained(False)
    observed, found = recorded(trained)(True)
    return observed == without, found


def _both(rank: int, size: int, kind: str) -> tuple[bool, Recorded]:
    def trained(observed: bool) -> list[bytes]:
        net = sharded(size, kind)
        with ddp_lab.observe(net) if observed else contextlib.nullcontext() as observation:
            if observed:
                assert ddp_lab.observe(net) is observation
            for block in net.blocks if kind == "compiled" else ():
                block.linear.compile(backend="eager")
            parameters = train(net, rank)
        assert all("unshard" not in vars(group) for group in net._get_fsdp_state()._fsdp_param_groups)  # type: ignore[operator]
        return parameters

    return with_and_without(trained)


@pytest.mark.parametrize("kind", ["shard", "hybrid", "replicate", "compiled"])
def test_groups(recording_ranks: Ranks, kind: str) -> None:
    """Parameters are bit for bit those without observing, also of modules that torch compiles; each row has its module,
    counts, bytes and times."""
    answers = recording_ranks(4 if kind == "hybrid" else 2, _both, kind)
    assert [equal for equal, _ in answers] == [True] * len(answers)
    timeline, rows = rows_of([found for _, found in answers])
    modules = ["Net", "blocks.0", "blocks.1", "blocks.2"]
    assert len(rows) == len(answers) * STEPS * 4
    assert rows["complete"].all()
    assert rows.groupby(["rank", "step"])["module"].apply(list).map(lambda found: found == modules).all()
    of_block = rows[rows["module"] != "Net"]
    unsharded = 4 * (WIDTH * WIDTH + WIDTH)
    assert set(of_block["unsharded_bytes"]) == {unsharded}
    assert set(of_block["sharded_bytes"]) == {unsharded if kind == "replicate" else unsharded // 2}
    gathers = 0 if kind == "replicate" else 1
    assert set(of_block["forward_unshards"]) == {gathers}
    assert set(of_block["backward_unshards"]) == {gathers}
    assert set(of_block["gathered_bytes"]) == {2 * gathers * unsharded}
    assert set(of_block["reduced_bytes"]) == {unsharded}
    root = rows[rows["module"] == "Net"]
    assert set(root["forward_unshards"]) == {gathers}
    assert not root["backward_unshards"].any()
    prefetched = of_block[of_block["module"] != "blocks.2"]["backward_prefetched"]
    assert prefetched.all() if gathers else not prefetched.any()
    assert not rows["forward_prefetched"].any()
    for column, happens in (
        ("forward_unshard", gathers > 0),
        ("reduce_scatter", gathers > 0),
        ("all_reduce", kind in ("hybrid", "replicate")),
    ):
        took, exposed = rows[f"{column}_ms"], rows[f"{column}_exposed_ms"]
        assert ((took > 0) == happens).all()
        assert (exposed == took).all()  # torch waits inside of each call
    steps = timeline.steps(int(rows["reducer"].iloc[0]))
    total = rows.groupby(["rank", "step"])[[name for name in rows if name.endswith("exposed_ms")]].sum().sum(axis=1)
    np.testing.assert_allclose(steps.set_index(["rank", "step"])["exposed_ms"].sort_index(), total, rtol=1e-6)
    assert (steps["state"] == "complete").all()
    assert (steps["forward_ms"] > 0).sum() >= len(answers) * (STEPS - 1)
    parts = timeline.parts()
    later = steps[steps["step"] >= 1]
    for rank, found in parts.by_rank.items():
        whole = later[(later["rank"] == rank)]["step_ms"].tail(parts.steps).mean() / 1e3
        assert sum(found.values()) == pytest.approx(whole, rel=0.02), found


_OF_GROUPS = ("unshard", "post_backward", "_wait_for_post_backward")
_OF_STATES = ("_register_root_post_backward_final_callback", "_root_post_backward_final_callback")


def _replaced(rank: int, size: int) -> dict[str, int]:
    """Calls of methods of torch's classes that were replaced after the observation had begun, and after that."""
    net = sharded(size)
    ddp_lab.observe(net)
    train(net, rank, 1)
    state = net._get_fsdp_state()  # type: ignore[operator]
    calls: dict[str, int] = {}

    def counted(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[theirs.__name__] = calls.get(theirs.__name__, 0) + 1
            return theirs(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, names in ((type(state._fsdp_param_group), _OF_GROUPS), (type(state), _OF_STATES)):
            for name in names:
                patch.setattr(kind, name, counted(getattr(kind, name)))
        train(net, rank, 1)
    during = dict(calls)
    train(net, rank, 1)
    assert calls == during
    return during


def test_methods_that_are_replaced_later(recording_ranks: Ranks) -> None:
    """torch's own tests do that, with what the class has, and put it back."""
    for calls in recording_ranks(2, _replaced):
        assert set(calls) == {*_OF_GROUPS, *_OF_STATES}


@records
def _variants(rank: int, size: int, which: str) -> None:
    net = sharded(size)
    ddp_lab.observe(net)
    if which == "accumulation":
        for step in range(3):
            for part in range(3):
                net.set_requires_gradient_sync(part == 2)  # type: ignore[operator]
                net(batch(rank, 10 * step + part)).sum().backward()
    elif which == "evaluation":
        for step in range(3):
            net(batch(rank, step)).sum().backward()
            with torch.no_grad():
                net(batch(rank, step))
    elif which == "prefetch":
        net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1]])  # type: ignore[operator]
        train(net, rank, 3)
    elif which == "explicit":
        for step in range(3):
            net.blocks[1].unshard(async_op=True)  # type: ignore[operator]
            net(batch(rank, step)).sum().backward()
    elif which == "failure":
        train(net, rank, 2)
        net.blocks[1].linear.register_forward_pre_hook(_fail_once())
        with contextlib.suppress(ZeroDivisionError):
            net(batch(rank, 7))
        net.reset_iter_state()  # type: ignore[operator]
        train(net, rank, 2)
    elif which == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        for block in net.blocks:
            block.linear.forward = _checkpointed(checkpoint, block.linear.forward)  # type: ignore[method-assign]
        train(net, rank, 3)


def _fail_once() -> Callable[..., None]:
    left = [True]

    def fail(*_: object) -> None:
        if left.pop() if left else False:
            raise ZeroDivisionError

    return fail


def _checkpointed(checkpoint: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


@pytest.mark.parametrize("which", ["accumulation", "evaluation", "prefetch", "explicit", "failure", "checkpoint"])
def test_kinds_of_steps(recording_ranks: Ranks, which: str) -> None:
    """Forwards that accumulate count, evaluations do not; what was gathered ahead is known; a failed one is no step."""
    timeline, rows = rows_of(recording_ranks(2, _variants, which))
    steps = timeline.steps(int(rows["reducer"].iloc[0]))
    assert (steps["state"] == "complete").all()
    assert sorted(set(steps["step"])) == list(range(4 if which == "failure" else 3))
    block = rows[rows["module"] == "blocks.1"]
    unshards = 3 if which == "accumulation" else 1
    later = block[block["step"] != 2] if which == "failure" else block
    assert set(later["forward_unshards"]) == {unshards}
    assert set(block["backward_unshards"]) == {unshards}
    assert (block["reduce_scatter_ms"] > 0).all()
    ahead = which in ("prefetch", "explicit")
    assert (block["forward_prefetched"] == ahead).all()
    assert not rows[rows["module"] == "blocks.2"]["forward_prefetched"].any()
    uses = set(timeline.collectives()["use"])
    assert ("evaluation" in uses) == (which == "evaluation")
    if which == "accumulation":
        later = steps[steps["step"] > 0]
        assert (later["accumulation_ms"] > 0).all()


@records
def _several(rank: int, size: int) -> None:
    end = observe_every_root()
    nets = [sharded(size), sharded(size, "replicate")]
    for step in range(3):
        for net in nets:
            net(batch(rank, step)).sum().backward()
    end()
    assert ddp_lab.observe(nets[0]).model_id != ddp_lab.observe(nets[1]).model_id
    with pytest.raises(ValueError, match="outermost"):
        ddp_lab.observe(nets[0].blocks[0])
    other = sharded(size)
    other(batch(rank, 0)).sum().backward()  # is not observed
    (groups,) = [other._get_fsdp_state()._fsdp_param_groups]  # type: ignore[operator]
    assert all("unshard" not in vars(group) for group in groups)


def test_several_roots(recording_ranks: Ranks) -> None:
    """Each root that torch finds is a model of its own, with no call of the program."""
    timeline = timeline_of(recording_ranks(2, _several))
    rows = timeline.parameter_groups()
    models = [one for one in timeline.reducers() if one.reducer in set(rows["reducer"])][-2:]
    gathered = []
    for one in sorted(models, key=lambda one: one.reducer):
        mine = rows[rows["reducer"] == one.reducer]
        assert len(mine) == 2 * 3 * 4
        assert one.module == "Net"
        gathered.append(bool((mine["gathered_bytes"] > 0).any()))
    assert gathered == [True, False]


@records
def _delayed(rank: int, size: int, late: int, block: int, phase: str, kind: str) -> None:
    net = sharded(size, kind)
    began = time.perf_counter()
    train(net, rank, 10)
    if rank == late and phase:  # as long as a step of this machine, now
        setattr(net.blocks[block], f"{phase}_delay", max(0.02, (time.perf_counter() - began) / 10))
    with ddp_lab.observe(net):
        train(net, rank, 20)


def _check_named(answers: list[Recorded], late: int, block: int, phase: str) -> None:
    timeline, _ = rows_of(answers)
    model = max(one.reducer for one in timeline.reducers())
    found = [one for one in timeline.findings(model) if one.kind == "late-parameter-group"]
    assert found, timeline.summary(model)
    assert (found[0].rank, found[0].bucket) == (late, block + 1), found
    assert found[0].title == f"Rank {late} is late in the {phase} of blocks.{block}."
    assert found[0].gain_percent > 10
    places = timeline.stragglers(model)
    assert (places[0].rank, places[0].bucket, places[0].words) == (late, block + 1, f"in the {phase} of blocks.{block}")
    assert f"Rank {late} is late in the {phase} of blocks.{block}, by" in timeline.summary(model)


def test_late_rank(recording_ranks: Ranks) -> None:
    """A delay in one group of one rank, as long as a step, is named with rank, group and phase."""
    _check_named(recording_ranks(2, _delayed, 0, 0, "forward", "shard"), 0, 0, "forward")


@pytest.mark.soak
def test_late_rank_of_hybrid(recording_ranks: Ranks) -> None:
    """The same on a mesh of two dimensions, where the others wait for each other, too."""
    _check_named(recording_ranks(4, _delayed, 3, 1, "backward", "hybrid"), 3, 1, "backward")


@recorded
def _profiled(rank: int, size: int, steps: int) -> list[float]:
    """By torch's profiler ms of the last steps: in which Gloo was in their collectives, and in which the host was in
    fully_shard's all-gathers and reductions, copies included."""
    from torch.profiler import ProfilerActivity, profile

    net = sharded(size)
    ddp_lab.observe(net)
    for block in net.blocks:  # collectives that last: each waits for rank 1
        block.forward_delay = 0.05 * rank
    train(net, rank, 2)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(net, rank, steps)
    names = (("gloo:",), ("FSDP::all_gather (", "FSDP::post_backward_reduce"))
    spans = [[one for one in profiler.events() if one.name.startswith(of)] for of in names]
    return [sum(one.time_range.elapsed_us() for one in of) / 1e3 for of in spans]


@pytest.mark.soak
def test_profiler_agrees(recording_ranks: Ranks) -> None:
    """Exposed communication is what torch's profiler measures for the collectives of the same steps."""
    steps = 8
    answers = recording_ranks(2, _profiled, steps)
    timeline, rows = rows_of([found for _, found in answers])
    told = timeline.steps(int(rows["reducer"].iloc[0]))
    (within, around), _ = answers[0]  # of the rank that waits; those of the other one last microseconds
    mine = told[(told["rank"] == 0) & (told["step"] >= 2)]
    assert len(mine) == steps
    assert mine["exposed_ms"].sum() == pytest.approx(within, rel=0.05)
    assert mine["exposed_ms"].sum() == pytest.approx(around, rel=0.05)


@records
def _ahead(rank: int, size: int) -> None:
    """Each block is gathered while the one before it computes."""
    net = sharded(size)
    ddp_lab.observe(net)
    for block, following in zip(net.blocks[:-1], net.blocks[1:], strict=True):
        block.forward_delay = 0.05
        block.register_forward_pre_hook(lambda *_, following=following: following.unshard(async_op=True) and None)
    train(net, rank, 8)


def test_overlapped_all_gathers(recording_ranks: Ranks) -> None:
    """What runs while a block computes is overlapped, and no longer exposed; sums of a step's parts still agree."""
    timeline, rows = rows_of(recording_ranks(2, _ahead))
    steps = timeline.steps(int(rows["reducer"].iloc[0]))
    steps = steps[steps["step"] > 0]
    ahead = rows[rows["module"].isin(["blocks.1", "blocks.2"]) & (rows["step"] > 0)]
    assert ahead["forward_prefetched"].all()
    assert ahead["forward_unshard_ms"].median() > 2 * ahead["forward_unshard_exposed_ms"].median()
    assert steps["hidden_ms"].median() > 0
    parts = timeline.parts()
    for rank, found in parts.by_rank.items():
        whole = steps[steps["rank"] == rank]["step_ms"].tail(parts.steps).mean() / 1e3
        assert sum(found.values()) == pytest.approx(whole, rel=0.02), found


def _grouped(rank: int, size: int) -> tuple[bool, Recorded]:
    """Two blocks share a group; each step has two backwards that reduce, of which only the second is the last."""

    def trained(observed: bool) -> list[bytes]:
        net = Net()
        fully_shard([net.blocks[0], net.blocks[1]])
        fully_shard(net)
        if observed:
            ddp_lab.observe(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            for part in range(2):
                net.set_is_last_backward(part == 1)  # type: ignore[operator]
                net(batch(rank, 10 * step + part)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(net)

    return with_and_without(trained)


def test_modules_that_share_a_group(recording_ranks: Ranks) -> None:
    """One row for both; a step ends with its last backward, and counts the reductions of all."""
    answers = recording_ranks(2, _grouped)
    assert [equal for equal, _ in answers] == [True, True]
    timeline, rows = rows_of([found for _, found in answers])
    assert rows["module"].unique().tolist() == ["Net", "blocks.0, blocks.1"]
    assert len(rows) == 2 * 3 * 2
    shared = rows[rows["module"] != "Net"]
    assert set(shared["forward_unshards"]) == {2}
    assert set(shared["reduced_bytes"]) == {2 * 2 * 4 * (WIDTH * WIDTH + WIDTH)}
    assert (timeline.steps(int(rows["reducer"].iloc[0]))["state"] == "complete").all()


class Widths(nn.Module):
    """Layers of several widths, one after the other."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.mean() + torch.zeros(2, layer.in_features))
        return x


@records
def _sized(rank: int, size: int, widths: list[int], whole: bool, made_by: str) -> None:
    """A model of these widths, with each layer in a group of its own, or all in one."""
    group = {"fully_shard": fully_shard, "replicate": replicate}[made_by]

    net = Widths(widths)
    for layer in net.layers if not whole else ():
        group(layer)
    group(net)
    ddp_lab.observe(net)
    for step in range(20):
        net(batch(rank, step)).sum().backward()


@pytest.mark.parametrize(
    ("widths", "whole", "kind", "made_by"),
    [
        ([8] * 12 + [512, 700], False, "parameter-groups-too-small", "fully_shard"),
        ([512] * 5, True, "parameter-group-too-large", "replicate"),
    ],
)
def test_sizes_of_groups(recording_ranks: Ranks, widths: list[int], whole: bool, kind: str, made_by: str) -> None:
    """Many tiny groups, and one that holds the whole model, are findings with a gain; neither is both."""
    timeline, rows = rows_of(recording_ranks(2, _sized, widths, whole, made_by))
    found = {one.kind: one for one in timeline.findings(int(rows["reducer"].iloc[0]))}
    sizes = {one for one in found if one.startswith("parameter-group")}
    assert sizes == {kind}, timeline.summary()
    assert 0.5 < found[kind].gain_percent < 100
    assert f"{made_by}(" in found[kind].remedy


@records
def _kept(rank: int, size: int, resharded: bool) -> None:
    net = Widths([512] * 5)
    for layer in net.layers:
        fully_shard(layer, reshard_after_forward=resharded)
    fully_shard(net)
    ddp_lab.observe(net)
    for step in range(20):
        net(batch(rank, step)).sum().backward()


def test_parameters_that_are_gathered_again(recording_ranks: Ranks) -> None:
    """A backward that gathers them waits, and the finding says what keeping them takes; one that has them does not."""
    timeline, rows = rows_of(recording_ranks(2, _kept, True))
    found = {one.kind: one for one in timeline.findings(int(rows["reducer"].iloc[0]))}["exposed-backward-unshard"]
    assert 3 < found.gain_percent < 100
    assert "reshard_after_forward=False). That takes up to 5.01 MiB more" in found.remedy
    timeline, rows = rows_of(recording_ranks(2, _kept, False))
    kinds = {one.kind for one in timeline.findings(int(rows["reducer"].iloc[0]))}
    assert "exposed-backward-unshard" not in kinds


@records
def _failing(rank: int, size: int) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    net = sharded(size)
    ddp_lab.observe(net)
    train(net, rank, 2)
    hook = net.blocks[1].register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    with contextlib.suppress(ZeroDivisionError):
        net(batch(rank, 6)).sum().backward()
    hook.remove()
    net.reset_iter_state()  # type: ignore[operator]
    train(net, rank, 2)


def test_a_backward_that_fails(recording_ranks: Ranks) -> None:
    """It is an abandoned step, and the steps after it are complete."""
    timeline, rows = rows_of(recording_ranks(2, _failing))
    steps = timeline.steps(int(rows["reducer"].iloc[0]))
    states = ["complete", "complete", "abandoned", "complete", "complete"]
    assert steps[steps["rank"] == 0]["state"].tolist() == states
    assert rows[rows["step"] != 2]["complete"].all()
