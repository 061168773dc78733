"""DataParallel on CUDA devices: torch's results, on one device used twice and on all devices there are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.parallel import comm

from ddp_lab import DataParallel, data_parallel
from ddp_lab.parallel.data_parallel import copies
from ddp_lab.parallel.data_parallel.functions import Broadcast, Gather, ReduceAddCoalesced, Scatter
from tests.gpu.ranks import NEEDS_CUDA

pytestmark = NEEDS_CUDA

# One device may be named several times: then its replicas are copies of their own, as on several devices.
DEVICES = [[0], [0, 0], [0, 0, 0]] + ([list(range(torch.cuda.device_count()))] if torch.cuda.device_count() > 1 else [])


class Twist(nn.Module):
    """A complex parameter, a frozen one and a buffer that needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.twist = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.fixed = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("shift", torch.randn(6, device="cuda", requires_grad=True))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = x * self.twist
        return {"y": y, "parts": [y.abs() * self.fixed + self.shift, None]}


BUILD: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), (7, 6)),
    "norm": (lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9)), (8, 6)),
    "conv": (lambda: nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), (5, 3, 4, 4)),
    "twist": (Twist, (7, 6)),
}


def _sum(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.abs().square().sum()
    items = value.values() if isinstance(value, dict) else value
    return torch.stack([_sum(item) for item in items if item is not None]).sum()


@pytest.mark.parametrize("devices", DEVICES, ids=str)
@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("from_cpu", [False, True])
def test_outputs_gradients_and_buffers_are_torchs(name: str, devices: list[int], from_cpu: bool) -> None:
    """Forward and backward on GPUs: outputs, gradients, input gradients and buffers equal torch's DataParallel's."""
    build, shape = BUILD[name]
    torch.manual_seed(0)
    module = build().cuda()
    results = []
    for wrap in (DataParallel, nn.DataParallel):
        own = copy.deepcopy(module)
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to("cpu" if from_cpu else "cuda")
        x.requires_grad_()
        with warnings.catch_warnings():
            if wrap is nn.DataParallel:  # its threads, and its backward of a scatter from the CPU
                warnings.filterwarnings("ignore", "Attempting to run cuBLAS|Using -1")
            out = wrap(own, devices)(x)
            _sum(out).backward()
        gradients = [p.grad for p in own.parameters()] + [b.grad for b in own.buffers() if b.requires_grad]
        results.append((out, gradients, x.grad, own.state_dict()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("devices", DEVICES, ids=str)
def test_the_function_and_its_output_device(devices: list[int]) -> None:
    """data_parallel() on GPUs: the module's own output, on the device that was asked for."""
    module, x = nn.Linear(6, 2).cuda(), torch.randn(5, 6)
    for output_device in (None, 0, torch.device("cuda", 0)):
        out = data_parallel(module, x, devices, output_device)
        assert out.get_device() == 0
        torch.testing.assert_close(out, module(x.cuda()))


def test_default_devices_and_attributes() -> None:
    """Constructor on GPUs: all devices by default, with torch's attributes; one device moves the module there."""
    ours, torchs = DataParallel(nn.Linear(2, 2)), nn.DataParallel(nn.Linear(2, 2))
    for name in ("device_ids", "output_device", "src_device_obj", "dim"):
        assert getattr(ours, name) == getattr(torchs, name), name
    assert DataParallel(nn.Linear(2, 2), [0]).module.weight.is_cuda


def test_a_module_on_the_cpu_is_refused_by_name() -> None:
    """Forward on GPUs: a module that is not on device_ids[0] raises torch's RuntimeError."""
    for call in (DataParallel(nn.Linear(2, 2), [0, 0]), lambda x: data_parallel(nn.Linear(2, 2), x, [0, 0])):
        with pytest.raises(
            RuntimeError, match=r"module must have its parameters and buffers on device cuda:0 .*weight"
        ):
            call(torch.ones(2, 2))


def test_cpu_devices_work_beside_gpus() -> None:
    """CPU devices are used where they are named, also on a machine with GPUs."""
    module, x = nn.Linear(2, 2), torch.randn(4, 2)
    out = DataParallel(module, ["cpu:0", "cpu:1"])(x)
    assert out.device.type == "cpu"
    torch.testing.assert_close(out, module(x))


def test_modes_streams_and_exceptions() -> None:
    """Parallel apply on GPUs: grad mode, autocast and stream are the caller's; exceptions name the device."""
    stream = torch.cuda.Stream()

    class Checks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert torch.cuda.current_stream() == stream
            assert not torch.is_grad_enabled()
            assert x.sum() < 100, "too large"
            return super().forward(x)

    model = DataParallel(Checks(4, 4).cuda(), [0, 0])
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert model(torch.ones(4, 4, device="cuda")).dtype == torch.bfloat16
        with pytest.raises(AssertionError, match=r"in replica 0 on device 0[\s\S]+too large"):
            model(torch.full((4, 4), 100.0, device="cuda"))
    torch.cuda.synchronize()


def test_copies_are_torchs() -> None:
    """comm.* on GPUs: broadcast, reduce-add, scatter and gather give what torch.cuda.comm gives."""
    x, sparse = torch.randn(5, 4, device="cuda"), torch.eye(3, device="cuda").to_sparse()
    for mine, theirs in (
        (copies.broadcast(x, [0, 0]), comm.broadcast(x, [0, 0])),
        (copies.broadcast_coalesced([x, sparse], [0, 0], 8), comm.broadcast_coalesced([x, sparse], [0, 0], 8)),
        (copies.reduce_add([x, x], 0), comm.reduce_add([x, x], 0)),
        (copies.reduce_add_coalesced([[x, sparse]] * 2, 0), comm.reduce_add_coalesced([[x, sparse]] * 2, 0)),
        (copies.scatter(x, [0, 0], [1, 4]), comm.scatter(x, [0, 0], [1, 4])),
        (copies.scatter(x.cpu(), [0, 0], dim=-1), comm.scatter(x.cpu(), [0, 0], dim=-1)),
        (copies.gather([x, x], 1, "cpu"), comm.gather([x, x], 1, "cpu")),
        (copies.gather([x, x], -1, 0), comm.gather([x, x], -1, 0)),
    ):
        torch.testing.assert_close(mine, theirs)
    out = [torch.empty(2, 4, device="cuda"), torch.empty(3, 4, device="cuda")]
    torch.testing.assert_close(copies.scatter(x, out=out), comm.scatter(x, [0, 0], [2, 3]))
    whole = torch.empty_like(x)
    assert copies.gather(out, out=whole) is whole
    torch.testing.assert_close(whole, x)
    with pytest.raises(RuntimeError, match="output tensor at index 1"):
        copies.broadcast(x, out=[torch.empty_like(x), torch.empty(5, 4)])


def test_complex_copies_stay_complex() -> None:
    """comm.* on GPUs: a complex tensor comes back complex, along any dimension."""
    x = torch.randn(5, 4, dtype=torch.complex64, device="cuda")
    torch.testing.assert_close(copies.broadcast(x, [0, 0]), (x, x))
    torch.testing.assert_close(copies.reduce_add([x, x], 0), x + x)
    torch.testing.assert_close(copies.gather(copies.scatter(x, [0, 0], dim=-1), -1, 0), x)
    torch.testing.assert_close(copies.broadcast_coalesced([x], [0, 0])[1][0], x)


def test_first_and_second_derivatives() -> None:
    """Autograd functions on GPUs: derivatives agree with finite differences, also between CPU and GPU."""

    def doubles(*shapes: tuple[int, ...], device: str = "cuda") -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes)

    cases: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = [
        (lambda a, b: Broadcast.apply([0, 0], a, b), doubles((2,), (3, 1))),
        (lambda a, b: ReduceAddCoalesced.apply(0, 1, a, b), doubles((2,), (2,))),
        (lambda a: Scatter.apply([0, 0], None, 0, a), doubles((5, 2))),
        (lambda a: Scatter.apply([0, 0], None, 0, a), doubles((5, 2), device="cpu")),
        (lambda a, b: Gather.apply(0, 1, a, b), doubles((2, 1), (2, 3))),
        (lambda a, b: Gather.apply("cpu", 1, a, b), doubles((2, 1), (2, 3))),
    ]
    for function, inputs in cases:
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)
