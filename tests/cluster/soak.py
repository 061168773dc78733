"""Random cells for a soak: what is done to a cluster, what must hold after each, and what it holds meanwhile.

Each episode does one thing to two ranks (a cell, a failure, an interrupt, a kill, ...) and then runs a cell that must
give what it gives on ranks that nothing has happened to: a collective's sum, and what earlier episodes left behind.

``python -m tests.cluster.soak CELLS SEED`` prints what was seen, and in its last line `Figures.trends` as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ddp_lab import CellError
from ddp_lab.protocol.messages import Ping
from tests.cluster.conftest import Lab

SETUP = """
import ctypes, os, time
for group in list(dist.distributed_c10d._world.pg_map):  # what an earlier call has made, on ranks that are not new
    if group is not dist.group.WORLD: dist.destroy_process_group(group)
kept, x = 0, torch.ones(4)
pair = dist.new_group([0, 1])
class Items(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): time.sleep(600)
def new_model():
    net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
    return ddp_lab.DistributedDataParallel(net, bucket_cap_mb=0.002)
def step(model):
    model.zero_grad(set_to_none=True)
    model(torch.ones(2, 16)).sum().backward()
    return sum(float(p.grad.sum()) for p in model.parameters())
torch.manual_seed(0)
model = new_model()
from zmq.utils import garbage
garbage.gc.store(b"")  # starts pyzmq's thread for large messages, with its files, that the first one would start
"""
CHECK = """
t = torch.ones(1); dist.all_reduce(t)
u = torch.ones(1); dist.all_reduce(u, group=pair)
kept, float(t), float(u)
"""
# On a rank. Reaps processes that have ended: Python does so when it starts the next one, and never if an interrupt came
# while it started one (plain Python lost 296 of 2,500 children of an interrupted `subprocess.run`). Gives memory back,
# and counts the files whose syntax trees IPython keeps because tracebacks went through them: a tree may take 10 MB, and
# interrupts find new files for long.
TRIM = """
import gc, multiprocessing, subprocess, executing, stack_data
multiprocessing.active_children(); subprocess._cleanup()
try:
    while os.waitpid(-1, os.WNOHANG)[0]: pass
except ChildProcessError: pass  # it has no child
gc.collect(); ctypes.CDLL(None).malloc_trim(0)
sources = [vars(cls).get("__source_cache_with_lines", {}) for cls in (executing.Source, stack_data.Source)]
len({name for known in sources for name, _ in known if name.startswith("/")})
"""
# Cells that don't end by themselves.
STUCK = (
    "while True: pass",
    "time.sleep(600)",
    "if rank == 0: dist.all_reduce(x)\nelse: time.sleep(600)",
    "if rank == 0: dist.all_reduce(x)\nelse: dist.broadcast(x, 0); dist.barrier()",
    "if rank == 0: dist.all_reduce(x)\nelse: dist.all_reduce(x, group=pair)",
    "while True: step(model)",
    "if rank == 0: step(model)\ntime.sleep(600)",
    "ctypes.CDLL(None).sleep(600)",
    "for batch in torch.utils.data.DataLoader(Items(), num_workers=1): pass",
    "while True: print('x' * 100)",
    "while True: dist.all_reduce(x)",
    "dist.new_group([0, 1]) if rank == 0 else time.sleep(600)",
    "__import__('subprocess').run(['sleep', '600'])",
)
HANG_SECONDS = 60.0
CALM, DEADLY_CELLS = 400, 150  # cells in which no process is replaced, so that growth is seen; then some in which it is
LIFE = 350  # cells that a process has to have lived for its growth to count


class Hang(AssertionError):
    """An episode did not come to an end."""


@dataclass
class Figures:
    """What was seen.

    Attributes:
        samples: figure -> (cell, value, files of which a rank keeps the syntax tree), of a process that may be replaced
            one series for each life.
    """

    cells: int = 0
    samples: dict[str, list[tuple[int, float, int]]] = field(default_factory=lambda: defaultdict(list))

    def report(self) -> str:
        """As a table."""
        lines = [f"{self.cells} cells", f"  {'figure':28} {'first':>10} {'last':>10} {'a cell':>10}"]
        for name, (first, last, slope) in self.trends().items():
            lines.append(f"  {name:28} {first:10.1f} {last:10.1f} {slope:+10.4f}")
        return "\n".join(lines)

    def trends(self) -> dict[str, tuple[float, float, float]]:
        """figure -> first and last value, and growth a cell: of every life that was long enough the second half counts,
        of that all pairs of samples that are far apart and have the same trees, and of their slopes the median (after
        Theil and Sen); NaN without such a pair."""
        slopes: dict[str, list[float]] = defaultdict(list)
        ends: dict[str, tuple[float, float]] = {}
        for series, points in self.samples.items():
            name = series.split("#")[0]
            at, values, trees = np.array(points, dtype=float).T
            ends[name] = (ends.get(name, (values[0], 0.0))[0], values[-1])
            life = at[-1] - at[0]
            at, values, trees = (column[at >= at[0] + life / 2] for column in (at, values, trees))
            one, other = np.triu_indices(len(at), 1)
            apart = at[other] - at[one] >= max(LIFE, life) / 6
            apart &= (life >= LIFE) & ((trees[one] == trees[other]) | (not name.endswith("KiB")))
            slopes[name] += list((values[other] - values[one])[apart] / (at[other] - at[one])[apart])
        return {name: (*ends[name], float(np.median(slopes[name] or [np.nan]))) for name in sorted(ends)}


class Soak:
    """Episodes on one cluster.

    Args:
        lab: two ranks, just started.
        seed: of everything that is chosen.
        sample_every: episodes between two looks at what is held.
    """

    def __init__(self, lab: Lab, seed: int, sample_every: int = 5) -> None:
        self.lab = lab
        self.figures = Figures()
        self._random = random.Random(seed)
        self._sample_every = sample_every
        self._kept = [0, 0]
        self._doing = ""
        self._deadline = float("inf")
        self._ended = threading.Event()
        self._hang = ""
        self.log: list[str] = []
        lab.run(SETUP)

    def run(self, cells: int) -> None:
        """Runs episodes until so many cells have run; raises `Hang` where one does not end."""
        guard = threading.Thread(target=self._guard, name="soak-guard", daemon=True)
        guard.start()
        try:
            episode = 0
            while self.figures.cells < cells:
                self._episode()
                if episode % self._sample_every == 0:
                    self._sample()
                episode += 1
        except KeyboardInterrupt:
            if self._hang:
                raise Hang(self._hang) from None
            raise
        except Exception as error:
            error.add_note(f"in {self._doing}, after {self.log[-5:]}; {self._stacks()}")
            raise
        finally:
            self._ended.set()
            guard.join()

    def _stacks(self) -> str:
        """What the ranks do now."""
        answers = self.lab.wire.request([0, 1], Ping(stack=True), 1.0)
        return "\n".join(f"rank {rank}: {answer}" for rank, answer in answers.items())

    def _episode(self) -> None:
        names = [one for one in EPISODES if one not in DEADLY or self.figures.cells % (CALM + DEADLY_CELLS) >= CALM]
        chosen = self._random.choices(names, [EPISODES[name] for name in names])[0]
        self._doing = chosen.__name__.lstrip("_")
        self._deadline = time.monotonic() + HANG_SECONDS
        chosen(self)
        self.log.append(self._doing)
        self._check()
        self._deadline = float("inf")

    def cell(self, code: Any, *args: Any, **options: Any) -> Any:
        """Runs a cell that is counted."""
        self.figures.cells += 1
        return self.lab.run(code, *args, **options)

    def _check(self) -> None:
        """The ranks do what untouched ones do, and know what they knew."""
        found = self.cell(CHECK).values
        expected = {rank: (self._kept[rank], 2.0, 2.0) for rank in (0, 1)}
        assert found == expected, f"after {self._doing}: {found}, not {expected}"

    def _guard(self) -> None:
        """Ends an episode that hangs, and says where it hung."""
        while not self._ended.wait(0.5):
            if time.monotonic() < self._deadline:
                continue
            self._deadline = float("inf")
            try:
                why = str(self.lab.doctor())
            except Exception as error:  # noqa: BLE001  said instead of what it would have found
                why = f"the doctor failed: {error!r}"
            faulthandler.dump_traceback(all_threads=True)
            self._hang = f"{self._doing} did not end in {HANG_SECONDS:.0f} s; {why}; before: {self.log[-5:]}"
            server = self.lab.session.processes.fork_server
            self._hang += f"\nexits: {server.exits}, pids: {server.pids}"
            print(self._hang, flush=True)
            for name, pid in self.lab.pids().items():
                if name.startswith("rank"):
                    os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGINT)

    # Episodes

    def _plain(self) -> None:
        """A cell that counts."""
        self.cell("kept += 1; model_loss = step(model) if 'model' in globals() else 0")
        self._kept = [count + 1 for count in self._kept]

    def _prints(self) -> None:
        lines = self._random.choice((3, 3, 3, 1500))
        result = self.cell(f"for i in range({lines}): print(i)\nrank")
        assert result.text(1).splitlines()[:lines] == [str(i) for i in range(lines)]

    def _raises(self) -> None:
        code = self._random.choice(
            (
                "if rank == {}:\n    raise ValueError('on purpose')\ndist.all_reduce(x)",
                "raise ValueError('on purpose')  # {}",
                "if rank == {}:\n    raise ValueError('on purpose')",
                "if rank == {}:\n    raise ValueError('on purpose')\ntime.sleep(0.2)\nstep(model)",
            )
        ).format(self._random.randrange(2))
        self._doing = f"raises: {code!r}"
        try:
            self.cell(code)
        except CellError as error:
            failures = list(error.failures.values())
        else:
            raise AssertionError(f"no error of {code!r}")
        assert failures[0].name == "ValueError"

    def _interrupts(self) -> None:
        code = self._random.choice(STUCK)
        self._doing = f"interrupts: {code!r}"
        delay = self._random.choice((0.0, 0.002, 0.01, 0.03, 0.1, 0.3)) * self._random.random() * 2
        told: list[CellError] = []

        def stuck() -> None:
            try:
                self.cell(code)
            except CellError as error:  # the backend "shm" notices that the ranks differ
                if "ranks called different operations" not in str(error):
                    raise
                told.append(error)

        assert self._pressed(stuck, delay) or told, f"{code!r} ended by itself"

    def _interrupts_anything(self) -> None:
        """An interrupt somewhere in a short cell, a push, a pull, a look or a repair."""
        what = self._random.choice(
            (
                lambda: self.cell("1 + rank"),
                lambda: self.lab.push({"pushed": np.ones(1 << 18)}),
                lambda: self.lab.pull("x"),
                lambda: self.lab.rejoin(),
                lambda: self.lab.status(),
                lambda: self.cell(sum, [1, 2]),
            )
        )
        self._pressed(what, self._random.random() * 0.02)

    def _times_out(self) -> None:
        code = self._random.choice(STUCK)
        self._doing = f"times_out: {code!r}"
        try:
            self.cell(code, timeout=0.05 + 0.2 * self._random.random())
        except CellError:
            return
        raise AssertionError(f"{code!r} ended by itself")

    def _kills(self) -> None:
        rank = self._random.randrange(2)
        alone = f"if rank != {rank}: dist.all_reduce(x)\nelse: time.sleep(600)"
        code = self._random.choice(("time.sleep(600)", alone, "while True: step(model)", ""))
        self._doing = f"kills: rank {rank} in {code!r}"
        pid = self.lab.pids()[f"rank {rank}"]
        if code:
            thread = threading.Timer(0.3 * self._random.random(), os.kill, (pid, signal.SIGKILL))
            thread.start()
            try:
                self.cell(code)
            except CellError as error:
                failed = set(error.failures)
            else:
                raise AssertionError(f"no error although rank {rank} was killed")
            finally:
                thread.join()
            assert rank in failed
        else:
            os.kill(pid, signal.SIGKILL)
            while rank not in self.lab.session.members.lost():
                time.sleep(0.001)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Gives a new process what the other one has, as a user would."""
        self.cell("1")  # rejoins
        self.cell(SETUP)
        self._kept = [0, 0]

    def _replaces(self) -> None:
        self.lab.rejoin(replace=[self._random.randrange(2)])
        self._begin_anew()

    def _restarts(self) -> None:
        self.lab.restart()
        self._begin_anew()

    def _queues(self) -> None:
        """Cells that wait for each other; one of them fails, is interrupted, or none."""
        end = self._random.choice(("time.sleep(0.05)", "1 / 0", "time.sleep(600)"))
        first = self.cell(end, wait=False)
        others = [self.cell("1", wait=False) for _ in range(self._random.randrange(1, 4))]
        if "600" in end:
            time.sleep(0.1 * self._random.random())
            first.interrupt()
        for run in (first, *others):
            try:
                run.wait()
            except CellError:
                assert end != "time.sleep(0.05)"
            else:  # one that was sent after the first had failed did not wait for it
                assert run is not first or end == "time.sleep(0.05)"

    def _shares(self) -> None:
        array = np.arange(self._random.choice((10, 1 << 18)), dtype=float)
        self.lab.push({"pushed": array})
        pulled = self.lab.pull("pushed")
        assert all((pulled[rank] == array).all() for rank in (0, 1))
        assert self.cell(lambda n: n + 1, 1).values == {0: 2, 1: 2}
        self.cell("del pushed")

    def _one_rank(self) -> None:
        rank = self._random.randrange(2)
        assert self.cell("rank", ranks=[rank]).values == {rank: rank}

    def _looks(self) -> None:
        self.lab.status()
        self.lab.health()
        self.lab.doctor()

    def _models(self) -> None:
        """A new model in the place of the old one."""
        self.cell("torch.manual_seed(0); model = new_model(); [step(model) for _ in range(3)]")

    def _figures(self) -> None:
        """Displays and tracebacks in cells."""
        self.cell("from IPython.display import display, HTML\ndisplay(HTML('<b>x</b>'))\nx + rank")

    def _pressed(self, what: Callable[[], object], delay: float) -> bool:
        """Whether the interrupt button, pressed after `delay` seconds, was answered with KeyboardInterrupt."""
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        seen, failed = False, None
        with contextlib.suppress(KeyboardInterrupt):  # it may come after the end of `what`
            try:
                timer.start()
                what()
            except KeyboardInterrupt:
                seen = True
            except Exception as error:  # noqa: BLE001 - raised again below, when nothing can be pressed any more
                failed = error
            timer.join()
        timer.join()
        if failed is not None:
            raise failed
        return seen

    # What is held

    def _sample(self) -> None:
        at = self.figures.cells
        trees = {f"rank {rank}": int(number) for rank, number in self.lab.run(TRIM).values.items()}
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        for series, value in held(self.lab.pids()).items():
            self.figures.samples[series].append((at, value, trees.get(" ".join(series.split()[:2]), 0)))


EPISODES: dict[Callable[[Soak], None], float] = {
    Soak._plain: 12,
    Soak._prints: 4,
    Soak._raises: 6,
    Soak._interrupts: 10,
    Soak._interrupts_anything: 6,
    Soak._times_out: 2,
    Soak._kills: 3,
    Soak._replaces: 1,
    Soak._restarts: 1,
    Soak._queues: 4,
    Soak._shares: 4,
    Soak._one_rank: 3,
    Soak._looks: 2,
    Soak._models: 2,
    Soak._figures: 2,
}

DEADLY = {Soak._kills, Soak._replaces, Soak._restarts}


def held(pids: Mapping[str, int]) -> dict[str, float]:
    """Memory (KiB of its own), open files, threads and anonymous segments of this process and these; /dev/shm.

    Series of ranks end with ``#pid``: a rank's process may be replaced.
    """
    found: dict[str, float] = {"/dev/shm": len(os.listdir("/dev/shm"))}
    for name, pid in {"client": os.getpid(), **pids}.items():
        mark = f"#{pid}" if name.startswith("rank") else ""
        process = psutil.Process(pid)
        found[f"{name} KiB{mark}"] = process.memory_full_info().uss / 1024
        found[f"{name} files{mark}"] = process.num_fds()
        found[f"{name} threads{mark}"] = process.num_threads()
        found[f"{name} segments{mark}"] = _segments(pid)
    found["processes"] = len(psutil.Process().children(recursive=True))
    return found


def _segments(pid: int) -> int:
    """Anonymous segments that a process maps or holds open."""
    mapped = {line.split()[4] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/memfd:" in line}
    opened = sum(1 for each in Path(f"/proc/{pid}/fd").iterdir() if "/memfd:" in _target(each))
    return len(mapped) + opened


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def main(cells: int, seed: int) -> None:
    """Runs so many random cells on two ranks."""
    with Lab(2, hang_seconds=None) as lab:
        soak = Soak(lab, seed)
        try:
            soak.run(cells)
        finally:
            print(f"seed {seed}: {soak.figures.report()}")
    print(json.dumps(soak.figures.trends()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
