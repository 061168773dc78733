"""One rank of a training that the sanitizers watch; started as a program by test_sanitized_ranks.py.

    python sanitized_training.py STORE RANK WORLD_SIZE

While it trains, one more thread drains the events and asks about the models, as a rank of a notebook does.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddp_lab
from ddp_lab import comm, native
from ddp_lab.parallel.core.arguments import Arguments
from ddp_lab.parallel.live import breakpoints
from ddp_lab.parallel.live.model import live_models
from ddp_lab.protocol.messages import Change

STEPS = 6


class Net(nn.Module):
    """Layers of two dtypes, one channels-last, one with sparse gradients, one that is used on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.words = nn.Embedding(9, 4, sparse=True)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.extra = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, indices: torch.Tensor, extra: bool) -> torch.Tensor:
        image = self.conv(torch.ones(1, 2, 3, 3)).mean()
        x = torch.tanh(self.body(self.words(indices))) + image
        x = self.extra(x) if extra else x
        return self.wide(x.double())


def _train(rank: int, **options: Any) -> Any:
    """Steps with accumulation and both ways to zero; returns the model."""
    model = ddp_lab.DistributedDataParallel(Net(), bucket_cap_mb=0.0001, **options)
    return _steps(model, rank, bool(options.get("find_unused_parameters")))


def _steps(model: Any, rank: int, some_unused: bool = False) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    indices = torch.arange(5) + rank
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        extra = not some_unused or (step + rank) % 2 == 0
        with model.no_sync() if step else contextlib.nullcontext():
            model(indices, extra).sum().backward()
        model(indices, extra).sum().backward()
        optimizer.step()
    return model


def plain(rank: int) -> None:
    """Buckets of several dtypes, as views and not, in one copy per bucket and not."""
    model = ddp_lab.DistributedDataParallel(nn.Linear(4, 4))  # nothing sparse: its buffers can be inspected
    for step in range(10 * STEPS):
        model.zero_grad(set_to_none=step % 2 == 0)
        model(torch.ones(3, 4)).sum().backward()
    for options in ({}, {"gradient_as_bucket_view": True}, {"batched_grad_copy": True}):
        _train(rank, **options)


def unused(rank: int) -> None:
    """Parameters that are used on one rank only, in turn."""
    for as_view in (False, True):
        _train(rank, find_unused_parameters=True, gradient_as_bucket_view=as_view)


def static_graph(rank: int) -> None:
    """Counted gradients."""
    _train(rank, static_graph=True)


def hook(rank: int) -> None:
    """Hooks in Python and in C++, whose futures complete on other threads."""
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = ddp_lab.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), bucket_cap_mb=0.0001)
        model._register_builtin_comm_hook(kind)
        for _ in range(STEPS):
            model(torch.ones(3, 4)).sum().backward()
    model = ddp_lab.DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    model.register_comm_hook(None, lambda state, bucket: default_hooks.allreduce_hook(state, bucket).then(_value))
    _steps(model, rank)


def _value(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    return done.value() * 1.0


def abandon(rank: int) -> None:
    """Backwards that end with an exception, and one that another thread gives up."""
    model = ddp_lab.DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    handle = model.module.body[0].weight.register_hook(_fail)
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError):
            model(torch.arange(5), True).sum().backward()
    handle.remove()
    _steps(model, rank)
    model = ddp_lab.DistributedDataParallel(nn.Linear(4, 2))
    stuck: list[torch.futures.Future[torch.Tensor]] = []
    waiting = threading.Event()

    def never(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        stuck.append(torch.futures.Future())
        waiting.set()
        return stuck[-1]

    def free() -> None:
        waiting.wait()
        model.abandon_backward()
        stuck[-1].set_exception(RuntimeError("freed"))

    model.register_comm_hook(None, never)
    helper = threading.Thread(target=free)
    helper.start()
    with contextlib.suppress(RuntimeError):
        model(torch.ones(3, 4)).sum().backward()
    helper.join()


def _fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def on_demand(rank: int) -> None:
    """Buckets that have memory during a backward alone, and backwards that the caller ends."""
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        model = ddp_lab.DistributedDataParallel.__new__(ddp_lab.DistributedDataParallel)
        construct = inspect.unwrap(ddp_lab.DistributedDataParallel.__init__)  # older releases hide the argument
        construct(model, Arguments(Net(), bucket_cap_mb=0.0001, lazy_bucket_allocation=True, **options))
        _steps(model, rank, bool(options.get("find_unused_parameters")))
        model = ddp_lab.DistributedDataParallel(Net(), bucket_cap_mb=0.0001, **options)
        model.require_manual_backward_finalization = True
        for step in range(STEPS):
            model.zero_grad(set_to_none=step % 2 == 0)
            model(torch.arange(5) + rank, True).sum().backward()
            model.finalize_backward()


def watched(rank: int) -> None:
    """Norms of every rank's gradients, also of a hook's and of sparse ones; NaN in one of them."""
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        model = ddp_lab.DistributedDataParallel(Net(), bucket_cap_mb=0.0001, **options)
        watch = model.watch_gradients()
        _steps(model, rank, bool(options.get("find_unused_parameters")))
        assert watch.steps == STEPS + 1, watch.steps  # the first has two
    handle = model.module.body[1].weight.register_hook(lambda gradient: gradient * (float("nan") if rank else 1.0))
    model(torch.arange(5), True).sum().backward()
    assert watch.last.nonfinite is not None
    handle.remove()


def paused(rank: int) -> None:
    """Another thread sets breakpoints, lets the backward go on from each, and ends it in a pause."""
    model = ddp_lab.DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    _steps(model, rank)
    model._live.breakpoints.set(breakpoints.POINTS)
    done = threading.Event()
    pauses = 0

    def walk() -> None:
        nonlocal pauses
        while not done.wait(0.0005):
            if model._live.breakpoints.stage()["paused"] is not None:
                pauses += model._live.breakpoints.go_on(("event", "bucket", "breakpoint")[pauses % 3])

    helper = threading.Thread(target=walk)
    helper.start()
    _steps(model, rank)
    done.set()
    helper.join()
    assert pauses > STEPS, pauses
    dist.barrier()

    def end() -> None:
        while model._live.breakpoints.stage()["paused"] is None:
            done.wait(0.0005)
        model.reducer.end_pause("ended")

    model = ddp_lab.DistributedDataParallel(nn.Linear(4, 2))
    model._live.breakpoints.set(["bucket_ready"])
    done.clear()
    helper = threading.Thread(target=end)
    helper.start()
    with pytest.raises(RuntimeError, match="ended"):
        model(torch.ones(3, 4)).sum().backward()
    helper.join()


def changed(rank: int) -> None:
    """Other buckets and other hooks, asked for by another thread while it trains."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model = ddp_lab.DistributedDataParallel(net, bucket_cap_mb=0.0001)
    for cap, comm_hook in ((1.0, None), (0.0002, "fp16")):
        change = Change(bucket_cap_mb=cap, comm_hook=comm_hook)
        generation = model.buckets()[0].generation
        if rank == 0:
            dist.barrier()  # who decides is asked last
        ask = threading.Thread(target=model._live.prepare, args=(f"cap {cap}", change))
        ask.start()
        if rank != 0:
            ask.join()
            dist.barrier()
        for _ in range(STEPS):
            model(torch.ones(3, 4)).sum().backward()
        ask.join()
        for _ in range(STEPS):
            model(torch.ones(3, 4)).sum().backward()
        assert model.buckets()[0].generation > generation


def observed(rank: int) -> None:
    """torch's own class, recorded."""
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0001, **options)
        with ddp_lab.observe(model):
            for step in range(STEPS):
                model.zero_grad(set_to_none=step % 2 == 0)
                model(torch.ones(3, 4) * rank).sum().backward()


def counted(rank: int) -> None:
    """The memory of steps, while Gloo's threads allocate; sharded parameters, whose collectives have a purpose."""
    from torch.distributed.fsdp import fully_shard

    model = ddp_lab.DistributedDataParallel(nn.Linear(64, 64), bucket_cap_mb=0.001)
    sharded = fully_shard(nn.Linear(64, 64))
    ddp_lab.observe(sharded)
    for one in (model, sharded):
        optimizer = torch.optim.Adam(one.parameters())

        def step(one: Any = one, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            one(torch.ones(3, 64) * rank).sum().backward()
            optimizer.step()

        for _ in range(3):
            step()
        assert ddp_lab.measure_memory(step, one, optimizer, steps=STEPS).peak > 64 * 64 * 4


def shared_memory(rank: int) -> None:
    """Collectives through shared memory: one by one and several at once, a training, groups that break."""
    comm.register()
    group = dist.new_group(backend="shm")
    for count in (0, 3, 5_000, 400_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            ones = torch.ones(count).to(dtype)
            dist.all_reduce(ones, group=group)
            dist.broadcast(ones, 1, group=group)
            parts = [torch.empty_like(ones) for _ in range(2)]
            dist.all_gather(parts, ones, group=group)
            dist.reduce_scatter(ones, parts, group=group)
    dist.all_to_all_single(
        torch.empty(3 + 2 * rank), torch.ones(3 + 2 * rank), [1 + rank, 2 + rank], [1 + rank, 2 + rank], group=group
    )
    works = [dist.all_reduce(torch.ones(50_000), group=group, async_op=True) for _ in range(20)]
    for work in works:
        work.wait()
    cpu = torch.device("cpu")
    for count in (3, 400_001):
        shared = group._get_backend(cpu).allocate_tensor(count, dtype=torch.float32, device=cpu).fill_(1)
        dist.all_reduce(shared, group=group)
        dist.all_reduce(shared if rank else torch.ones(count), group=group)
    for views in (False, True):
        model = ddp_lab.DistributedDataParallel(
            nn.Linear(50, 50), process_group=group, bucket_cap_mb=0.001, gradient_as_bucket_view=views
        )
        for step in range(STEPS):
            model.zero_grad(set_to_none=step % 2 == 0)
            model(torch.ones(3, 50) * rank).sum().backward()
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(1 + rank), group=group)  # a disagreement
    waiting = dist.new_group(backend="shm")
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=waiting, async_op=True)
        waiting._get_backend(torch.device("cpu")).abort()
        with contextlib.suppress(RuntimeError):
            work.wait()
    dist.barrier()


CASES: list[Callable[[int], None]] = [
    shared_memory,
    *(plain, unused, static_graph, hook, abandon),
    *(on_demand, watched, paused, changed, observed, counted),
]


@contextlib.contextmanager
def _onlooker() -> Iterator[None]:
    """A thread that drains the recorder and asks the models for their gradients' checksums, as fast as it can."""
    extension = native.load()
    done = threading.Event()
    looks = inspected = 0

    def look() -> None:
        nonlocal looks, inspected
        cursor = 0
        while not done.is_set():
            looks += 1
            *_, cursor = extension.drain(cursor)
            for model in live_models():
                model.sync.reducer.in_flight()
                model.sync.reducer.bucket_times()
                model.breakpoints.stage()
                inspected += model.sync.reducer.inspect_averages() is not None
            done.wait(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        print(f"looked {looks} times, inspected {inspected}", flush=True)
        assert inspected > 0


def main(store: str, rank: int, size: int) -> None:
    """Trains all cases."""
    torch.set_num_threads(1)
    print(f"{native.load().__file__} is watched", flush=True)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    with _onlooker():
        for case in CASES:
            case(rank)
            print(f"{case.__name__} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
