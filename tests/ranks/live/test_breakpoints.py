"""A backward pauses where it is told to, shows where it stands, goes on as asked, and can always be ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import DistributedDataParallel
from ddp_lab.parallel.live import breakpoints
from ddp_lab.parallel.live.model import release
from tests.ranks.conftest import Ranks
from tests.ranks.harness import on_ranks
from tests.waiting import wait_until

POINTS = ("gradient_ready", "bucket_ready", "launched", "reduced")


def _model(**arguments: Any) -> Any:
    torch.manual_seed(3)
    net = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)])
    model = DistributedDataParallel(net, bucket_cap_mb=1e-4, **arguments)
    for step in range(2):
        _step(model, dist.get_rank(), step)
    return model


def _step(model: Any, rank: int, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.randn(3, 5, generator=torch.Generator().manual_seed(rank + 10 * step))).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def _paused(model: Any) -> Any:
    """The stage of a model once it pauses."""
    wait_until(lambda: model._live.breakpoints.stage().paused is not None, "a pause")
    return model._live.breakpoints.stage()


def _beside(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs `act` on a thread, as the client's requests are; what it returned or raised is put into the list."""
    seen: list[Any] = []

    def run() -> None:
        try:
            seen.append(act())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, seen


def _walk_on_rank(rank: int, size: int, options: dict[str, Any]) -> list[tuple[str, Any, str]] | None:
    model = _model(**options)
    plain = _step(model, rank, 5)
    walked: list[tuple[str, Any, str]] = []

    def walk() -> None:
        while True:
            stage = _paused(model)
            paused = stage.paused
            assert stage.in_flight
            walked.append((paused.point, paused.parameter or paused.bucket, _short(stage)))
            last = paused.point == "reduced" and paused.bucket == len(model._sync.assignment) - 1
            if last:
                model._live.breakpoints.clear()
                return
            _go_on(model, "event")

    if rank == 0:
        model._live.breakpoints.set(["gradient_ready"], parameters=["2.bias"])
        thread, seen = _beside(walk)
        stepped = _step(model, rank, 5)
        thread.join()
        assert seen == [None]
    else:
        stepped = _step(model, rank, 5)
    assert all(torch.equal(a, b) for a, b in zip(plain, stepped, strict=True))
    assert model._live.breakpoints.stage().paused is None
    return walked if rank == 0 else None


def _go_on(model: Any, until: str) -> None:
    """Lets a paused model go on, and waits until it pauses again."""
    before = _since(model)
    assert model._live.breakpoints.go_on(until)
    wait_until(lambda: _since(model) not in (None, before), f"the next {until}")


def _since(model: Any) -> int | None:
    paused = model._live.breakpoints.stage().paused
    return None if paused is None else paused.since_ns


def _short(stage: Any) -> str:
    return " ".join(f"{bucket.state}:{bucket.arrived}" for bucket in stage.buckets)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_every_event_in_its_order(ranks: Ranks, options: dict[str, Any]) -> None:
    """From event to event one rank shows each gradient and bucket in order, with what has become of each bucket."""
    walked = ranks(2, _walk_on_rank, options)[0]
    points = [(point, what) for point, what, _ in walked]
    expected: list[tuple[str, Any]] = []
    for bucket, layer in enumerate((2, 1, 0)):
        expected += [("gradient_ready", f"{layer}.bias"), ("gradient_ready", f"{layer}.weight")]
        expected += [("bucket_ready", bucket), ("launched", bucket)]
    expected += [("reduced", bucket) for bucket in range(3)]
    assert points == expected
    stages = {(point, what): stage for point, what, stage in walked}
    assert stages["gradient_ready", "2.bias"] == "pending:0 pending:0 pending:0"
    assert stages["gradient_ready", "2.weight"] == "pending:1 pending:0 pending:0"
    assert stages["bucket_ready", 0] == "ready:2 pending:0 pending:0"
    assert stages["launched", 0].endswith("pending:0 pending:0")
    assert stages["launched", 0].split(":")[0] in ("launched", "reduced")
    assert stages["bucket_ready", 2].endswith("ready:2")
    assert stages["reduced", 2] == "reduced:2 reduced:2 reduced:2"


@pytest.mark.parametrize("point", POINTS)
@on_ranks(2)
def test_a_pause_stops_nobody_else(rank: int, size: int, point: str) -> None:
    """During a pause at any point other threads can ask the model everything."""
    model = _model()
    if rank == 0:
        model._live.breakpoints.set([point])

        def look() -> float:
            _paused(model)
            begin = time.monotonic()
            assert model.reducer.step() == 2
            assert model.reducer.in_flight()
            model.reducer.request_inspection(100)
            model.reducer.inspect_averages()
            model.buckets()
            ended = time.monotonic() - begin
            model._live.breakpoints.clear()
            return ended

        thread, seen = _beside(look)
    _step(model, rank, 0)
    if rank == 0:
        thread.join()
        assert isinstance(seen[0], float)


ENDS = ("release", "abandon", "signal")


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("point", ["gradient_ready", "bucket_ready"])
@on_ranks(2)
def test_a_pause_can_be_ended(rank: int, size: int, point: str, how: str) -> None:
    """A release, abandon_backward() or Ctrl-C ends a pause with an exception, and the model trains on afterwards."""
    model = _model()
    plain = _step(model, rank, 5)
    model._live.breakpoints.set([point])

    def end() -> None:
        _paused(model)
        if how == "release":
            release("on purpose")
        elif how == "abandon":
            model.abandon_backward()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    thread, errors = _beside(end)
    with pytest.raises(KeyboardInterrupt if how == "signal" else RuntimeError) as caught:
        _step(model, rank, 5)
    thread.join()
    assert errors == [None]
    model._live.breakpoints.clear()
    # buckets were launched on all ranks or on none: the group is whole
    again = _step(model, rank, 5)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    message = str(caught.value)
    if how == "release":
        assert "was paused at a breakpoint was aborted: on purpose" in message
    elif how == "abandon":
        assert "abandoned (abandon_backward)" in message


@on_ranks(2)
def test_no_timeout_fires(rank: int, size: int) -> None:
    """While timeouts are held a rank waits longer for one that pauses than its group's timeout; then as before."""
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=1))
    model = _model(process_group=group)
    backend = group._get_backend(torch.device("cpu"))
    breakpoints.hold_timeouts()
    breakpoints.hold_timeouts()  # changes nothing more
    assert backend.options._timeout > timedelta(days=1)
    dist.barrier()
    if rank == 0:
        model._live.breakpoints.set(["bucket_ready"], buckets=[1])

        def wait() -> None:
            _paused(model)
            begin = time.monotonic()
            wait_until(lambda: time.monotonic() - begin > 2, "more than the timeout")
            model._live.breakpoints.clear()

        thread, errors = _beside(wait)
    _step(model, rank, 0)
    if rank == 0:
        thread.join()
        assert errors == [None]
    breakpoints.restore_timeouts()
    assert backend.options._timeout == timedelta(seconds=1)
    _step(model, rank, 1)


@on_ranks(2)
def test_a_rank_without_inputs_pauses(rank: int, size: int) -> None:
    """Breakpoints hold in the backwards that a joined rank shadows."""
    model = _model()
    seen: list[Any] = []
    with model.join():
        for step in range(1 if rank == 1 else 3):
            _step(model, rank, step)
        if rank == 1:
            model._live.breakpoints.set(["launched"], buckets=[1])
            thread, seen = _beside(lambda: (_paused(model).paused.bucket, model._live.breakpoints.clear())[0])
    if rank == 1:
        thread.join()
        assert seen == [1]
    assert int(model.reducer.finished()) == 5


@on_ranks(2)
def test_points_that_are_not(rank: int, size: int) -> None:
    """Unknown points, parameters and buckets are refused; without a pause there is nothing to go on from."""
    model = _model()
    with pytest.raises(ValueError, match="there is no breakpoint 'ready'"):
        model._live.breakpoints.set(["ready"])
    with pytest.raises(ValueError, match=r"did you mean '0\.bias'"):
        model._live.breakpoints.set(["gradient_ready"], parameters=["0.bais"])
    with pytest.raises(ValueError, match="there is no bucket 7"):
        model._live.breakpoints.set(["bucket_ready"], buckets=[7])
    with pytest.raises(ValueError, match="choose one of"):
        model._live.breakpoints.go_on("epoch")
    assert not model._live.breakpoints.go_on("event")
    _step(model, rank, 0)
