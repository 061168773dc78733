"""The dashboard's updates a second in Chromium, and Python's time for one.

JupyterLab and Chromium are started, a cluster trains a model whose every layer is a bucket, and the page counts the
pictures that showed something new while the cell ran. Then it trains ten steps a second, and for each step that was
shown the time from its last event on any rank to the first frame after its picture is taken: what a step takes to
arrive before a reader's eyes, at most a frame too long. With `--senders` the
dashboard shows so many ranks that a process of its own replays over the wire, 25 steps a second ([Note: replayed
ranks]), while the cluster's ranks train as many.
"""

from __future__ import annotations

import statistics
from typing import Any

from ddp_lab.bench.measuring.command import option
from ddp_lab.command_line import count, number_from, seconds
from ddp_lab.errors import DdpLabError
from tests.waiting import wait_until

_SENDERS_RATE = 25  # steps a second
_START = """
import ddp_lab
lab = ddp_lab.Cluster({ranks})
_ = lab.start()  # the cluster itself would be shown as a panel
"""
_SHOW = """
dashboard = lab.dashboard()
dashboard
"""
# The ranks' steps, {rate} a second, as so many ranks; these go on until the end.
_SHOW_SENDERS = """
from tests.benchmarks.replayed_ranks import ReplayedRanks
from ddp_lab.dashboard.dashboard import Dashboard
_ = lab.run('train(3.0, {rate})')
replayed = ReplayedRanks(lab.timeline, {senders})
dashboard = Dashboard(replayed.timeline)
dashboard
"""
# A layer has 4 KiB of weights and no bias: with buckets of at most 4 KiB each layer is one.
_MODEL = """
_ = lab.run('''
torch.manual_seed(0)
layers = [torch.nn.Linear(32, 32, bias=False) for _ in range({buckets})]
model = ddp_lab.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=4 / 1024)
inputs = torch.randn(16, 32)
def train(seconds, rate=0):
    import time
    stop, steps = torch.zeros(1), 0
    begin = time.monotonic()
    while not stop:
        model(inputs).sum().backward()
        steps += 1
        if rate:
            time.sleep(max(0.0, begin + steps / rate - time.monotonic()))
        stop.fill_(time.monotonic() - begin > seconds)
        dist.broadcast(stop, 0)
    return steps
_ = train(1.0)
''')
"""
_TRAIN = "steps = lab.run('train({seconds}, {fast})').values[0]"
_READ = """
import dataclasses, json
frame = dashboard._shown.frames.latest()
about = dataclasses.asdict(dashboard.statistics())
print(json.dumps(about | {"trained": steps, "shape": list(frame.shape)}))
"""
_TRAIN_SLOWLY = "_ = lab.run('train({seconds}, 10)')"
_END = "dashboard.close()\nif 'replayed' in globals(): replayed.close()\nlab.stop()"
# When each step ended on its last rank, in ms since 1970, as the page counts.
_READ_ENDS = """
import json, time
timeline = replayed.timeline if "replayed" in globals() else lab.timeline
ends = timeline.steps(last_steps=int({seconds} * {rate})).groupby("step").backward_end_ns.max()
offset = time.time_ns() - time.monotonic_ns()
print(json.dumps({{int(step): (end + offset) / 1e6 for step, end in ends.items()}}))
"""
_WATCH = """() => {
  const root = document.querySelector('.ddp-lab');
  window.shown = [];
  const look = () => {
    const { step, complete } = root.statistics();
    if (complete && step !== window.shown.at(-1)?.[0]) window.shown.push([step, Date.now()]);
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""
_WATCH_TASKS = """() => {
  window.tasks = [];
  const keep = (list) => window.tasks.push(...list.getEntries().map((task) => task.duration));
  new PerformanceObserver(keep).observe({type: 'longtask'});
}"""
_STATISTICS = "() => document.querySelector('.ddp-lab').statistics()"


def measure(
    ranks: int = 8, buckets: int = 50, seconds: float = 10.0, senders: int = 0, view: str = "Timeline"
) -> dict[str, Any]:
    """Measures one training.

    Args:
        ranks: ranks of the cluster.
        buckets: layers of the model, and buckets.
        seconds: how long the cell trains.
        senders: show so many replayed ranks, not those of the cluster; 0: the cluster's.
        view: the title of the tab that is open.

    Returns:
        ``updates_per_second`` (pictures that showed something new), ``messages_per_second``, ``steps_per_second`` (of
        the cluster), ``python_ms`` (median of an update), ``browser_ms`` (mean of a picture's script), ``long_tasks``
        (ms of each task of the page over 50 ms), ``shape``, ``bytes_per_update``; with ten steps a second: ``shown``
        (steps), ``latency_ms`` (median, from a step's last event to the frame after its picture) and ``latency_ms_90``
        (90th percentile).

    Raises:
        DdpLabError: Chromium is missing, or the model got another number of buckets.
    """
    from tests.benchmarks.browser import notebook_alone, open_tab, printed

    values = {"ranks": ranks, "buckets": buckets, "seconds": seconds, "senders": senders}
    values |= {"rate": _SENDERS_RATE, "fast": _SENDERS_RATE} if senders else {"rate": 10, "fast": 0}
    show = _SHOW_SENDERS if senders else _SHOW
    cells = [cell.format(**values) for cell in (_START, _MODEL, show, _TRAIN, _TRAIN_SLOWLY, _READ_ENDS)]
    with notebook_alone(*cells, _READ, _END) as notebook:
        page = notebook.page
        for cell in range(3):
            notebook.run_cell(cell)
        page.wait_for_selector(".ddp-lab")
        open_tab(page, view)
        notebook.run_cell(3, wait=False)
        page.locator(".ddp-lab").scroll_into_view_if_needed()
        page.wait_for_timeout(1_000)
        page.evaluate(_WATCH_TASKS)
        first = page.evaluate(_STATISTICS)
        page.wait_for_timeout(max(seconds - 2.0, 1.0) * 1e3)
        last = page.evaluate(_STATISTICS)
        tasks = page.evaluate("() => window.tasks")
        if notebook.executions(3) is not None:
            raise DdpLabError("the cell had ended before the measurement")
        wait_until(lambda: notebook.executions(3), "the end of the training cell")
        page.evaluate(_WATCH)
        notebook.run_cell(4, wait=False)
        page.locator(".ddp-lab").scroll_into_view_if_needed()  # out of sight nothing is drawn
        wait_until(lambda: notebook.executions(4), "the end of the slow training")
        page.wait_for_timeout(500)
        shown = page.evaluate("() => window.shown")
        notebook.run_cell(5)
        notebook.run_cell(6)
        saved = notebook.save().cells
        ends, found = (printed(saved[cell]) for cell in (5, 6))
    if found["shape"] != [senders or ranks, buckets]:
        raise DdpLabError(f"the dashboard shows {found['shape'][0]} ranks and {found['shape'][1]} buckets")
    asked = {"ranks": ranks, "senders": senders, "long_tasks": tasks}
    latency = _latency(shown, {int(step): end for step, end in ends.items()})
    return asked | _summary(found, first, last, seconds) | latency


def _latency(shown: list[list[float]], ends: dict[int, float]) -> dict[str, Any]:
    """From (step, when it was seen) and when each step had ended, both in ms."""
    known = [at - ends[int(step)] for step, at in shown if step is not None and int(step) in ends]
    if len(known) < 2:
        raise DdpLabError(f"of the steps that were trained slowly the page showed {len(known)}")
    return {
        "shown": len(known),
        "latency_ms": statistics.median(known),
        "latency_ms_90": statistics.quantiles(known, n=10)[-1],
    }


def _summary(found: dict[str, Any], first: dict[str, Any], last: dict[str, Any], seconds: float) -> dict[str, Any]:
    passed = (last["time"] - first["time"]) / 1e3
    return {
        "shape": found["shape"],
        "updates_per_second": (last["updates"] - first["updates"]) / passed,
        "messages_per_second": (last["received"] - first["received"]) / passed,
        "browser_ms": (last["busy"] - first["busy"]) / max(last["draws"] - first["draws"], 1),
        "steps_per_second": found["trained"] / seconds,
        "python_ms": found["median_ms"],
        "bytes_per_update": found["bytes"] / max(found["updates"], 1),
    }


def table(found: dict[str, Any]) -> str:
    """The figures as lines."""
    ranks, buckets = found["shape"]
    tasks = [round(one) for one in found["long_tasks"]]
    senders = found["senders"]
    whose = f"replayed over the wire while {found['ranks']} train" if senders else "that train"
    return (
        f"dashboard of {ranks} ranks {whose}, {buckets} buckets, in Chromium\n"
        f"  updates a second seen in the browser  {found['updates_per_second']:8.1f}\n"
        f"  messages a second                     {found['messages_per_second']:8.1f}\n"
        f"  training steps a second               {found['steps_per_second']:8.1f}\n"
        f"  the page's time for a picture (mean)  {found['browser_ms']:8.2f} ms\n"
        f"  tasks of the page over 50 ms (ms)     {tasks or 'none'}\n"
        f"  Python's time for an update (median)  {found['python_ms']:8.2f} ms\n"
        f"  bytes of an update                    {found['bytes_per_update']:8.0f}\n"
        f"while {_SENDERS_RATE if senders else 10} steps come a second: {found['shown']} steps were shown\n"
        f"  last event to drawn pixel (median)    {found['latency_ms']:8.0f} ms\n"
        f"  last event to drawn pixel (90 %)      {found['latency_ms_90']:8.0f} ms"
    )


OPTIONS = (
    option("--ranks", type=count),
    option("--buckets", type=count),
    option("--senders", type=number_from(0), help="show so many replayed ranks, not the cluster's"),
    option("--seconds", type=seconds, help="how long the cell trains"),
    option("--view", help="the title of the tab that is open"),
)
