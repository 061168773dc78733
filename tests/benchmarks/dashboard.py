"""What recording and an open dashboard cost the training.

In JupyterLab in Chromium a notebook shows the dashboard, and with `--views` each of these alone below it, while a cell
trains a workload of `ddp-lab bench step` on Gloo ranks in blocks: recording on (events stream, all views follow), off,
and off again. Kernel, server and browser run on the machine that trains: where ranks leave no core free, they take
turns with them, and the blocks tell what that costs. What recording costs a rank is events a step times ns an event.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ddp_lab.bench.measuring.command import option
from ddp_lab.bench.measuring.workloads import WORKLOADS
from ddp_lab.command_line import count, number_from
from ddp_lab.dashboard.views import VIEWS
from tests.benchmarks.second_look import second_look
from tests.waiting import wait_until

_START = """
import ddp_lab, json
lab = ddp_lab.Cluster({ranks}).start()
_ = lab.run('from ddp_lab.bench.measuring import recording_cost')
if {threads}: _ = lab.run('torch.set_num_threads({threads})')
"""
_SHOW = "{name} = lab.dashboard({view})\n{name}"
_TRAIN = """
from ddp_lab.output.board import SilentBoard
found = lab.run("recording_cost.paired({model!r}, {rounds})", board=SilentBoard()).values[0]
print(json.dumps(found))
"""


def measure(
    ranks: int = 2, model: str = "mlp", rounds: int = 20, views: Sequence[str] = (), threads: int = 0
) -> dict[str, Any]:
    """Measures one training.

    Args:
        ranks: how many.
        model: of `WORKLOADS`.
        rounds: blocks of each kind.
        views: shown alone, each in a cell of its own, besides the dashboard.
        threads: of each rank; 0: as the cluster sets them, so that ranks use all cores.

    Returns:
        ``step_ms`` (recording off), ``events`` a step, ``ns`` an event, ``share`` (their product, of the step), and
        `second_look` of the blocks as ``on / off`` and ``off again / off``; what was asked for.

    Raises:
        DdpLabError: Chromium is missing, or the training failed.
    """
    from tests.benchmarks.browser import notebook_alone, printed

    shown = [_SHOW.format(name=f"view{number}", view=view) for number, view in enumerate(["", *map(repr, views)])]
    train = _TRAIN.format(model=model, rounds=rounds)
    start, last = _START.format(ranks=ranks, threads=threads), len(shown) + 1
    with notebook_alone(start, *shown, train, "lab.stop()", height=1000 * len(shown)) as notebook:
        for cell in range(last):
            notebook.run_cell(cell)
        notebook.run_cell(last, wait=False)
        notebook.page.locator(".ddp-lab").first.scroll_into_view_if_needed()
        wait_until(lambda: notebook.executions(last), "the end of the training")
        found = printed(notebook.save().cells[last])
    off = statistics.median([*found["off"], *found["off again"]])
    return {
        "step_ms": off,
        "events": found["events"],
        "ns": found["ns"],
        "share": found["events"] * found["ns"] / (1e6 * off),
        "on / off": second_look(
            found["on"], [(a + b) / 2 for a, b in zip(found["off"], found["off again"], strict=True)]
        ),
        "off again / off": second_look(found["off again"], found["off"]),
        "ranks": ranks,
        "model": model,
        "rounds": rounds,
        "views": list(views),
        "threads": threads,
    }


def table(found: dict[str, Any]) -> str:
    """The figures as lines."""
    lines = [
        f"{found['model']} on {found['ranks']} Gloo ranks, the dashboard open in Chromium"
        + (f", and {', '.join(found['views'])}" if found["views"] else ""),
        f"  a step without recording      {found['step_ms']:8.2f} ms",
        f"  events of a rank and step     {found['events']:8.0f}, {found['ns']:.0f} ns each: {found['share']:.4%}",
    ]
    for what in ("on / off", "off again / off"):
        one = found[what]
        bounds = f"({1 + one['low']:.3f} to {1 + one['high']:.3f})"
        lines.append(f"  {what:28}  {1 + one['cost']:8.3f} {bounds}, {one['pairs']} blocks each")
    return "\n".join(lines)


OPTIONS = (
    option("--ranks", type=count),
    option("--model", choices=list(WORKLOADS)),
    option("--rounds", type=count, help="blocks of each kind (%(default)s)"),
    option("--threads", type=number_from(0), help="of each rank; 0: ranks share all cores (0)"),
    option("--views", nargs="*", choices=VIEWS, metavar="VIEW", help="shown alone besides the dashboard"),
)
