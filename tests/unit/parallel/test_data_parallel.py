"""DataParallel and data_parallel on CPU devices: constructor, forward, what is kept and what is lost."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

import ddp_lab
from ddp_lab import DataParallel, data_parallel
from ddp_lab.parallel.data_parallel import imbalance

TWO = ["cpu:0", "cpu:1"]
without_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _batch(samples: int = 7) -> torch.Tensor:
    return torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Seen(nn.Module):
    """Notes what each replica was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((threading.current_thread().name, inputs, kwargs))
        return inputs[0] if inputs else torch.ones(1)


# -- constructor


@without_accelerator
@pytest.mark.parametrize("device_ids", [None, [0, 1], []])
def test_without_accelerator_the_module_is_called_as_it_is(device_ids: Any) -> None:
    """Constructor: no accelerator and no CPU devices named is a pass-through with `device_ids == []`, as in torch."""
    module = Seen()
    model = DataParallel(module, device_ids)
    x = _batch()
    assert model(x, flag=1) is x
    assert model.device_ids == nn.DataParallel(Seen(), device_ids).device_ids == []
    assert module.calls == [("MainThread", (x,), {"flag": 1})]


def test_is_torchs_class_with_torchs_signature() -> None:
    """`isinstance(model, torch.nn.DataParallel)` holds, and the constructor takes what torch's takes."""
    assert isinstance(DataParallel(_net(), TWO), nn.DataParallel)
    assert inspect.signature(DataParallel.__init__) == inspect.signature(nn.DataParallel.__init__)
    assert list(inspect.signature(data_parallel).parameters) == list(
        inspect.signature(nn.parallel.data_parallel).parameters
    )
    assert ddp_lab.DataParallel is DataParallel


@pytest.mark.parametrize(
    ("device_ids", "expected"),
    [
        (["cpu:0", "cpu:1"], [0, 1]),
        ([torch.device("cpu", 3), torch.device("cpu", 1)], [3, 1]),
        (["cpu"] * 3, [0, 1, 2]),
        (("cpu",), [0]),
    ],
)
def test_cpu_devices_by_name_or_object(device_ids: Any, expected: list[int]) -> None:
    """CPU devices are strings or torch.devices; those without an index are numbered by position."""
    model = DataParallel(_net(), device_ids)
    assert model.device_ids == [torch.device("cpu", index) for index in expected]
    assert model.output_device == model.device_ids[0]
    assert model.src_device_obj == torch.device("cpu")


def test_devices_that_dont_fit() -> None:
    """A list with both kinds of device is refused with a ValueError that shows it. Balance check: under 75 % of another
    device's memory, or else cores, names both; memory comes first."""
    with pytest.raises(ValueError, match="CPU devices and accelerators can't be used together"):
        DataParallel(_net(), ["cpu:0", 1])
    assert imbalance([(80, 100), (80, 100)]) is None
    assert imbalance([(80, 100), (60, 75)]) is None
    assert imbalance([(80, 100), (59, 100), (80, 10)]) == (1, 0)
    assert imbalance([(80, 70), (80, 100)]) == (0, 1)


# -- forward and backward


@pytest.mark.parametrize("samples", [8, 7, 3, 2, 1, 0])
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_outputs_and_gradients_are_the_modules_own(devices: int, samples: int) -> None:
    """Forward: an even, an uneven, a too small or an empty batch gives the module's outputs and gradients of the whole
    batch."""
    module, x = _net(), _batch(samples)
    expected_x, given_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = module(expected_x)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()

    out = DataParallel(module, ["cpu"] * devices)(given_x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], gradients)
    torch.testing.assert_close(given_x.grad, expected_x.grad)


def test_which_thread_runs_what() -> None:
    """Forward: as many threads as chunks, none of them the caller's; without arguments, or with one device, the module
    itself is called in the caller's thread."""
    module = Seen()
    DataParallel(module, ["cpu"] * 4)(torch.arange(3.0))
    seen = sorted((name, inputs[0].item()) for name, inputs, _ in module.calls)
    assert seen == [("replica-0", 0), ("replica-1", 1), ("replica-2", 2)]
    for call in (lambda module: DataParallel(module, TWO)(), lambda module: data_parallel(module, None, TWO)):
        module = Seen()
        assert call(module).tolist() == [1]
        assert module.calls == [("MainThread", (), {})]
    module = Seen()
    DataParallel(module, ["cpu"])(torch.ones(2), name="x")
    [(thread, _, keywords)] = module.calls
    assert (thread, keywords) == ("MainThread", {"name": "x"})


def test_a_module_on_another_device_is_refused_by_name() -> None:
    """Forward: a parameter or buffer elsewhere raises torch's RuntimeError, with its name and the remedy."""
    net = _net()
    net[2].bias = nn.Parameter(torch.empty(3, device="meta"))
    for call in (DataParallel(net, TWO), lambda x: data_parallel(net, x, TWO)):
        with pytest.raises(RuntimeError, match=r"module must have its parameters and buffers on device cpu .*2\.bias"):
            call(_batch())


def test_dim_and_output_device() -> None:
    """Scatter and gather along `dim`: an RNN with its batch in dimension 1 gives the module's own outputs. Gather:
    `output_device=-1` stands for the CPU, with a FutureWarning that says what to write."""
    torch.manual_seed(0)
    rnn = nn.LSTM(5, 4)
    x = torch.randn(9, 6, 5)
    out, (hidden, cell) = DataParallel(rnn, TWO, dim=1)(x)
    expected, (expected_hidden, expected_cell) = rnn(x)
    torch.testing.assert_close((out, hidden, cell), (expected, expected_hidden, expected_cell))
    with pytest.warns(FutureWarning, match='Using -1 to represent CPU tensor is deprecated.*"cpu"'):
        assert DataParallel(_net(), TWO, output_device=-1)(_batch()).device.type == "cpu"


def test_without_grad_replicas_are_detached() -> None:
    """Replicate detached if no grad: outputs under no_grad need no gradient, and grad mode is off in each replica."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            assert torch.is_inference_mode_enabled() == inference
            return super().forward(x)

    module, x = Layer(6, 2), torch.randn(4, 6)
    expected = nn.functional.linear(x, module.weight, module.bias)
    for inference in (False, True):
        with torch.inference_mode() if inference else torch.no_grad():
            out = DataParallel(module, TWO)(x)
        assert not out.requires_grad
        torch.testing.assert_close(out, expected.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_the_callers_in_each_replica(dtype: torch.dtype) -> None:
    """Parallel apply: autocast and its dtype are copied into the replicas' threads, off is off, and autocast that the
    module's own forward enters holds for the replica alone."""

    class Inside(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    model, x = DataParallel(nn.Linear(6, 2), TWO), torch.randn(4, 6)
    assert DataParallel(Inside(6, 2), TWO)(x).dtype == torch.bfloat16
    assert model(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        assert model(x).dtype == dtype
        with torch.autocast("cpu", enabled=False):
            assert model(x).dtype == torch.float32
    assert model(x).dtype == torch.float32


def test_a_gradient_penalty_and_cycles() -> None:
    """Backward of a backward: a gradient penalty's gradients are those of the plain module. Replicas are freed with the
    last reference: a forward and backward leave nothing for the garbage collector."""
    module, x = _net(), _batch(4)
    results = []
    for model in (module, DataParallel(module, TWO)):
        module.zero_grad()
        point = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(point).sum(), point, create_graph=True)
        slope.square().mean().backward()
        results.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()])
    torch.testing.assert_close(*results)
    model, x = DataParallel(_net(), TWO), _batch()
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        model(x).sum().backward()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_shared_frozen_complex_and_sparse_parameters() -> None:
    """Replicate: parameters that are shared, frozen, complex, channels-last or sparse in their gradients."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 4, sparse=True)
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)
            self.two.weight = self.one.weight
            self.fixed = nn.Linear(4, 4).requires_grad_(False)
            self.twist = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            y = self.fixed(self.two(self.one(self.table(words).mean(1))))
            return (y * self.twist).abs().sum(1) + self.conv(y.view(-1, 1, 2, 2).expand(-1, 2, 2, 2)).sum((1, 2, 3))

    torch.manual_seed(0)
    module = Odd()
    words = torch.randint(11, (6, 3))
    wrapped = copy.deepcopy(module)
    module(words).sum().backward()
    DataParallel(wrapped, ["cpu"] * 3)(words).sum().backward()
    for (name, mine), theirs in zip(wrapped.named_parameters(), module.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
            continue
        assert mine.grad.is_sparse == theirs.grad.is_sparse, name
        torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense(), msg=name)
    assert wrapped.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_exceptions_name_replica_and_device() -> None:
    """Parallel apply: a replica's exception keeps its class, says where it came from, and has the original as cause;
    one whose class has another constructor arrives as a RuntimeError that names it."""

    class OddError(Exception):
        def __init__(self, code: int, reason: str) -> None:
            super().__init__(f"{code}: {reason}")

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x[0] >= 3:
                raise KeyError("wonderful")
            if x[0] < 0:
                raise OddError(7, "because")
            return x

    model = DataParallel(Fails(), TWO)
    words = r"Caught KeyError in replica 1 on device cpu:1\.\nOriginal Traceback[\s\S]+wonderful"
    with pytest.raises(KeyError, match=words) as caught:
        model(torch.arange(6.0))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.args == ("wonderful",)
    with pytest.raises(RuntimeError, match=r"Caught OddError in replica 0 on device cpu:0[\s\S]+7: because"):
        model(-torch.ones(4))


# -- what remains and what is lost


def test_attributes_set_in_forward_are_lost() -> None:
    """Documented loss: a counter in the module stays where it was; in-place writes of the first replica remain, as
    BatchNorm's statistics of the first device's samples do."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.total += x.sum()
            return x

    module = Counts()
    model = DataParallel(module, TWO)
    model(torch.tensor([1.0, 2.0, 30.0, 40.0]))
    model(torch.tensor([4.0, 50.0]))
    assert (module.count, module.total.item()) == (0, 7)
    norm, alone, x = nn.BatchNorm1d(4), nn.BatchNorm1d(4), torch.randn(9, 4)
    DataParallel(norm, TWO)(x)
    alone(x[:5])
    torch.testing.assert_close(norm.state_dict(), alone.state_dict())


def test_hooks_and_zero_grad_in_replicas() -> None:
    """Documented: forward and backward hooks of the module run once for each replica. Replicate: zero_grad inside a
    replica warns that it has no effect, as torch's replicas do."""
    module = nn.Linear(3, 3)
    forwards: list[int] = []
    backwards: list[int] = []
    module.register_forward_hook(lambda m, inputs, output: forwards.append(len(output)))
    module.register_full_backward_hook(lambda m, before, after: backwards.append(len(after[0])))
    DataParallel(module, ["cpu"] * 3)(torch.randn(7, 3, requires_grad=True)).sum().backward()
    assert sorted(forwards) == sorted(backwards) == [1, 3, 3]

    class Zeroes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.zero_grad()
            return x

    with pytest.warns(UserWarning, match=r"Calling \.zero_grad\(\) from a module created with nn\.DataParallel\(\)"):
        DataParallel(Zeroes(3, 3), TWO)(torch.ones(4, 3))


def test_buffers_that_need_gradients_get_them() -> None:
    """Replicate: buffers that require grad are copied by autograd apart from the others."""

    class Buffers(nn.Module):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("trained", value)
            self.register_buffer("fixed", value.detach().clone())
            self.register_buffer("missing", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.missing is None
            return x * self.trained + self.fixed

    module = Buffers(torch.randn(5, dtype=torch.float64, requires_grad=True))
    x = torch.randn(2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda _: DataParallel(module, TWO)(x), (module.trained,))


def test_saving_copying_pickling() -> None:
    """State dicts have the prefix `module.`; deepcopy, pickle and torch.save keep devices and parameters."""
    model, x = DataParallel(_net(), TWO), _batch()
    assert all(name.startswith("module.") for name in model.state_dict())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert twin.device_ids == model.device_ids
        torch.testing.assert_close(twin(x), model(x))


def test_the_methods_can_be_overridden() -> None:
    """forward goes through scatter, replicate, parallel_apply and gather, so a subclass can replace each."""
    names, seen = ["scatter", "replicate", "parallel_apply", "gather"], []

    def traced(name: str) -> Any:
        return lambda self, *args: seen.append(name) or getattr(DataParallel, name)(self, *args)

    model = type("Traced", (DataParallel,), {name: traced(name) for name in names})(_net(), TWO)
    assert len(model(_batch(4))) == 4
    assert seen == names


# -- the function


@pytest.mark.parametrize("device_ids", [["cpu"], TWO, ["cpu"] * 3])
def test_the_function_gives_what_the_module_gives(device_ids: list[str]) -> None:
    """data_parallel(): one argument or a tuple of them, with keyword arguments, on one or several devices."""

    class Sum(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor, factor: float, bias: Any = None) -> torch.Tensor:
            return factor * super().forward(x * y) + (0 if bias is None else bias)

    module = Sum(4, 2)
    x, y, bias = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4), torch.randn(5, 2)
    for kwargs in ({}, {"bias": bias}):
        expected = torch.autograd.grad(module(x, y, 2.0, **kwargs).sum(), [x, *module.parameters()])
        out = data_parallel(module, (x, y, 2.0), device_ids, module_kwargs=kwargs or None)
        torch.testing.assert_close(out, module(x, y, 2.0, **kwargs))
        torch.testing.assert_close(torch.autograd.grad(out.sum(), [x, *module.parameters()]), expected)
    linear = nn.Linear(4, 2)
    torch.testing.assert_close(data_parallel(linear, x, device_ids, output_device="cpu"), linear(x))


@without_accelerator
def test_the_function_needs_devices() -> None:
    """data_parallel(): without accelerator and CPU devices it raises torch's RuntimeError, with the remedy."""
    with pytest.raises(RuntimeError, match=r"device type could not be determined.*CPU devices"):
        data_parallel(_net(), _batch())
