"""The dashboard as a reader sees it: updates a second in Chromium while a cell trains, and Python's time for one.

JupyterLab and Chromium are started, a cluster trains a model whose every layer is a bucket, and the page counts the
pictures that showed something new while the cell ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DdpLabError

__all__ = ["main", "measure"]

_START = """
import ddp_lab
lab = ddp_lab.Cluster({ranks})
lab.start()
dashboard = lab.dashboard()
dashboard
"""
# A layer has 4 KiB of weights and no bias: with buckets of at most 4 KiB each layer is one.
_MODEL = """
_ = lab.run('''
torch.manual_seed(0)
layers = [torch.nn.Linear(32, 32, bias=False) for _ in range({buckets})]
model = ddp_lab.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=4 / 1024)
inputs = torch.randn(16, 32)
def train(seconds):
    import time
    stop, steps = torch.zeros(1), 0
    begin = time.monotonic()
    while not stop:
        model(inputs).sum().backward()
        steps += 1
        stop.fill_(time.monotonic() - begin > seconds)
        dist.broadcast(stop, 0)
    return steps
_ = train(1.0)
''')
"""
_TRAIN = "steps = lab.run('train({seconds})').values[0]"
_READ = """
import dataclasses, json
frame = dashboard._store.latest()
print(json.dumps({"steps": steps, "shape": list(frame.shape), **dataclasses.asdict(dashboard.statistics())}))
"""
_STATISTICS = "() => document.querySelector('.ddp-lab').statistics()"


def measure(ranks: int = 8, buckets: int = 50, seconds: float = 10.0) -> dict[str, Any]:
    """Measures one training.

    Args:
        ranks: ranks of the cluster.
        buckets: layers of the model, and buckets.
        seconds: how long the cell trains.

    Returns:
        ``updates_per_second`` (pictures that showed something new), ``messages_per_second``, ``steps_per_second``,
        ``python_ms`` (median of an update), ``browser_ms`` (mean of a picture's script), ``shape``,
        ``bytes_per_update``.

    Raises:
        DdpLabError: Chromium is missing, or the model got another number of buckets.
    """
    from .browser import NotebookPage, chromium, chromium_browser, jupyterlab, until

    if chromium() is None:
        raise DdpLabError("this benchmark needs Chromium (on Debian: apt-get install chromium)")
    cells = (_START, _MODEL, _TRAIN, _READ)
    with tempfile.TemporaryDirectory() as folder, jupyterlab(Path(folder)) as lab, chromium_browser() as browser:
        name = lab.write(*(cell.format(ranks=ranks, buckets=buckets, seconds=seconds) if cell is not _READ else cell
                           for cell in cells), "lab.stop()")  # fmt: skip
        page = browser.new_page(viewport={"width": 1360, "height": 1000})
        notebook = NotebookPage(page, lab, name)
        notebook.start_kernel()
        try:
            notebook.run_cell(0)
            page.wait_for_selector(".ddp-lab")
            page.locator(".ddp-lab").scroll_into_view_if_needed()
            notebook.run_cell(1)
            notebook.run_cell(2, wait=False)
            page.wait_for_timeout(1_000)
            first = page.evaluate(_STATISTICS)
            page.wait_for_timeout(max(seconds - 2.0, 1.0) * 1e3)
            last = page.evaluate(_STATISTICS)
            if notebook.executions(2) is not None:
                raise DdpLabError("the cell had ended before the measurement")
            until(lambda: notebook.executions(2), 60, "the end of the training cell")
            notebook.run_cell(3)
            found = json.loads(notebook.save().cells[3].outputs[0].text)
        finally:
            notebook.run_cell(4)
            notebook.shut_down()
    if found["shape"] != [ranks, buckets]:
        raise DdpLabError(f"the model has {found['shape'][1]} buckets, not {buckets}")
    return _summary(found, first, last, seconds)


def _summary(found: dict[str, Any], first: dict[str, Any], last: dict[str, Any], seconds: float) -> dict[str, Any]:
    passed = (last["time"] - first["time"]) / 1e3
    return {
        "shape": found["shape"],
        "updates_per_second": (last["updates"] - first["updates"]) / passed,
        "messages_per_second": (last["received"] - first["received"]) / passed,
        "browser_ms": (last["busy"] - first["busy"]) / max(last["draws"] - first["draws"], 1),
        "steps_per_second": found["steps"] / seconds,
        "python_ms": found["median_ms"],
        "bytes_per_update": found["bytes"] / max(found["updates"], 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    about = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser(prog="ddp-lab bench widget", description=about)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--buckets", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the cell trains")
    parser.add_argument("--json", type=Path, help="write the full result here")
    given = parser.parse_args(argv)
    summary = measure(given.ranks, given.buckets, given.seconds)
    ranks, buckets = summary["shape"]
    sys.stdout.write(
        f"dashboard of {ranks} ranks, {buckets} buckets, in Chromium while a cell trains\n"
        f"  updates a second seen in the browser  {summary['updates_per_second']:8.1f}\n"
        f"  messages a second                     {summary['messages_per_second']:8.1f}\n"
        f"  training steps a second               {summary['steps_per_second']:8.1f}\n"
        f"  the page's time for a picture (mean)  {summary['browser_ms']:8.2f} ms\n"
        f"  Python's time for an update (median)  {summary['python_ms']:8.2f} ms\n"
        f"  bytes of an update                    {summary['bytes_per_update']:8.0f}\n"
    )
    if given.json:
        given.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return 0
