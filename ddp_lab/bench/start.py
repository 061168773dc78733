"""Compares the time from a kernel to the first collective: `%cluster start` and plain ipyparallel.

Each measurement has a fresh kernel. The plain side does what a notebook must do without ddp_lab: start a cluster,
number the engines, choose a port, `init_process_group`, and one all-reduce. The sides alternate; medians are compared,
and those that are too noisy are not shown (`ddp_lab.bench.measuring.noise`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jupyter_client.manager import start_new_kernel

from ..command_line import count
from ..errors import DdpLabError
from .measuring import command, noise

__all__ = ["kernel", "main", "measure"]

_LIMIT_S = 120.0  # until a kernel answers
_OURS = (
    "%load_ext ddp_lab\n%cluster start -n {ranks}",
    "%%distributed\nt = torch.ones(1); dist.all_reduce(t); assert t.item() == {ranks}",
    "%cluster stop",
)
_PLAIN = (
    "import ipyparallel, socket\n"
    "_cluster = ipyparallel.Cluster(n={ranks}{options})\n"
    "_client = _cluster.start_and_connect_sync(activate=True)\n"
    "_socket = socket.socket(); _socket.bind(('127.0.0.1', 0)); _port = _socket.getsockname()[1]; _socket.close()\n"
    "_view = _client[:]; _view.block = True\n"
    "_view.scatter('rank', list(range({ranks})), flatten=True); _view['port'] = _port",
    "%%px\nimport os\n"
    "os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='{ranks}', MASTER_ADDR='127.0.0.1',\n"
    "                  MASTER_PORT=str(port))\n"
    "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    "t = torch.ones(1); dist.all_reduce(t); assert t.item() == {ranks}",
    "_cluster.stop_cluster_sync()",
)
_TUNED = ", delay=0, controller_args=['--HeartMonitor.period=200']"
_SIDES = {
    "ddp_lab": (_OURS, ""),
    "ipyparallel, tuned": (_PLAIN, _TUNED),
    "ipyparallel": (_PLAIN, ""),
}


@contextmanager
def kernel() -> Iterator[Callable[[str], float]]:
    """A fresh Python kernel, driven as a notebook drives it.

    Yields:
        What runs a cell there, and returns its seconds until the kernel is idle again.
    """
    manager, client = start_new_kernel(startup_timeout=_LIMIT_S, kernel_name="python3")

    def run(code: str) -> float:
        begin = time.perf_counter()
        reply = client.execute_interactive(code, timeout=_LIMIT_S, output_hook=lambda _: None)["content"]
        seconds = time.perf_counter() - begin
        if reply["status"] == "error":
            raise DdpLabError(f"the cell {code.splitlines()[0]!r} failed: {reply['ename']}: {reply['evalue']}")
        return seconds

    try:
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def measure(ranks: int = 2, rounds: int = 5, tolerance: float = noise.TOLERANCE) -> dict[str, Any]:
    """Starts clusters in turn, each in a kernel of its own.

    Args:
        ranks: number of ranks.
        rounds: measurements of each side.
        tolerance: see `noise.figure`.

    Returns:
        ``seconds``: side -> from sending the first cell until the cell with the first collective had ended;
        ``medians`` and ``figures`` of them; what was asked for.
    """
    seconds: dict[str, list[float]] = {side: [] for side in _SIDES}
    for _ in range(rounds):
        for side, ((start, collective, stop), options) in _SIDES.items():
            with kernel() as run:
                cells = [cell.format(ranks=ranks, options=options) for cell in (start, collective)]
                seconds[side].append(sum(run(cell) for cell in cells))
                run(stop)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    about = {"ranks": ranks, "rounds": rounds, "seconds": seconds, "medians": medians}
    return about | {"figures": _judged(seconds, tolerance)}


def _judged(seconds: dict[str, list[float]], tolerance: float) -> dict[str, dict[str, noise.Figure]]:
    """Of each side its seconds, and ours over it, as figures; each kernel counts as a set of processes."""
    found = {side: {"seconds": noise.figure(values, tolerance=tolerance)} for side, values in seconds.items()}
    for side in seconds.keys() - {"ddp_lab"}:
        ratios = [ours / its for ours, its in zip(seconds["ddp_lab"], seconds[side], strict=True)]
        found[side]["ours / it"] = noise.figure(ratios, tolerance=tolerance)
    return found


def _table(result: dict[str, Any], keep: bool) -> str:
    lines = [["", "median", "min", "max", "ours / it"]]
    for side, one in result["figures"].items():
        values, ratio = one["seconds"], one.get("ours / it")
        told = keep or not values["noisy"]
        least, most = (f"{end(values['samples']):.2f}" if told else "-" for end in (min, max))
        compared = noise.shown(ratio, f"{ratio['median']:.2f}", keep) if ratio else "-"
        lines.append([side, noise.shown(values, f"{values['median']:.2f}", keep), least, most, compared])
    about = f"kernel up -> first collective of {result['ranks']} ranks, {result['rounds']} rounds, seconds"
    return "\n".join([about, *command.aligned(lines, left=1)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    options = [
        command.option("-n", "--ranks", type=count, help="number of ranks"),
        command.option("--rounds", type=count, help="number of measurements of each"),
    ]
    return command.run("ddp-lab bench start", __doc__, measure, _table, options, argv)
