"""Ranks that print without pause: is the page usable, is a line lost?

In Chromium every rank prints numbered lines at a given rate while a script in the page notes each frame and each task
over 50 ms; then the same without a line. Afterwards the numbers in each rank's log and in the cell's result are
compared with what was printed. Ranks, kernel, server and browser share the machine: the cell without output says what
that costs.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from ddp_lab.bench.measuring.command import option
from ddp_lab.command_line import count, seconds
from tests.waiting import wait_until

_START = """
%load_ext ddp_lab
%cluster start -n {ranks}
"""
# Each rank keeps its own clock: it prints what is due, a hundredth of a second's lines at a time.
_PRINT = """%%distributed
import time
begin, printed = time.monotonic(), 0
while (passed := time.monotonic() - begin) < {seconds}:
    due = min(int(passed * {rate}), int({seconds} * {rate}))
    for printed in range(printed + 1, due + 1):
        print(f"line {{printed}}: step {{printed // 10}} of rank {{rank}}, loss {{1 / printed:.6f}}")
    time.sleep(0.01)
for printed in range(printed + 1, int({seconds} * {rate}) + 1):
    print(f"line {{printed}}: step {{printed // 10}} of rank {{rank}}, loss {{1 / printed:.6f}}")
printed, time.monotonic() - begin
"""
_SLEEP = "%%distributed\nimport time\ntime.sleep({seconds})"
_COUNT = """
import json, ddp_lab
result = printing
def numbers(lines):
    return [int(line[5:line.index(":")]) for line in lines if line.startswith("line ")]
found = {}
for rank, (printed, seconds) in result.values.items():
    expected = list(range(1, printed + 1))
    with result.logs[rank].open() as log:
        found[rank] = {
            "printed": printed,
            "seconds": seconds,
            "logged": len(numbers(log)),
            "log_whole": numbers(open(result.logs[rank])) == expected,
            "result_whole": numbers(result.text(rank).splitlines()) == expected,
        }
print(json.dumps(found))
"""
_KEEP = "import ddp_lab\nprinting = ddp_lab.current_cluster().last_result"
_WATCH = """() => {
  window.watched = {frames: [], tasks: [], updates: 0};
  const watched = window.watched;
  const observer = new PerformanceObserver(
    (list) => watched.tasks.push(...list.getEntries().map((task) => task.duration)));
  observer.observe({type: 'longtask'});
  const cell = window.jupyterapp.shell.currentWidget.content.widgets[INDEX];
  const count = () => { watched.updates += 1; };
  cell.model.outputs.changed.connect(count);
  const first = performance.now();
  let last = first;
  const frame = (now) => {
    watched.frames.push([now - first, now - last]);
    last = now;
    if (window.watched === watched) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
  window.stopWatching = () => {
    cell.model.outputs.changed.disconnect(count);
    observer.disconnect();
    window.watched = null;
    return watched;
  };
}"""
_TASKS = "TaskDuration"  # seconds of the page's main thread
_SHOWN = """(index) => {
  const cell = window.jupyterapp.shell.currentWidget.content.widgets[index];
  const texts = [...cell.outputArea.node.querySelectorAll("pre")].map((one) => one.innerText.trimEnd());
  return texts.filter(Boolean).join("\\n");
}"""


def measure(ranks: int = 8, rate: int = 1_000, seconds: float = 30.0) -> dict[str, Any]:
    """Measures one printing cell and one silent one.

    Args:
        ranks: how many print.
        rate: lines a second of each.
        seconds: how long.

    Returns:
        ``printing`` and ``silent``: ``frames`` a second, ``longest_frame_ms``, ``frame_ms_99`` (99th percentile),
        ``longest_frames`` (when each of the five longest ended, and its length, in ms),
        ``long_tasks_ms`` (each task of the page over 50 ms), ``updates_per_second``, ``busy_share`` (CPU time of the
        page's main thread, of the time); ``of_ranks``: rank -> lines printed and logged, seconds, and whether log and
        result have every line in order; ``shown`` (lines on the page), ``note`` (what it says is left out), and what
        was asked for.

    Raises:
        DdpLabError: Chromium is missing, or a cell failed.
    """
    from tests.benchmarks.browser import notebook_alone, printed

    values = {"ranks": ranks, "rate": rate, "seconds": seconds}
    cells = [cell.format(**values) for cell in (_START, _PRINT, _SLEEP)]
    cells = [cells[0], cells[1], _KEEP, _COUNT, cells[2], "%cluster stop"]
    found: dict[str, Any] = {}
    with notebook_alone(*cells) as notebook:
        page = notebook.page
        notebook.run_cell(0)
        chrome = page.context.new_cdp_session(page)
        chrome.send("Performance.setTimeDomain", {"timeDomain": "threadTicks"})  # not while others have the core
        chrome.send("Performance.enable")
        for name, cell in (("printing", 1), ("silent", 4)):
            page.evaluate(_WATCH.replace("INDEX", str(cell)))
            before = _busy(chrome)
            notebook.run_cell(cell, wait=False)
            wait_until(partial(notebook.executions, cell), f"the end of cell {cell}")
            found[name] = _summary(page.evaluate("() => window.stopWatching()"), _busy(chrome) - before)
            if cell == 1:
                text = str(page.evaluate(_SHOWN, cell))
                notebook.run_cell(2)
                notebook.run_cell(3)
        found["of_ranks"] = printed(notebook.save().cells[3])
    notes = [line.strip() for line in text.splitlines() if "not shown" in line]
    return {**found, "shown": len(text.splitlines()), "note": notes[0] if notes else "", **values}


def _busy(chrome: Any) -> float:
    """CPU seconds of the page's main thread so far."""
    metrics = {each["name"]: each["value"] for each in chrome.send("Performance.getMetrics")["metrics"]}
    return float(metrics[_TASKS])


def _summary(watched: dict[str, Any], busy: float) -> dict[str, Any]:
    frames = [took for _, took in watched["frames"][1:]]
    passed = sum(frames) / 1e3
    return {
        "frames": len(frames) / passed,
        "longest_frame_ms": max(frames),
        "longest_frames": sorted(watched["frames"][1:], key=lambda frame: -frame[1])[:5],
        "frame_ms_99": statistics.quantiles(frames, n=100)[-1],
        "long_tasks_ms": watched["tasks"],
        "updates_per_second": watched["updates"] / passed,
        "busy_share": busy / passed,
    }


def table(found: dict[str, Any]) -> str:
    """The figures as lines."""
    ranks = found["of_ranks"].values()
    lines = [
        f"{len(ranks)} ranks print {found['rate']:,} lines a second each for {found['seconds']:g} s, in Chromium",
        f"  lines printed / in the logs      {sum(one['printed'] for one in ranks):,} / "
        f"{sum(one['logged'] for one in ranks):,}",
        f"  every line in order in log and result: {all(one['log_whole'] and one['result_whole'] for one in ranks)}",
        f"  lines on the page                {found['shown']:,}",
        f"  {'':32} {'printing':>10} {'silent':>10}",
    ]
    for title, name in (
        ("frames a second", "frames"),
        ("longest frame (ms)", "longest_frame_ms"),
        ("99 % of frames within (ms)", "frame_ms_99"),
        ("updates of the cell a second", "updates_per_second"),
    ):
        lines.append(f"  {title:32} {found['printing'][name]:10.1f} {found['silent'][name]:10.1f}")
    busy = [100 * found[name]["busy_share"] for name in ("printing", "silent")]
    lines.append(f"  {'CPU of the page (% of a core)':32} {busy[0]:10.1f} {busy[1]:10.1f}")
    longest = [max(found[name]["long_tasks_ms"], default=0.0) for name in ("printing", "silent")]
    counts = [len(found[name]["long_tasks_ms"]) for name in ("printing", "silent")]
    lines.append(f"  {'longest task over 50 ms (ms)':32} {longest[0]:10.1f} {longest[1]:10.1f}")
    lines.append(f"  {'tasks over 50 ms':32} {counts[0]:10} {counts[1]:10}")
    return "\n".join(lines)


OPTIONS = (
    option("--ranks", type=count),
    option("--rate", type=count, help="lines a second of each rank"),
    option("--seconds", type=seconds, help="how long they print"),
)
