"""The dashboard's page alone: what an update costs the browser, without ranks, kernel and JupyterLab beside it.

Made-up steps are in the page before the measurement; then it takes one message after the other, so many a second. Two
versions can be compared in turns on a machine that has other work: processor time of all processes of the browser, and
tasks of the page over 50 ms, which keep it from answering a reader.
"""

from __future__ import annotations

import base64
import statistics
import time
from typing import Any

import psutil

from ddp_lab.bench.measuring.command import option
from ddp_lab.command_line import count, seconds

_MOST = 200  # messages that are kept in the page; they come again and again
_AT_ONCE = 10
_KEEP = """(messages) => (window.queue ??= []).push(...messages.map(
  ([header, body]) => [header, Uint8Array.from(atob(body), (one) => one.charCodeAt(0)).buffer]))"""
_MEASURE = """([rate, seconds]) => new Promise((done) => {
  const root = document.querySelector('.ddp-lab');
  const first = root.statistics();
  const tasks = [];
  const keep = (list) => tasks.push(...list.getEntries().map((task) => task.duration));
  new PerformanceObserver(keep).observe({type: 'longtask'});
  let sent = 0;
  const timer = setInterval(() => {
    const [header, body] = window.queue[sent % window.queue.length];
    const by = Math.floor(sent / window.queue.length) * window.queue.length;
    const steps = header.steps.map((one) => ({...one, step: one.step + by, began: one.began + by}));
    window.emit('msg:custom', {...header, steps}, [new DataView(body)]);
    sent += 1;
    if (sent < rate * seconds) return;
    clearInterval(timer);
    setTimeout(() => done({first, last: root.statistics(), tasks, sent}), 200);
  }, 1000 / rate);
})"""


def measure(
    ranks: int = 8, buckets: int = 50, view: str = "Timeline", before: int = 40, rate: int = 30, seconds: float = 10.0
) -> dict[str, Any]:
    """Measures the page with one tab open.

    Args:
        ranks, buckets: of the made-up steps.
        view: the title of the tab.
        before: how many steps the run has had, which the strip shows.
        rate: messages per second, each with one step.
        seconds: how long.

    Returns:
        ``updates_per_second`` (pictures with a new step), ``messages_per_second``, ``cpu_ms`` (of the browser's
        processes, for each message), ``script_ms`` (drawing, for each picture), ``long_tasks`` (ms of each task of the
        page over 50 ms).

    Raises:
        DdpLabError: Chromium is missing.
    """
    from ddp_lab.timeline.timeline import Timeline
    from tests.benchmarks.browser import chromium_browser, need_chromium
    from tests.browser.bare_page import BarePage
    from tests.training_events import Training

    need_chromium()
    timeline, now = Timeline(), time.monotonic_ns()
    training = Training(ranks, buckets, parameters=1, compute_ms=20, forward_ms=8, reduce_ms=0.5)
    for step in range(before):
        training.feed(timeline, step, now + step * 60 * 10**6)
    with chromium_browser() as browser:
        page = browser.new_page(viewport={"width": 1360, "height": 1000})
        shown = BarePage(page, timeline)
        shown.until(lambda: page.locator(".ddp-tab:visible").count(), "the tabs")
        shown.open(view)
        for at in range(before, before + _MOST, _AT_ONCE):
            steps = range(at, at + _AT_ONCE)
            for step in steps:
                training.feed(timeline, step, now + step * 60 * 10**6)
            page.evaluate(_KEEP, [_message(shown, step) for step in steps])
        begin = _processor_seconds()
        found = page.evaluate(_MEASURE, [rate, seconds])
        spent = _processor_seconds() - begin
        shown.close()
    first, last = found["first"], found["last"]
    passed, updates = (last["time"] - first["time"]) / 1e3, last["updates"] - first["updates"]
    return {
        **{"ranks": ranks, "buckets": buckets, "view": view},
        "updates_per_second": updates / passed,
        "messages_per_second": found["sent"] / passed,
        "cpu_ms": 1e3 * spent / found["sent"],
        "script_ms": (last["busy"] - first["busy"]) / max(last["draws"] - first["draws"], 1),
        "long_tasks": found["tasks"],
    }


def _message(shown: Any, step: int) -> list[Any]:
    """One step as a message, whose buffer is text."""
    from ddp_lab.dashboard.step_feed import encode_steps

    header, body = encode_steps(shown.dashboard._shown.frames.read(0, [step]))
    return [header, base64.b64encode(body).decode()]


def _processor_seconds() -> float:
    """Of all processes that this one has started: those of the browser."""
    return sum(sum(one.cpu_times()[:2]) for one in psutil.Process().children(recursive=True))


def table(found: dict[str, Any]) -> str:
    """The figures as lines."""
    tasks = [round(one) for one in found["long_tasks"]]
    typical = f", median {statistics.median(tasks):.0f}" if tasks else ""
    return (
        f"the page alone: {found['ranks']} ranks, {found['buckets']} buckets, tab {found['view']}, in Chromium\n"
        f"  updates per second                      {found['updates_per_second']:8.1f}\n"
        f"  messages per second                     {found['messages_per_second']:8.1f}\n"
        f"  the browser's processor time a message  {found['cpu_ms']:8.1f} ms\n"
        f"  script of a picture (mean)              {found['script_ms']:8.2f} ms\n"
        f"  tasks of the page over 50 ms            {len(tasks):8d} (longest {max(tasks, default=0)} ms{typical})"
    )


OPTIONS = (
    option("--ranks", type=count),
    option("--buckets", type=count),
    option("--view", help="the title of the tab that is open"),
    option("--before", type=count, help="how many steps the run has had"),
    option("--rate", type=count, help="messages per second"),
    option("--seconds", type=seconds),
)
