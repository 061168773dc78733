"""The live dashboard of a job that `ddp-lab run` runs, in a JupyterLab that has no ranks of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from ddp_lab.protocol import journal
from tests.benchmarks.browser import Lab, NotebookPage
from tests.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]
# Fifty steps a second; without an optimizer, whose import costs seconds.
_SCRIPT = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
while True:
    time.sleep(0.02)
    model(torch.randn(4, 8)).sum().backward()
"""
_STATISTICS = "() => document.querySelector('.ddp-lab').statistics()"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run of two ranks that trains until it is stopped, once both have begun."""
    folder, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "ddp_lab", "run", "--standalone", "--nproc-per-node", "2", "--record", str(folder)]
    process = subprocess.Popen(
        [*command, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until(lambda: all(_bytes(journal.path_of(folder, rank)) > 20_000 for rank in range(2)), "two journals")
        yield folder
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.soak
def test_a_running_job_is_followed_live(lab_page: Page, lab: Lab, job: Path) -> None:
    """attach(folder).dashboard() draws the job's steps as they are made."""
    page = lab_page
    name = lab.write(
        f"import ddp_lab\njob = ddp_lab.follow({str(job)!r})\nview = job.dashboard()\nview", "view.stop(); job.close()"
    )
    notebook = NotebookPage(page, lab, name)
    notebook.start_kernel()
    try:
        notebook.run_cell(0)
        page.wait_for_selector(".ddp-lab")
        page.locator(".ddp-lab").scroll_into_view_if_needed()
        wait_until(lambda: page.evaluate(_STATISTICS)["step"] is not None, "a step")
        before = page.evaluate(_STATISTICS)
        wait_until(lambda: page.evaluate(_STATISTICS)["updates"] >= before["updates"] + 5, "five more pictures")
        assert page.evaluate(_STATISTICS)["step"] > before["step"]
        assert not {"Step through", "Fault injection"} & set(page.locator(".ddp-tab").all_inner_texts())
        assert page.get_by_role("button", name="Compare gradients").count() == 0
        notebook.run_cell(1)
        assert not notebook.errors
    finally:
        notebook.shut_down()
