"""Copies between CPU devices, their derivatives, and replicas."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from ddp_lab.parallel.data_parallel.copies import (
    broadcast,
    broadcast_coalesced,
    gather,
    reduce_add,
    reduce_add_coalesced,
    scatter,
)
from ddp_lab.parallel.data_parallel.functions import Broadcast, Gather, ReduceAddCoalesced, Scatter
from ddp_lab.parallel.data_parallel.replicate import replicate

TWO = ["cpu:0", "cpu:1"]


def _sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)


# -- broadcast


def test_broadcast_shares_with_the_first_device_only() -> None:
    """Broadcast: the first device has the tensor itself, each other one an equal copy of its own; `out` is filled."""
    for tensor in (torch.randn(3, 2), torch.randn(2, dtype=torch.complex64), torch.tensor(5), _sparse()):
        first, second, third = broadcast(tensor, ["cpu"] * 3)
        assert first is tensor
        assert second is not third
        assert second.dtype == tensor.dtype
        torch.testing.assert_close((second, third), (tensor, tensor))
    first, second = broadcast(ones := torch.ones(2), TWO)
    second.zero_()
    assert ones.tolist() == [1, 1]
    out = [torch.empty(2, 2), torch.empty(2, 2)]
    results = broadcast(torch.ones(2, 2), out=out)
    assert all(result is target for result, target in zip(results, out, strict=True))
    assert all((target == 1).all() for target in out)


def test_broadcast_coalesced_keeps_order_layout_and_version_counters() -> None:
    """Broadcast coalesced: any dtypes and layouts, in order; writing to one leaves the others' versions alone."""
    tensors = [
        torch.randn(2),
        _sparse(),
        torch.arange(3),
        torch.randn(1, 2, 2, 2).to(memory_format=torch.channels_last),
    ]
    rows = broadcast_coalesced(tensors, TWO, buffer_size=8)
    assert all(mine is theirs for mine, theirs in zip(rows[0], tensors, strict=True))
    torch.testing.assert_close(rows[1], tensors)
    assert rows[1][3].is_contiguous(memory_format=torch.channels_last)
    rows[1][0].add_(1)
    assert [t._version for t in rows[1] if not t.is_sparse] == [1, 0, 0]
    with pytest.raises(RuntimeError, match=r"all tensors must be on devices\[0\]"):
        broadcast_coalesced([torch.ones(1, device="meta")], TWO)


# -- reduce_add


def test_reduce_add_sums() -> None:
    """Reduce-add: the sum of dense, complex or sparse tensors; a single one is returned; inputs are unchanged."""
    for tensor in (torch.randn(3), torch.randn(2, dtype=torch.complex128), _sparse()):
        inputs = [tensor, tensor * 2, tensor * 3]
        total = reduce_add(inputs, "cpu:0")
        torch.testing.assert_close(total, tensor * 6)
        assert total.is_sparse == tensor.is_sparse
        torch.testing.assert_close(inputs[0], tensor)
    assert reduce_add([tensor]) is tensor


def test_reduce_add_coalesced_sums_each_position() -> None:
    """Reduce-add coalesced: sparse where all are sparse, dense where some are; other numbers of tensors are refused."""
    rows = [[torch.ones(2), _sparse(), _sparse()], [torch.ones(2), _sparse(), _sparse().to_dense()]]
    dense, sparse, mixed = reduce_add_coalesced(rows, buffer_size=1)
    assert dense.tolist() == [2, 2]
    assert sparse.is_sparse
    assert sparse.to_dense().tolist() == mixed.tolist() == [2, 0, 4, 0]
    with pytest.raises(ValueError, match="shorter"):
        reduce_add_coalesced([[torch.ones(1)] * 2, [torch.ones(1)]])


# -- scatter


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("sizes", [None, [1, 3], [4, 0]])
def test_scatter_gives_the_pieces(dim: int, sizes: list[int] | None) -> None:
    """Scatter: equal pieces or those of chunk_sizes, along any dimension; the first is a view; out is filled."""
    x = torch.randn(4, 4)
    expected = x.chunk(2, dim) if sizes is None else x.split(sizes, dim)
    pieces = scatter(x, TWO, sizes, dim)
    torch.testing.assert_close(pieces, expected)
    assert pieces[0].data_ptr() == x.data_ptr()
    assert pieces[1].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    out = [torch.empty_like(piece) for piece in expected]
    assert all(a is b for a, b in zip(scatter(x, dim=dim, out=out), out, strict=True))
    torch.testing.assert_close(tuple(out), expected)


# -- gather


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_joins(dim: int) -> None:
    """Gather: joined along any dimension, to a destination or into `out`, complex and channels-last as they are."""
    x = torch.randn(4, 4, dtype=torch.complex64)
    pieces = x.split([1, 3], dim)
    for destination in (None, "cpu", torch.device("cpu", 1)):
        torch.testing.assert_close(gather(pieces, dim, destination), x)
    out = torch.empty_like(x)
    assert gather(pieces, dim, out=out) is out
    torch.testing.assert_close(out, x)
    last = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
    assert gather([last, last], 0).is_contiguous(memory_format=torch.channels_last)


X, OUT, PAIR = torch.ones(4, 4), [torch.empty(2, 4), torch.empty(2, 4)], [torch.ones(2, 3), torch.ones(2, 3)]
VECTOR = torch.ones(2)
REFUSED: dict[str, Callable[[], Any]] = {
    "Exactly one of 'devices' and 'out' must": lambda: broadcast(VECTOR),
    "Exactly one of 'devices' and 'out' must be": lambda: broadcast(VECTOR, devices=TWO, out=[VECTOR]),
    r"same shape as the source tensor .* at index 1": lambda: broadcast(VECTOR, out=[VECTOR, torch.ones(1, 2)]),
    "be CPU tensors, but output tensor at index 1": lambda: broadcast(VECTOR, out=[VECTOR, VECTOR.to("meta")]),
    "Exactly one of 'devices' and 'out'": lambda: scatter(X),
    "Expected at least one device to scatter to": lambda: scatter(X, devices=[]),
    "to be of same length, but got .* = 2 .* = 3": lambda: scatter(X, devices=TWO, chunk_sizes=[1, 1, 2]),
    "split_with_sizes|split_sizes": lambda: scatter(X, devices=TWO, chunk_sizes=[1, 1]),
    "'devices' must not be specified when 'out' is specified": lambda: scatter(X, devices=TWO, out=OUT),
    "'chunk_sizes' must not be specified when 'out' is specified": lambda: scatter(X, chunk_sizes=[2, 2], out=OUT),
    "Expected at least one output tensor to scatter to": lambda: scatter(X, out=[]),
    "Output tensor at index 0 has incorrect shape": lambda: scatter(X, out=[OUT[0].unsqueeze(0), OUT[1]]),
    "Output tensor at index 1 has incorrect shape": lambda: scatter(X, out=[OUT[0], torch.empty(2, 3)]),
    "output tensors along scatter dim 0 does not match": lambda: scatter(X, out=[OUT[0][1:], OUT[1]]),
    "output tensor at index 1 has device 'meta'": lambda: scatter(X, out=[OUT[0], OUT[1].to("meta")]),
    "Expected at least one tensor to gather from": lambda: gather([]),
    "'destination' must not be specified when 'out'": lambda: gather(PAIR, destination="cpu", out=torch.ones(4, 3)),
    "of dimensions, but tensor at index 1 has 1 dimensions": lambda: gather([PAIR[0], VECTOR]),
    r"invalid shape \[2, 4\], but expected \[2, 3\]": lambda: gather([PAIR[0], torch.ones(2, 4)]),
    r"out tensor to have shape \[4, 3\], but got \[3, 3\]": lambda: gather(PAIR, out=torch.ones(3, 3)),
    "to be CUDA tensors, but input tensor at index 0": lambda: gather(PAIR, destination=0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_doesnt_fit_is_refused(message: str) -> None:
    """Argument errors of broadcast, scatter and gather are torch's RuntimeErrors."""
    with pytest.raises(RuntimeError, match=message):
        REFUSED[message]()


def test_reduce_add_refuses_other_sizes_and_devices() -> None:
    """Reduce-add's argument errors: sizes that differ (ValueError), CPU tensors for a GPU (AssertionError), nothing."""
    with pytest.raises(ValueError, match="input 1 has invalid size: got 1x2, but expected 2"):
        reduce_add([VECTOR, torch.ones(1, 2)])
    with pytest.raises(AssertionError, match="expects all inputs to be on GPUs, but input 0 is on CPU"):
        reduce_add([VECTOR, VECTOR], 0)
    with pytest.raises(ValueError, match="at least one tensor"):
        reduce_add([])


# -- derivatives


def _doubles(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda a, b: Broadcast.apply(TWO, a, b), _doubles((2,), (3, 1))),
        (
            lambda a, b, c, d: ReduceAddCoalesced.apply(torch.device("cpu", 0), 2, a, b, c, d),
            _doubles((2,), (1,), (2,), (1,)),
        ),
        (lambda a: Scatter.apply(["cpu"] * 3, None, 0, a), _doubles((5, 2))),
        (lambda a: Scatter.apply(TWO, [1, 3], -1, a), _doubles((2, 4))),
        (lambda a, b: Gather.apply("cpu", 1, a, b), _doubles((2, 1), (2, 3))),
    ],
    ids=["broadcast", "reduce_add", "scatter", "scatter_sizes", "gather"],
)
def test_first_and_second_derivatives(function: Any, inputs: Any) -> None:
    """Autograd functions: first and second derivatives agree with finite differences."""
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def test_derivatives_of_scalars_and_complex_tensors() -> None:
    """Gather of scalars and broadcast of complex tensors have the right derivatives too; copies of tensors that need no
    gradient need none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Was asked to gather")
        assert gradcheck(lambda a, b: Gather.apply("cpu", 0, a, b), _doubles((), ()))
    x = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    assert gradcheck(lambda a: Broadcast.apply(TWO, a), (x,))
    assert gradcheck(lambda a: Scatter.apply(TWO, None, 0, a), (x,))
    a, b = torch.ones(2, requires_grad=True), torch.ones(2)
    copies = Broadcast.apply(["cpu"] * 3, a, b)
    assert [copy.requires_grad for copy in copies] == [True, False] * 3
    sum((copy * (i + 1)).sum() for i, copy in enumerate(copies[::2])).backward()
    assert a.grad.tolist() == [6, 6]
    assert Broadcast.apply(TWO) == ()


# -- replicas


def test_replicas_are_modules_of_their_own() -> None:
    """Replicate: equal outputs, parameters that are no leaves, `_former_parameters`, modules shared as before."""
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    net.append(net[0])
    net[0].register_module("nothing", None)
    replicas = replicate(net, TWO)
    x = torch.randn(2, 3)
    for replica in replicas:
        assert replica[0] is replica[2]
        assert replica[0] is not net[0]
        assert list(replica.parameters()) == []
        assert replica[0].nothing is None
        assert set(replica[0]._former_parameters) == {"weight", "bias"}
        assert not replica[0].weight.is_leaf
        torch.testing.assert_close(replica(x), net(x))
    assert replicas[0][0].weight.data_ptr() == net[0].weight.data_ptr()
    assert replicas[1][0].weight.data_ptr() != net[0].weight.data_ptr()
    assert replicate(net, []) == []


def test_detached_replicas_have_no_graph() -> None:
    """Replicate with detach: no copy leads back to the module, buffers that need gradients included; replicas pass
    through torch.save, detached or not."""
    net = nn.Linear(2, 2)
    net.register_buffer("extra", torch.ones(1, requires_grad=True))
    _, second = replicate(net, TWO, detach=True)
    assert not second.weight.requires_grad
    assert not second.extra.requires_grad
    for detach in (False, True):
        torch.save(replicate(nn.Linear(2, 2), TWO, detach), io.BytesIO())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
def test_script_modules() -> None:
    """Replicate: a ScriptModule runs on each device; one with a Python module below it raises torch's RuntimeError."""
    script = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    x = torch.randn(3, 2)
    for network in (script, nn.Sequential(script)):
        for replica in replicate(network, TWO):
            torch.testing.assert_close(replica(x), network(x))

    class Python(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    mixed = torch.jit.script(nn.Sequential(nn.ReLU()))
    mixed._modules._python_modules["0"] = Python()  # what older releases allowed to assign
    with pytest.raises(
        RuntimeError, match="Cannot replicate network where python modules are children of ScriptModule"
    ):
        replicate(nn.Sequential(mixed), TWO)


def test_modules_that_are_not_initialized_yet_are_refused() -> None:
    """Replicate: a lazy module raises torch's RuntimeError, which says to run a dummy forward first. Replicate calls
    `_replicate_for_data_parallel` of each module once for each device."""
    with pytest.raises(RuntimeError, match=r"[Uu]ninitialized parameters"):
        replicate(nn.Sequential(nn.LazyLinear(2)), TWO)
    made = []

    class Own(nn.Linear):
        def _replicate_for_data_parallel(self) -> Any:
            made.append(super()._replicate_for_data_parallel())
            return made[-1]

    assert replicate(Own(2, 2), ["cpu"] * 3) == made
