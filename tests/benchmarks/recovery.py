"""How soon control is back, and a collective works again.

Each state is provoked on real ranks, several times: cells that wait in it are interrupted with SIGINT, as a notebook's
stop button does. Control is back when `Cluster.run` has raised, or the restart has returned; the next cell is a
collective over all ranks.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddp_lab.bench.measuring.command import option
from ddp_lab.cluster.cluster import Cluster
from ddp_lab.command_line import count
from ddp_lab.errors import CellError, DdpLabError
from ddp_lab.output.board import SilentBoard
from ddp_lab.protocol.messages import Ping

_LIMIT_SECONDS = 60.0

SETUP = """
import ctypes, time
x = torch.ones(4); kept = 'kept on %d' % rank; pair = dist.new_group([0, 1])
def pause(gradient):
    if rank == 1: time.sleep(600)
class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        time.sleep(600)
class Items(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): time.sleep(600)
slow = ddp_lab.DistributedDataParallel(Slow())
model = ddp_lab.DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)]), bucket_cap_mb=0.0001
)
model(x).sum().backward()
model.module[2].weight.register_hook(pause)
loader = torch.utils.data.DataLoader(Items(), num_workers=2)
"""


@dataclass(frozen=True)
class State:
    """A cell that does not end by itself.

    Attributes:
        code: the cell.
        inside: for each rank, text that its stack shows when it is there.
    """

    code: str
    inside: tuple[str, str]


STATES = {
    "Python loop": State("while True: pass", ("while True", "while True")),
    "sleep": State("time.sleep(600)", ("time.sleep(600)", "time.sleep(600)")),
    "collective that one rank does not enter": State(
        "if rank == 0: dist.all_reduce(x)\nelse: time.sleep(600)", ("all_reduce", "time.sleep")
    ),
    "unmatched collectives": State(
        "if rank == 0: dist.all_reduce(x)\nelse: dist.broadcast(x, 0); dist.barrier()", ("all_reduce", "broadcast")
    ),
    "collective of a user's group": State(
        "if rank == 0: dist.all_reduce(x)\nelse: dist.all_reduce(x, group=pair)", ("all_reduce", "group=pair")
    ),
    "backward with buckets in flight": State("model(x).sum().backward()", ("run_backward(", "time.sleep")),
    "forward": State("slow(x)", ("time.sleep", "time.sleep")),
    "DataLoader with workers": State("for batch in loader: pass", ("in loader", "in loader")),
    "C call without the GIL": State("ctypes.CDLL(None).sleep(600)", ("CDLL", "CDLL")),
}


def interrupted(lab: Cluster, state: State) -> float:
    """Interrupts a cell in this state; returns seconds from the signal until control is back."""
    sent: list[float] = []
    ended = threading.Event()

    def press() -> None:
        while not ended.wait(0.01):
            if _inside(lab, state):
                sent.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=press)
    thread.start()
    try:
        lab.run(state.code, timeout=_LIMIT_SECONDS, board=SilentBoard())
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    finally:
        ended.set()
        thread.join()
    raise DdpLabError(f"the cell {state.code!r} ended by itself")


def _inside(lab: Cluster, state: State) -> bool:
    replies = lab.wire.request(range(len(state.inside)), Ping(stack=True), 1.0)
    return all(
        rank in replies and any(text in frame for frame in replies[rank].stack)
        for rank, text in enumerate(state.inside)
    )


def _raised(lab: Cluster) -> float:
    """Rank 1 raises while rank 0 waits; returns seconds from then until control is back."""
    code = "if rank == 1:\n    time.sleep(0.05)\n    raise ValueError\ndist.all_reduce(x)"
    try:
        lab.run(code, board=SilentBoard())
    except CellError as error:
        return time.monotonic() - next(iter(error.failures.values())).time_ns / 1e9
    raise DdpLabError("a rank raised, and the cell did not fail")


def _killed(lab: Cluster) -> float:
    """Rank 1 is killed while rank 0 waits; returns seconds from then until control is back."""
    begun: list[float] = []

    def kill() -> None:
        time.sleep(0.3)
        begun.append(time.monotonic())
        os.kill(lab.pids()["rank 1"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        lab.run("import time\nif rank == 0: dist.all_reduce(torch.ones(1))\ntime.sleep(600)", board=SilentBoard())
    except CellError:
        return time.monotonic() - begun[0]
    finally:
        thread.join()
    raise DdpLabError("a rank was killed, and the cell did not fail")


def _seconds(action: Callable[[], Any]) -> float:
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def _collective(lab: Cluster) -> float:
    """Seconds of a cell with a collective over all ranks, which first repairs what is broken."""
    begin = time.monotonic()
    values = lab.run("w = torch.ones(1); dist.all_reduce(w); w.item()", board=SilentBoard()).values
    if set(values.values()) != {float(lab.world_size)}:
        raise DdpLabError(f"the collective gave {values}")
    return time.monotonic() - begin


def measure(times: int = 20, states: Sequence[str] = tuple(STATES), backend: str = "gloo") -> dict[str, Any]:
    """Provokes each state and measures.

    Args:
        times: how often each.
        states: of `STATES`. Over ``"shm"`` unmatched collectives do not hang: they are told.
        backend: of the cluster's groups.

    Returns:
        what happened -> ``back_s`` and ``works_s`` (seconds, one for each time: until control is back, and from then
        until a collective has worked), ``kept`` (how often processes and variables were the same after it).
    """
    found: dict[str, Any] = {}
    with Cluster(2, backend=backend, hang_seconds=None) as lab:
        lab.run(SETUP, board=SilentBoard())
        for name in states:
            found[name] = _repeat(lab, partial(interrupted, lab, STATES[name]), times)
        found["one rank raises"] = _repeat(lab, lambda: _raised(lab), times)
        found["one rank is killed"] = _repeat(lab, lambda: _killed(lab), times)
        found["one rank is restarted"] = _repeat(lab, lambda: _seconds(lambda: lab.rejoin(replace=[1])), times)
        found["all ranks are restarted"] = _repeat(lab, lambda: _seconds(lab.restart), times)
    return {"times": times, "found": found}


def _repeat(lab: Cluster, provoke: Callable[[], float], times: int) -> dict[str, Any]:
    back, works, kept = [], [], 0
    for _ in range(times):
        before = _kept(lab)
        back.append(provoke())
        works.append(_collective(lab))
        kept += before == _kept(lab)
    return {"back_s": back, "works_s": works, "kept": kept}


def _kept(lab: Cluster) -> Any:
    values = lab.run("import os; os.getpid(), globals().get('kept')", board=SilentBoard()).values
    return list(values.values())


def table(result: dict[str, Any]) -> str:
    """The figures as lines."""
    title = f"2 ranks, {result['times']} times each, milliseconds: median (worst)"
    lines = [title, f"{'':42} {'control back':>16} {'then a collective':>18} {'all kept':>9}"]
    for name, one in result["found"].items():
        back, works = (f"{_ms(statistics.median(one[key]))} ({_ms(max(one[key]))})" for key in ("back_s", "works_s"))
        lines.append(f"{name:42} {back:>16} {works:>18} {one['kept']:>6}/{result['times']}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


OPTIONS = (
    option("--times", type=count, help="how often each state is provoked (default: %(default)s)"),
    option("--states", nargs="+", choices=list(STATES), metavar="STATE"),
    option("--backend", choices=["gloo", "shm"], help="of the cluster (default: %(default)s)"),
)
