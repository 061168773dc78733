"""Makes the recordings of lessons 10 and 12, and of the gallery: `python record.py [FOLDER [NAME ...]]`.

Four ranks train a small network for handwritten digits. Lesson 10 has those with a number: run-0 is in order, each of
the others has one fault. So that the pictures are much the same on any machine, computation and link take the time
that is set here: each layer sleeps in its backward, and a comm hook holds each bucket back for as long as the link
would need for it.

Lesson 12 has the same network on two and on four ranks. There the comm hook is a ring all-reduce, which sends each
message separately.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ddp_lab
from ddp_lab.protocol.events import Batch

RANKS, STEPS, WARM_UP = 4, 28, 3

TRAIN = """
import time
from concurrent.futures import ThreadPoolExecutor
from sklearn.datasets import load_digits

digits = load_digits()
scans = torch.tensor(digits.data, dtype=torch.float32)[rank::world_size][:32] / 16
labels = torch.tensor(digits.target)[rank::world_size][:32]


class Compute(torch.autograd.Function):
    "Passes its input on; its backward takes so many seconds."

    @staticmethod
    def forward(context, x, seconds):
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient, None


class Link:
    "A comm hook: buckets pass one after the other, each for its latency and its bytes."
    group = dist.new_group()

    def __init__(self, latency_ms, mb_per_second, dtype):
        self.latency, self.rate, self.dtype = latency_ms / 1e3, mb_per_second * 1e6, dtype
        self.thread = ThreadPoolExecutor(1)

    def __call__(self, state, bucket):
        future = torch.futures.Future()
        self.thread.submit(self.send, bucket.buffer(), future)
        return future

    def send(self, buffer, future):
        try:
            sent = buffer.to(self.dtype)
            time.sleep(self.latency + sent.nbytes / self.rate)
            dist.all_reduce(sent, group=self.group)
            future.set_result(buffer.copy_(sent).div_(world_size))
        except Exception as error:
            future.set_exception(error)


class Ring(Link):
    "A comm hook: a ring all-reduce; each of its messages takes the latency, and time for its bytes."

    def send(self, buffer, future):
        try:
            parts = buffer.tensor_split(world_size)
            for first, add in [(rank, True), (rank + 1, False)]:  # reduce-scatter, then all-gather
                for step in range(first, first - world_size + 1, -1):
                    sent, kept = parts[step % world_size], parts[(step - 1) % world_size]
                    time.sleep(self.latency + sent.nbytes / self.rate)
                    self.pass_on(sent, kept, add)
            future.set_result(buffer.div_(world_size))
        except Exception as error:
            future.set_exception(error)

    def pass_on(self, sent, kept, add):
        "One message to the next rank, one from the rank before."
        arrived = torch.empty_like(kept)
        sending = dist.isend(sent, (rank + 1) % world_size, group=self.group)
        dist.recv(arrived, (rank - 1) % world_size, group=self.group)
        sending.wait()
        kept.add_(arrived) if add else kept.copy_(arrived)


class DigitReader(torch.nn.Module):
    def __init__(self, slow_layer, unused, seconds):
        super().__init__()
        torch.manual_seed(0)
        for i in range(8):
            self.add_module(f"layer{i}", torch.nn.Linear(64 if i == 0 else 256, 10 if i == 7 else 256))
        self.slow_layer, self.seconds = slow_layer, seconds
        if unused:
            self.old_head = torch.nn.Linear(256, 24576, bias=False)

    def forward(self, x):
        for i in range(8):
            x = Compute.apply(self.get_submodule(f"layer{i}")(x), 0.026 if i == self.slow_layer else self.seconds)
            x = torch.relu(x) if i < 7 else x
        return x


def train(
    steps, slow_layer=(None, None), late_rank=None, unused=False, layer_ms=6, kind=Link, latency_ms=0.5,
    mb_per_second=200, dtype=torch.float32, fewer=None, **options,
):
    network = DigitReader(slow_layer[1] if rank == slow_layer[0] else None, unused, layer_ms / 1e3)
    model = ddp_lab.DistributedDataParallel(network, **{"bucket_cap_mb": 0.25, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    link = kind(latency_ms, mb_per_second, dtype)
    model.register_comm_hook(None, link)
    with model.join(enable=fewer is not None):
        for _ in range(steps // 2 if rank == fewer else steps):
            time.sleep(0.035 if rank == late_rank else 0.002)  # the next batch
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(scans), labels).backward()
            optimizer.step()
    link.thread.shutdown()
"""


@dataclass(frozen=True)
class Run:
    """One recording.

    Attributes:
        options: of `train`.
        kind: of the finding that gains most; "" if there is nothing to gain.
        rank: whom that finding names.
        comm_hook: the hook of torch that the file shows in place of ours.
    """

    options: str
    kind: str = ""
    rank: int | None = None
    comm_hook: str | None = None


RUNS = {
    "run-0": Run(""),
    "run-1": Run("slow_layer=(2, 3)", "straggler", 2),
    "run-2": Run("bucket_cap_mb=25", "bucket-too-big"),
    "run-3": Run("late_rank=1", "straggler", 1),
    "run-4": Run("mb_per_second=20", "communication-bound"),
    "run-5": Run("unused=True, find_unused_parameters=True", "unused-parameters"),
    "run-6": Run("latency_ms=5, bucket_cap_mb=0.0001", "bucket-too-small"),
    "half": Run("mb_per_second=20, dtype=torch.float16", "communication-bound", comm_hook="fp16_compress_hook"),
    "uneven": Run("fewer=3"),
}
SCALING = {"ranks-2": 2, "ranks-4": 4}
"""The recordings of lesson 12, and their number of ranks."""
SCALING_OPTIONS = "layer_ms=16, kind=Ring, latency_ms=5, mb_per_second=200"
_DISTURBED = ("straggler", "ranks-disturbed")  # findings: no rank of these runs is late, unless by another process


def record(lab: ddp_lab.Cluster, run: Run, path: Path, steps: int = STEPS, tries: int = 8) -> ddp_lab.Timeline:
    """Trains, saves what was recorded, and returns it as it is read from the file.

    Args:
        lab: of four ranks, which have run `TRAIN`.
        tries: a busy machine may disturb a run so much that its own delays cost more than the fault: it is then
            recorded again.

    Raises:
        RuntimeError: the finding that gains most is not the run's fault.
    """
    for _ in range(tries):
        lab.timeline.clear()
        lab.run(f"train({WARM_UP + steps}, {run.options})")
        made = ddp_lab.Timeline.load(as_stored(lab.timeline, run.comm_hook).save(path))
        first = next(iter(made.findings()), None)
        if (first.kind, first.rank) == (run.kind, run.rank) if first else not run.kind:
            return made
    raise RuntimeError(f"train({run.options}): findings() begins with {first}")


def as_stored(timeline: ddp_lab.Timeline, comm_hook: str | None = None) -> ddp_lab.Timeline:
    """The same timeline without the first steps, of a model with `comm_hook` in place of ours.

    It ends with a typical step: that is what a dashboard shows first.
    """
    raw, made = timeline.events(), ddp_lab.Timeline()
    ready = timeline.spans().query("step >= @WARM_UP").pivot_table("ready_ms", "step", ["rank", "bucket"])
    last = (ready - ready.median()).abs().mean(axis=1).tail(8).idxmin()
    for rank, description in raw.described:
        if description["type"] != "assignment":  # that a model is gone, say: the training is over
            continue
        options = {**description["options"], "comm_hook": comm_hook}
        made.describe(rank, {**description, "reducer": 0, "options": options, "session": 0})
    for rank in raw.ranks:
        events = np.concatenate([events for of, events in raw.chunks if of == rank])
        events = events[(events["reducer"] >= 0) & (events["step"] >= WARM_UP) & (events["step"] <= last)]
        events["reducer"] = 0
        made.set_status(rank, {"state": "finished", "session": 0})
        made.extend(Batch(rank, 0, 0, 0, events))
    return made


def record_scaling(ranks: int, path: Path, tries: int = 20) -> ddp_lab.Timeline:
    """Records one of lesson 12's runs, until no other process disturbs its ranks.

    Returns:
        The run as it is read from the file.

    Raises:
        RuntimeError: each try was disturbed.
    """
    with ddp_lab.Cluster(ranks, backend="shm") as lab:
        lab.run(TRAIN)
        for _ in range(tries):
            lab.timeline.clear()
            lab.run(f"train({WARM_UP + STEPS}, {SCALING_OPTIONS})")
            made = ddp_lab.Timeline.load(as_stored(lab.timeline).save(path))
            if not any(one.kind in _DISTURBED for one in made.findings()):
                return made
    raise RuntimeError(f"{ranks} ranks: the machine is too busy")


def main(folder: Path, names: Iterable[str]) -> None:
    """Writes the recordings with these names into a folder."""
    chosen = set(names)
    if unknown := chosen - {*RUNS, *SCALING}:
        raise SystemExit(f"There are no recordings {', '.join(unknown)}: choose from {', '.join([*RUNS, *SCALING])}.")
    with ddp_lab.Cluster(RANKS, backend="shm") as lab:
        lab.run(TRAIN)
        for name in [name for name in RUNS if name in chosen]:
            describe(folder / f"{name}.npz", record(lab, RUNS[name], folder / f"{name}.npz"))
    for name in [name for name in SCALING if name in chosen]:
        describe(folder / f"{name}.npz", record_scaling(SCALING[name], folder / f"{name}.npz"))


def describe(path: Path, made: ddp_lab.Timeline) -> None:
    """Prints a file's size, and what is found in it."""
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB", *(f"  {one}" for one in made.findings()), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent), sys.argv[2:] or [*RUNS, *SCALING])
