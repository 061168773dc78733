"""Process groups and works written in Python, not registered with torch: our class does with them what torch's does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_lab import DistributedDataParallel as Ours
from ddp_lab import check_hook
from ddp_lab.parallel.core import process_groups
from ddp_lab.protocol.messages import Change
from tests.ranks.comm.test_capabilities import outside
from tests.ranks.compare import assert_same, everywhere, same_as_torch, samples, state_of
from tests.ranks.harness import on_ranks
from tests.ranks.python_groups import WORKS, PythonGroup


class Net(nn.Module):
    """Has buffers, and a layer that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Linear(10, 8), nn.BatchNorm1d(8)
        self.last, self.extra = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        y = self.norm(self.first(x)).tanh()
        return self.last(y) + self.extra(y) if extra else self.last(y)


def _trained(model: nn.Module, rank: int, steps: int = 3, **inputs: Any) -> list[dict[str, torch.Tensor]]:
    dtype = next(model.parameters()).dtype
    states = []
    for step in range(steps):
        model.zero_grad()
        model(samples(rank, step).to(dtype), **inputs).square().sum().backward()
        states.append(state_of(model))
    return states


def _without_sync(cls: type, group: Any, rank: int) -> Any:
    model = cls(Net(), process_group=group)
    states = []
    for step in range(3):
        model.zero_grad()
        with model.no_sync():
            model(samples(rank, step)).square().sum().backward()
        states.append(state_of(model))
        model(samples(rank, 10 + step)).square().sum().backward()
        states.append(state_of(model))
    return states


def _own_hook(group, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    work = group.allreduce([bucket.buffer().div_(group.size())], dist.AllreduceOptions())
    return work.get_future().then(lambda done: done.value()[0])


def _hooked(cls: type, group: Any, rank: int, hook: Any, state: Any) -> Any:
    model = cls(Net(), process_group=group)
    model.register_comm_hook(state, hook)
    return _trained(model, rank, 4)


def _delayed(cls: type, group: Any, rank: int) -> Any:
    module = Net()
    late = {"delay_all_reduce_named_params": [("last.weight", module.last.weight)]}
    return _trained(cls(module, process_group=group, param_to_hook_all_reduce=module.first.bias, **late), rank)


def _group_again(cls: type, group: Any, rank: int) -> Any:
    model = cls(Net(), process_group=group)
    before = _trained(model, rank)
    model._update_process_group(group)
    return [before, _trained(model, rank)]


def _refusals(cls: type, group: Any, rank: int) -> Any:
    """Hooks whose annotations are wrong, and what their errors begin with."""
    model = cls(Net(), process_group=group)

    def takes_int(state: Any, bucket: Any) -> Any:
        raise AssertionError

    def gives_int(state: Any, bucket: Any) -> Any:
        raise AssertionError

    takes_int.__annotations__ = {"bucket": int}
    gives_int.__annotations__ = {"bucket": dist.GradBucket, "return": int}
    found = []
    for hook in (takes_int, gives_int):
        with pytest.raises(ValueError) as caught:
            model.register_comm_hook(None, hook)
        found.append(str(caught.value)[:60])
    return found


PROGRAMS: dict[str, Callable[[type, Any, int], Any]] = {
    "plain": lambda cls, group, rank: _trained(cls(Net(), process_group=group), rank),
    "views": lambda cls, group, rank: _trained(
        cls(Net(), process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=1e-5), rank
    ),
    "static graph": lambda cls, group, rank: _trained(cls(Net(), process_group=group, static_graph=True), rank),
    "unused": lambda cls, group, rank: _trained(
        cls(Net(), process_group=group, find_unused_parameters=True), rank, extra=False
    ),
    "unused on one rank": lambda cls, group, rank: _trained(
        cls(Net(), process_group=group, find_unused_parameters=True), rank, extra=rank == 0
    ),
    "float64": lambda cls, group, rank: _trained(cls(Net().double(), process_group=group), rank),
    "no_sync": _without_sync,
    "own hook": lambda cls, group, rank: _hooked(cls, group, rank, _own_hook, group),
    "allreduce_hook": lambda cls, group, rank: _hooked(cls, group, rank, allreduce_hook, group),
    "fp16_compress_hook": lambda cls, group, rank: _hooked(cls, group, rank, fp16_compress_hook, group),
    "PowerSGD": lambda cls, group, rank: _hooked(
        cls, group, rank, powerSGD_hook, PowerSGDState(group, start_powerSGD_iter=2)
    ),
    "another group": _group_again,
    "wrong hooks": _refusals,
}


@pytest.mark.parametrize(
    ("program", "works"),
    [*((program, works) for program in PROGRAMS for works in ("timeout", "future")), ("plain", "optional")],
)
@on_ranks(2)
def test_as_with_torchs_class(rank: int, size: int, program: str, works: str) -> None:
    """Values, gradients and refusals over two ranks are torch's, bit by bit, however the works are written."""
    same_as_torch(lambda cls: PROGRAMS[program](cls, PythonGroup(works=works), rank))


@pytest.mark.parametrize("program", ["plain", "views", "static graph", "float64", "no_sync"])
@on_ranks(2)
def test_a_sum_in_another_tensor(rank: int, size: int, program: str) -> None:
    """If all_reduce gives the sum in the tensor of its future, that one is used, as torch's class does."""
    same_as_torch(lambda cls: PROGRAMS[program](cls, PythonGroup(works="future", elsewhere=True), rank))


@pytest.mark.parametrize("program", ["plain", "static graph", "unused", "no_sync", "own hook"])
@on_ranks(2)
def test_works_whose_wait_takes_nothing(rank: int, size: int, program: str) -> None:
    """Better than torch, whose constructor fails: works with ``wait(self)`` do."""
    with pytest.raises(TypeError, match="wait"):
        PROGRAMS[program](TorchDDP, PythonGroup(works="plain"), rank)
    expected = PROGRAMS[program](Ours, PythonGroup(works="timeout"), rank)
    assert_same(PROGRAMS[program](Ours, PythonGroup(works="plain"), rank), expected)


@on_ranks(2)
def test_delayed_parameters(rank: int, size: int) -> None:
    """Better than torch, which does not wait for their all_reduce: delayed parameters are averaged as over Gloo."""
    expected = _delayed(Ours, None, rank)
    for works in WORKS:
        assert_same(_delayed(Ours, PythonGroup(works=works), rank), expected)


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
@on_ranks(2)
def test_built_in_hooks(rank: int, size: int, kind: str) -> None:
    """Better than torch, whose hooks in C++ refuse a list in a future of Python: the built-in hooks average."""

    def trained(group: Any) -> Any:
        model = Ours(Net(), process_group=group)
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
        return _trained(model, rank)

    assert_same(trained(PythonGroup()), trained(None))
    assert_same(trained(PythonGroup(works="future", elsewhere=True)), trained(None))


@on_ranks(2)
def test_construction_without_init_sync_sends_nothing(rank: int, size: int) -> None:
    """init_sync=False makes no collective; a backward then asks the works for their futures."""

    def program(cls: type) -> Any:
        group = PythonGroup()
        model = cls(Net(), process_group=group, init_sync=False)
        at_construction = [list(group.called), group.waited, group.futures]
        model(samples(rank, 0)).sum().backward()
        return [at_construction, group.futures > 0, group.waited > 0]

    assert same_as_torch(program) == [[[], 0, 0], True, True]


@on_ranks(4)
def test_members_tell_each_other_who_they_are(rank: int, size: int) -> None:
    """A group of some of the ranks knows which; models of groups that share no rank have different numbers."""
    halves = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    group = PythonGroup(halves[rank % 2])
    model = Ours(Net(), process_group=group)
    _trained(model, rank)
    assert process_groups.global_ranks(group) == [[0, 2], [1, 3]][rank % 2]
    ids = everywhere(model.model_id)
    assert ids[0] == ids[2] != ids[1] == ids[3]


@on_ranks(2)
def test_different_models_are_refused(rank: int, size: int) -> None:
    """Over such a group, too, models that differ are named at construction, on all ranks."""
    with pytest.raises(RuntimeError, match="same model across all ranks") as caught:
        Ours(nn.Linear(4, 4 + rank), process_group=PythonGroup(works="plain"))
    assert everywhere(str(caught.value)) == [str(caught.value)] * 2
    assert "rank 1: parameter 'weight' of shape [5, 4]" in str(caught.value)


@on_ranks(2)
def test_a_model_that_changes(rank: int, size: int) -> None:
    """A module replaced after wrapping is adopted, although the group has no store to agree through."""

    def trained(group: Any) -> Any:
        model = Ours(Net(), process_group=group)
        _trained(model, rank)
        model.module.last = nn.Linear(8, 4)
        with pytest.warns(UserWarning, match="last"):
            model(samples(rank, 5)).sum().backward()
        return [state_of(model), model.sync_gradients()]

    torch.manual_seed(5)
    expected = trained(None)
    torch.manual_seed(5)
    assert_same(trained(PythonGroup()), expected)


@on_ranks(2)
def test_what_needs_a_store_says_so(rank: int, size: int) -> None:
    """check_hook and changes from the notebook name the group and the remedy; reconfigure() works."""
    group = PythonGroup()
    model = Ours(Net(), process_group=group)
    texts = []
    for act in (
        lambda: check_hook(allreduce_hook, process_group=group),
        lambda: model._live.prepare("a change", Change(bucket_cap_mb=1.0)),
    ):
        with pytest.raises(RuntimeError, match="no store") as caught:
            act()
        texts.append(str(caught.value))
    model.reconfigure(bucket_cap_mb=1.0)  # on all ranks at once: by collectives
    _trained(model, rank)
    assert all("PythonGroup" in text and "new_group" in text for text in texts)


class _Failing(PythonGroup):
    """Its next all_reduce fails, when somebody waits for it."""

    fails = False

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        work = super().allreduce(tensors, options)
        if self.fails:
            self.fails = False
            work.future = Future()
            work.future.set_exception(ConnectionError("the link is down"))
        return work


@on_ranks(2)
def test_a_collective_that_fails(rank: int, size: int) -> None:
    """What a work's future failed with is raised by the backward; the next one trains."""
    group = _Failing()
    model = Ours(Net(), process_group=group)
    expected = _trained(model, rank)
    group.fails = True
    with pytest.raises((RuntimeError, ConnectionError), match="the link is down"):
        model(samples(rank, 9)).sum().backward()
    model.load_state_dict({name: value for name, value in expected[0].items() if "gradient" not in name})
    _trained(model, rank)


def _joined(cls: type, group: Any, rank: int, divide_by_initial: bool) -> Any:
    model = cls(Net(), process_group=group)
    states = _trained(model, rank)
    with model.join(divide_by_initial_world_size=divide_by_initial):
        for step in range(2 + rank):
            model.zero_grad()
            model(samples(rank, step)).square().sum().backward()
    return [states, state_of(model)]


@on_ranks(2)
def test_a_registered_group(rank: int, size: int) -> None:
    """A group that new_group made by a backend written in Python trains and joins as with torch's class."""
    name = "written_in_python"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, lambda *_: PythonGroup(works="optional"), devices=["cpu"])
    group = dist.new_group(backend=name)
    assert isinstance(group, PythonGroup)
    same_as_torch(lambda cls: _joined(cls, group, rank, True))
    assert_same(_joined(Ours, group, rank, False), _joined(Ours, None, rank, False))  # torch's class hangs
    dist.destroy_process_group(group)


@on_ranks(1)
def test_without_a_default_group(rank: int, size: int, tmp_path: Path) -> None:
    """A process that has no default group trains with a group of its own, as with torch's class."""
    with outside(rank, size, str(tmp_path)):
        assert not dist.is_initialized()
        inner = dist.ProcessGroup(dist.HashStore(), 0, 1)
        backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        for program in ("plain", "views", "unused", "no_sync", "own hook"):
            made = [PROGRAMS[program](cls, PythonGroup(inner), 0) for cls in (TorchDDP, Ours)]
            assert_same(made[1], made[0], program)
