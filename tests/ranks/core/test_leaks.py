"""Nothing grows: not over many steps, not over many models; and a process that has trained ends at once.

Memory is the process's resident set after a full collection and `malloc_trim`. The first part of each run, in which
allocators and the recorder's ring fill up, does not count; the rest is cut in two halves, and the one that grew less
counts: a leak grows in both.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import ddp_lab
from ddp_lab import recording
from ddp_lab.parallel.monitoring import activity
from tests.ranks.harness import on_ranks

Ranks = Callable[..., list[Any]]

KIB = 1024
# name -> (the wrapper's arguments, whether a comm hook is registered)
MODES: dict[str, tuple[dict[str, bool], bool]] = {
    "plain": ({}, False),
    "unused": ({"find_unused_parameters": True}, False),
    "static": ({"static_graph": True}, False),
    "views": ({"gradient_as_bucket_view": True}, False),
    "hook": ({}, True),
}
QUICK = [mode if mode in ("plain", "static") else pytest.param(mode, marks=pytest.mark.soak) for mode in MODES]


class _Net(torch.nn.Module):
    """Six tensors in two dtypes, hence two buckets; `spare` takes no part where `with_spare` is False."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 4, dtype=torch.float64)
        self.spare = torch.nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, batch: torch.Tensor, with_spare: bool) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(batch).relu().double())
        if with_spare:
            out = out + self.spare(out)
        return out


def _hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def _wrap(mode: str) -> ddp_lab.DistributedDataParallel:
    options, with_hook = MODES[mode]
    model = ddp_lab.DistributedDataParallel(_Net(), bucket_cap_mb=0.0005, **options)
    if with_hook:
        model.register_comm_hook(dist.group.WORLD, _hook)
    return model


def _train(model: torch.nn.Module, mode: str, steps: int) -> None:
    batch = torch.randn(4, 8)
    for step in range(steps):
        model.zero_grad(set_to_none=step % 3 != 0)
        model(batch, mode != "unused" or step % 2 == 0).sum().backward()
    model.zero_grad()


def _fill_ring() -> None:
    """Touches every page of the recorder's ring, and pushes out all events of models that are gone."""
    for _ in range(recording.statistics().capacity + 1):
        recording._C.record(0)


def _resident() -> int:
    """Resident bytes once everything that can go is gone."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def _census() -> dict[str, int]:
    """How many Python objects there are, and how many of them are tensors or models."""
    gc.collect()
    objects = gc.get_objects()
    kinds: dict[str, int] = {"objects": len(objects)}
    for kind in (torch.Tensor, torch.nn.Module):
        kinds[kind.__name__] = sum(issubclass(type(one), kind) for one in objects)
    return kinds


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {kind: count - before[kind] for kind, count in after.items()}


def _steps(rank: int, size: int, mode: str, first: int, half: int, memory_counts: bool) -> tuple[int, dict[str, int]]:
    """Growth of memory (bytes, of the better half) and of live objects over twice `half` steps after `first` ones."""
    if memory_counts:
        _fill_ring()
    model = _wrap(mode)
    _train(model, mode, first)
    memory, objects = [_resident()], _census()
    for _ in range(2):
        _train(model, mode, half)
        memory.append(_resident())
    return min(memory[1] - memory[0], memory[2] - memory[1]), _grown(objects, _census())


def _constructions(
    rank: int, size: int, mode: str, first: int, half: int, memory_counts: bool
) -> tuple[int, dict[str, int], int]:
    """As `_steps`, over models that are wrapped, trained and dropped; and how many reducers are still alive."""
    reducers: list[weakref.ref[Any]] = []

    def build(count: int) -> None:
        for _ in range(count):
            model = _wrap(mode)
            _train(model, mode, 3)
            reducers.append(weakref.ref(model.reducer))
        gc.collect()

    def settled() -> int:
        if memory_counts:
            _fill_ring()
        build(1)  # which forgets what described those models: see recording's note
        return _resident()

    build(first)
    memory, objects = [settled()], _census()
    for _ in range(2):
        build(half)
        memory.append(settled())
    alive = sum(one() is not None for one in reducers)
    grown = _grown(objects, _census())
    grown["objects"] -= 2 * half + 2  # the weak references
    return min(memory[1] - memory[0], memory[2] - memory[1]), grown, alive


@pytest.mark.parametrize("mode", MODES)
def test_few_steps_leave_no_objects(ranks: Ranks, mode: str) -> None:
    """After 60 more steps there are as many tensors and modules in a rank as before."""
    for _, grown in ranks(2, _steps, mode, 20, 30, False):
        assert (grown["Tensor"], grown["Module"]) == (0, 0)


@pytest.mark.parametrize("mode", QUICK)
def test_a_few_models_leave_no_objects(ranks: Ranks, mode: str) -> None:
    """Models that were wrapped, trained and dropped are gone, and their reducers with them."""
    for _, grown, alive in ranks(2, _constructions, mode, 3, 4, False):
        assert (grown["Tensor"], grown["Module"], alive) == (0, 0, 0)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_many_steps_leak_nothing(ranks: Ranks, mode: str) -> None:
    """10,000 steps grow a rank by less than 26 bytes each, and by no tensor."""
    for bytes_grown, grown in ranks(2, _steps, mode, 2000, 5000, True):
        assert bytes_grown < 128 * KIB
        assert max(grown["Tensor"], grown["Module"]) <= 0  # what an earlier program left may go meanwhile
        assert grown["objects"] < 100


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_many_constructions_leak_nothing(ranks: Ranks, mode: str) -> None:
    """1,000 models, wrapped, trained and dropped, grow a rank by less than half a KiB each and leave no reducer."""
    for bytes_grown, grown, alive in ranks(2, _constructions, mode, 500, 500, True):
        assert bytes_grown < 250 * KIB
        assert (grown["Tensor"], grown["Module"], alive) == (0, 0, 0)
        assert grown["objects"] < 100


# Says "ready" once torch is imported. Then, for each line on stdin, ``FOLDER HOW [OPTION]``, two ranks are forked,
# which come to the end of this script as any other program does; their exit codes are a line on stdout.
_SCRIPT = """
import json, os, sys, torch, torch.distributed as dist, ddp_lab
ddp_lab.DistributedDataParallel  # imports it
print("ready", flush=True)
def fork(size):
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            return rank
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
for line in sys.stdin:
    folder, how, *options = line.split()
    rank = fork(2)
    if rank is not None:
        break
else:
    sys.exit()
for stream in (1, 2):
    os.dup2(os.open(f"{folder}/{rank}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
model = ddp_lab.DistributedDataParallel(net, bucket_cap_mb=0.01, **{name: True for name in options})
for _ in range(5):
    loss = model(torch.randn(8, 64)).sum()
    loss.backward()
if how == "armed":  # a forward whose backward never comes
    kept = model(torch.randn(8, 64))
if how == "pending":  # a backward that an exception ended when the other rank's buckets were on their way
    def fail(gradient):
        raise ValueError("on purpose")
    out = net[0](torch.randn(8, 64))
    net[0].forward = lambda batch: out
    out.register_hook(fail)
    try:
        model(torch.randn(8, 64)).sum().backward()
    except ValueError:
        pass
if how == "destroyed":
    dist.barrier()
    dist.destroy_process_group()
print("trained", flush=True)
"""


@pytest.fixture(scope="module")
def fork_server() -> Iterator[subprocess.Popen[str]]:
    """`_SCRIPT`, running; what it has forked ends with it."""
    command = [sys.executable, "-c", _SCRIPT]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    with process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            for one in [*psutil.Process(process.pid).children(), process]:
                one.kill()


@pytest.mark.parametrize(
    ("how", "options"),
    [("destroyed", ""), ("left", "gradient_as_bucket_view"), ("armed", "find_unused_parameters"),
     ("pending", "static_graph")],
)  # fmt: skip
def test_a_process_that_has_trained_ends(
    fork_server: subprocess.Popen[str], tmp_path: Path, how: str, options: str
) -> None:
    """Its exit neither hangs nor crashes: with or without destroy_process_group, with a backward that never ends."""
    assert fork_server.stdin
    assert fork_server.stdout
    fork_server.stdin.write(f"{tmp_path} {how} {options}\n")
    assert select.select([fork_server.stdout], [], [], 240)[0], "a process does not end"
    codes = json.loads(fork_server.stdout.readline())
    for rank, code in enumerate(codes):
        out, errors = ((tmp_path / f"{rank}.{stream}").read_text() for stream in (1, 2))
        assert (code, out) == (0, "trained\n"), errors


@pytest.mark.parametrize("off", [False, True])
@on_ranks(1)
def test_the_sampler_ends_with_the_last_model(rank: int, size: int, off: bool) -> None:
    """The thread that looks at the main thread's stack; it comes back with the next model."""

    def samples() -> bool:
        return any(thread.name == "ddp_lab-sampler" for thread in threading.enumerate())

    monkeypatch = pytest.MonkeyPatch()
    activity.install(_Net())  # with the first model of this process, whose setting stays; the harness switches it off
    monkeypatch.setattr(activity, "_sampler", activity.Sampler(later=activity.describe_process))
    with recording.suspended() if off else contextlib.nullcontext():
        for _ in range(2):
            models = [ddp_lab.DistributedDataParallel(_Net()), torch.nn.parallel.DistributedDataParallel(_Net())]
            ddp_lab.observe(models[1])
            for _ in range(2):
                assert samples()
                models.pop()
                gc.collect()
            assert not samples()
    monkeypatch.undo()
