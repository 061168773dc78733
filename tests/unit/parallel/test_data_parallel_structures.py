"""What DataParallel splits and joins: containers of tensors; and what runs the replicas."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ddp_lab import DataParallel
from ddp_lab.parallel.data_parallel.parallel_apply import parallel_apply
from ddp_lab.parallel.data_parallel.scatter_gather import gather, scatter, scatter_kwargs
from tests.waiting import DEADLINE_S

TWO = ["cpu:0", "cpu:1"]
Pair = collections.namedtuple("Pair", "first second")


class Typed(NamedTuple):
    value: torch.Tensor
    names: list[str]


class Attributes(dict[str, Any]):
    """A dict whose keys are attributes, as libraries' outputs are."""

    __getattr__ = dict.__getitem__


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    states: tuple[torch.Tensor, ...]
    cache: Any = None


# -- scatter


@pytest.mark.parametrize(
    ("length", "devices", "expected"), [(6, 2, [3, 3]), (7, 3, [3, 3, 1]), (4, 3, [2, 2]), (2, 4, [1, 1])]
)
def test_tensors_are_split_as_torch_chunks_them(length: int, devices: int, expected: list[int]) -> None:
    """Scatter: uneven lengths give a shorter last piece, and fewer pieces than devices are possible."""
    assert [len(piece) for piece in scatter(torch.arange(length), ["cpu"] * devices)] == expected


def test_containers_are_split_and_keep_their_class() -> None:
    """Scatter: tuples, named tuples, lists, dicts and their subclasses recursively, the rest by reference."""
    x = torch.arange(4)
    shared = object()
    ordered = collections.OrderedDict([("b", x), ("a", shared)])
    value = [x, (x, [x]), Pair(x, {"a": x}), Typed(x, ["n"]), ordered, Attributes(x=x), shared, "text", None, {}, ()]
    parts = scatter(value, TWO)
    assert len(parts) == 2
    for part, expected in zip(parts, ([0, 1], [2, 3]), strict=True):
        assert part[0].tolist() == part[1][0].tolist() == part[1][1][0].tolist() == expected
        assert isinstance(part[1], tuple)
        assert isinstance(part[2], Pair)
        assert part[2].second["a"].tolist() == expected
        assert isinstance(part[3], Typed)
        assert isinstance(part[4], collections.OrderedDict)
        assert list(part[4]) == ["b", "a"]
        assert part[4]["a"] is shared
        assert isinstance(part[5], Attributes)
        assert part[5].x.tolist() == expected
        assert part[6:9] == [shared, "text", None]
        assert part[9:] == [{}, ()]


def test_one_tensor_and_containers() -> None:
    """Scatter: the result's class is torch's, a tuple for a tensor and else a list; the first piece is the tensor's own
    memory, the others have memory of their own."""
    assert isinstance(scatter(torch.ones(4), TWO), tuple)
    assert isinstance(scatter((torch.ones(4),), TWO), list)
    assert isinstance(scatter(3, TWO), list)
    x = torch.zeros(4)
    first, second = scatter(x, TWO)
    first.add_(1)
    second.add_(1)
    assert x.tolist() == [1, 1, 0, 0]


def test_keyword_arguments_fill_up() -> None:
    """Kwargs padding: positional or keyword arguments alone are filled up with () or {}; without any both are empty."""
    x = torch.arange(4)
    inputs, kwargs = scatter_kwargs((x,), None, TWO)
    assert len(inputs) == 2
    assert kwargs == ({}, {})
    inputs, kwargs = scatter_kwargs((), {"x": x}, TWO)
    assert inputs == ((), ())
    assert [k["x"].tolist() for k in kwargs] == [[0, 1], [2, 3]]
    assert scatter_kwargs((), {}, TWO) == ((), ())


@pytest.mark.parametrize("empty", [[], {}, ()])
def test_empty_containers_in_keyword_arguments(empty: Any) -> None:
    """Kwargs: an empty list, dict or tuple beside tensors goes to each replica."""
    _, kwargs = scatter_kwargs((), {"batch": {"data": torch.randn(5, 3), "unused": empty}}, TWO)
    assert [one["batch"]["unused"] for one in kwargs] == [empty, empty]


def test_flags_beside_a_batch_of_one_sample_use_one_replica() -> None:
    """Uneven inputs: what has no tensors goes to as many devices as the tensors reach (torch fails). Uneven inputs:
    tensors that split into different numbers of pieces warn, since a part of them is left out."""

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor, flag: bool = False) -> torch.Tensor:
            assert flag
            return super().forward(x)

    net, x = Net(3, 2), torch.randn(1, 3)
    torch.testing.assert_close(DataParallel(net, TWO)(x, flag=True), net(x, True))
    inputs, kwargs = scatter_kwargs((True,), {"x": x}, TWO)
    assert (len(inputs), len(kwargs)) == (1, 1)
    with pytest.warns(UserWarning, match="different sizes in dimension 0.*surplus pieces are dropped"):
        inputs, _ = scatter_kwargs((torch.ones(4), torch.ones(1)), None, TWO)
    assert len(inputs) == 1


def test_what_doesnt_fit_is_refused() -> None:
    """Scatter of a tensor without dimensions, gather of dicts with other keys (which are named) or of lists of other
    lengths: torch's errors."""
    with pytest.raises(RuntimeError, match="at least a 1-dimensional tensor"):
        scatter(torch.tensor(1.0), TWO)
    with pytest.raises(ValueError, match=r"All dicts must have the same number of keys.*replica 1.*'b'"):
        gather([{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}], "cpu")
    with pytest.raises(ValueError, match="longer"):
        gather([[torch.ones(1)], [torch.ones(1)] * 2], "cpu")


# -- gather


def test_containers_are_joined_and_keep_their_class() -> None:
    """Gather: tensors, None, tuples, named tuples, lists, dicts, dict subclasses and dataclasses recursively."""

    def output(offset: int) -> list[Any]:
        x = torch.arange(2) + offset
        ordered = collections.OrderedDict([("b", x), ("a", x)])
        return [x, None, (x, [x]), Pair(x, {"a": x}), ordered, Attributes(x=x), Output(x, (x, x))]

    joined = gather([output(0), output(2)], "cpu")
    expected = [0, 1, 2, 3]
    assert joined[0].tolist() == expected
    assert joined[1] is None
    assert isinstance(joined[2], tuple)
    assert joined[2][1][0].tolist() == expected
    assert isinstance(joined[3], Pair)
    assert joined[3].second["a"].tolist() == expected
    assert isinstance(joined[4], collections.OrderedDict)
    assert list(joined[4]) == ["b", "a"]
    assert isinstance(joined[5], Attributes)
    assert isinstance(joined[6], Output)
    assert joined[6].states[1].tolist() == expected
    assert joined[6].cache is None


@pytest.mark.parametrize("value", [3, 2.5, "text", object()])
def test_what_cant_be_joined_is_named(value: Any) -> None:
    """Gather: anything else raises a TypeError that names its class (torch recurses forever on a string)."""
    with pytest.raises(TypeError, match=type(value).__name__):
        gather([{"x": value}, {"x": value}], "cpu")


def test_scalars_become_a_vector_with_a_warning() -> None:
    """Gather: 0-dimensional outputs give one element for each device, with torch's warning, and gradients flow back."""
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    with pytest.warns(UserWarning, match="all input tensors were scalars; will instead unsqueeze and return a vector"):
        joined = gather(losses, "cpu")
    assert joined.tolist() == [1, 2]
    joined.backward(torch.tensor([3.0, 4.0]))
    assert [loss.grad.item() for loss in losses] == [3, 4]


@settings(max_examples=100)
@given(
    structure=st.recursive(
        st.lists(st.integers(1, 3), min_size=0, max_size=2),  # the shape after the batch's dimension
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
        ),
        max_leaves=6,
    ),
    samples=st.integers(1, 9),
    devices=st.integers(1, 5),
)
def test_gather_undoes_scatter(structure: Any, samples: int, devices: int) -> None:
    """Whatever the structure, sizes and devices, what scatter splits gather joins to the same tensors."""

    def build(node: Any) -> Any:
        if isinstance(node, list):
            return torch.randn(samples, *node)
        return {k: build(v) for k, v in node.items()} if isinstance(node, dict) else tuple(build(v) for v in node)

    value = build(structure)
    parts = scatter(value, ["cpu"] * devices)
    torch.testing.assert_close(gather(parts, "cpu"), value, rtol=0, atol=0)


# -- parallel_apply


def test_arguments_and_devices() -> None:
    """Parallel apply: an input is a tuple or list of arguments or a single one; devices may be left to the tensors, the
    first of which may be inside containers."""
    modules = [nn.Linear(3, 2), nn.Linear(3, 2)]
    x = [torch.randn(4, 3), torch.randn(5, 3)]
    expected = [module(value) for module, value in zip(modules, x, strict=True)]
    for inputs in (x, [(value,) for value in x], [[value] for value in x]):
        for devices in (None, TWO, [None, "cpu"]):
            torch.testing.assert_close(parallel_apply(modules, inputs, None, devices), expected)

    class Takes(nn.Module):
        def forward(self, value: Any, more: Any) -> torch.Tensor:
            return more["x"][0] + 1

    assert parallel_apply([Takes()], [(3, {"x": [torch.ones(1)]})])[0].item() == 2


def test_different_lengths_are_refused() -> None:
    """Parallel apply: lists of different lengths raise torch's AssertionErrors; a replica without a device or a tensor
    to take it from is named."""
    modules, x = [nn.Identity(), nn.Identity()], [torch.ones(1)] * 2
    with pytest.raises(AssertionError, match="number of modules 2 is not equal to the number of inputs 1"):
        parallel_apply(modules, x[:1])
    with pytest.raises(AssertionError, match="number of modules 2 is not equal to the number of kwargs_tup 1"):
        parallel_apply(modules, x, [{}])
    with pytest.raises(AssertionError, match="number of modules 2 is not equal to the number of devices 3"):
        parallel_apply(modules, x, None, ["cpu"] * 3)
    with pytest.raises(RuntimeError, match="in replica 1, no device was provided and no tensor input was found"):
        parallel_apply([nn.Identity()] * 2, [torch.ones(1), None])


def test_one_module_runs_in_the_callers_thread() -> None:
    """Parallel apply: no thread is started for one module, and its exception says where it was. Parallel apply:
    replicas that wait for each other finish."""

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(threading.current_thread().name)

    with pytest.raises(ValueError, match=r"in replica 0 on device cpu:0[\s\S]+MainThread"):
        parallel_apply([Fails()], [torch.ones(1)])
    meeting = threading.Barrier(3, timeout=DEADLINE_S)

    class Meets(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            meeting.wait()
            return x

    assert len(parallel_apply([Meets()] * 3, [torch.ones(1)] * 3)) == 3
