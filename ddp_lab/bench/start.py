"""From a kernel that is up to the first collective of two ranks: `%cluster start` against plain ipyparallel by hand.

Each measurement has a fresh kernel. The plain side is what a notebook has to do without ddp_lab: start a cluster,
number the engines, choose a port, `init_process_group`, and one all-reduce. Both take turns; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from .kernel import Kernel

__all__ = ["main", "measure"]

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


def measure(ranks: int, rounds: int, sides: Sequence[str] = tuple(_SIDES)) -> dict[str, list[float]]:
    """Starts clusters in turn, each in a kernel of its own.

    Args:
        ranks: number of ranks.
        rounds: measurements of each side.
        sides: which of ``"ddp_lab"``, ``"ipyparallel"`` and ``"ipyparallel, tuned"`` to measure.

    Returns:
        side -> seconds from sending the first cell until the cell with the first collective had ended.
    """
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            (start, collective, stop), options = _SIDES[side]
            with Kernel() as kernel:
                cells = [cell.format(ranks=ranks, options=options) for cell in (start, collective)]
                seconds[side].append(sum(kernel.run(cell) for cell in cells))
                kernel.run(stop)
    return seconds


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser(prog="ddp-lab bench start", description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    arguments = parser.parse_args(argv)
    seconds = measure(arguments.ranks, arguments.rounds)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    out = sys.stdout
    out.write(f"kernel up -> first collective of {arguments.ranks} ranks, {arguments.rounds} rounds, seconds\n")
    out.write(f"{'':20} {'median':>8} {'min':>8} {'max':>8} {'ours / it':>10}\n")
    for side, values in seconds.items():
        ratio = medians["ddp_lab"] / medians[side]
        out.write(f"{side:20} {medians[side]:8.2f} {min(values):8.2f} {max(values):8.2f} {ratio:10.2f}\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"ranks": arguments.ranks, "seconds": seconds, "medians": medians}))
    return 0
