"""Trainings with one planted fault each, as scripts that know nothing of ddp_lab: findings name the cause."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_lab.analysis.findings import Finding
from ddp_lab.timeline.timeline import Timeline
from tests.ranks.harness import ROOT

SCRIPT = str(Path(__file__).parents[1] / "programs" / "planted_faults.py")
STEPS = 250


@dataclass(frozen=True)
class Cause:
    """What a finding must say: its kind, its rank (None: of all), and words of its text."""

    kind: str
    rank: int | None = None
    words: tuple[str, ...] = ()

    def is_named_by(self, found: Finding) -> bool:
        text = str(found)
        return found.kind == self.kind and found.rank == self.rank and all(word in text for word in self.words)


FAULTS = {
    "slow_loader": Cause("data-loading", None, ("0 workers", "num_workers=2")),
    "starved_workers": Cause("data-loading", None, ("1 worker", "can't keep up")),
    "new_loader_each_step": Cause("data-loading", None, ("persistent_workers=True",)),
    "starved_rank": Cause("straggler", 1, ("data loading",)),
    "long_starved_rank": Cause("straggler", 1, ("data loading",)),
    "uneven_batches": Cause("straggler", 1, ("the gradient of",)),
    "slow_forward": Cause("straggler", 1, ("forward",)),
    "slow_layer": Cause("straggler", 1, ("second",)),
    "sleep_on_rank_1": Cause("straggler", 1, ("time.sleep(_SLEEP)",)),
    "garbage_on_rank_1": Cause("straggler", 1, ("gc.collect()",)),
    "evaluation_on_rank_0": Cause("straggler", 0, ("evaluation",)),
    "evaluation": Cause("evaluation-cost"),
    "checkpoint": Cause("checkpoint-cost", None, ("torch.save",)),
    "logging": Cause("logging-cost", None, ("log.info",)),
    "scalar_all_reduce": Cause("other-collectives", None, ("dist.all_reduce(value)",)),
    "gathered_objects": Cause("other-collectives", None, ("all_gather_object",)),
    "barrier": Cause("other-collectives", None, ("dist.barrier()",)),
    "sleep": Cause("program-line", None, ("time.sleep(_SLEEP)",)),
    "python_line": Cause("program-line", None, ("json.dumps",)),
    "find_unused": Cause("find-unused-for-nothing"),
    "unused_parameters": Cause("unused-parameters", None, ("never.weight",)),
    "communication": Cause("communication-bound"),
    "constant_buffers": Cause("unchanged-buffers", None, ("1 buffer (4 MiB) that has not changed: angles",)),
    "accumulation": Cause("reduced-in-each-backward", None, ("each of the 4 backwards", "no_sync()")),
    "shared_cores": Cause("shared-cores", None, ("threads run on",)),
}
CLEAN = 10  # runs


def findings_of(folder: Path, fault: str, *options: str) -> list[Finding]:
    """Runs the script with two ranks; returns the findings.

    All steps of all ranks are recorded, a page is written, and nearly all of a step has a name.
    """
    threads = str(2 * (os.cpu_count() or 1)) if fault == "shared_cores" else "1"
    command = [sys.executable, "-m", "ddp_lab", "run", "--standalone", "--nproc-per-node", "2"]
    command += ["--record", str(folder), *options, SCRIPT, fault, str(STEPS)]
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": threads}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert " on 2 ranks" in done.stdout
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert len(page) > 10_000
    timeline = Timeline.load(folder / "timeline.npz")
    steps = timeline.steps()
    assert steps[steps["state"] == "complete"].groupby("rank").size().to_dict() == {0: STEPS, 1: STEPS}
    parts = timeline.parts()
    assert parts.named >= 0.95, parts.mean
    return timeline.findings()


@pytest.mark.soak  # who is late depends on what else the machine does
@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_is_named(tmp_path: Path, fault: str) -> None:
    """A finding has the fault's kind and rank, and names its line, layer, loader or parameter."""
    found = findings_of(tmp_path, fault)
    assert any(FAULTS[fault].is_named_by(one) for one in found), "\n".join(map(str, found))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(CLEAN))
def test_no_fault_is_found_where_none_was_planted(tmp_path: Path, number: int) -> None:
    """The same script without a fault, with our class and observed: no finding about the program.

    Other processes may disturb the ranks of a test; that is then true, and no fault of the program.
    """
    found = findings_of(tmp_path, "clean", *(["--observe"] if number % 2 else []))
    kinds = {cause.kind for cause in FAULTS.values()} - {"straggler", "communication-bound"}
    assert [
        str(one) for one in found if one.kind in kinds or (one.kind == "straggler" and "It spends" in str(one))
    ] == []
