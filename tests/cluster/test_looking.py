"""Gradients are watched and replicas compared from the client, while a cell trains and between cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_lab import CellError, ClusterError
from tests.cluster.conftest import Lab
from tests.cluster.test_live_control import BARE
from tests.waiting import wait_until

MODEL = """
torch.manual_seed(0)
model = ddp_lab.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)]))
def step():
    model.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
for _ in range(3): step()
"""


def _wait_more(lab: Lab, kind: str) -> None:
    """Waits for three more looks at the first model."""
    target = lab.timeline.inspection_count(0, kind) + 3
    wait_until(lambda: lab.timeline.inspection_count(0, kind) >= target, f"three times {kind}")


def test_watches_begin_and_end_while_a_cell_trains(lab: Lab, tmp_path: Path) -> None:
    """Switched on and off many times under way, both ranks look at the same steps, and training goes on."""
    lab.run(MODEL)
    end = tmp_path / "end"
    # In BARE ranks that began to look at different steps would hang. They may leave it after different steps: the last
    # step's peers are freed.
    running = lab.run(BARE.format(path=str(end)), wait=False)
    try:
        for every in (1, 2, 1, 3, 1):
            lab.watch_gradients(every)
            # Events of the watch before may still be on their way: they are not counted for this one.
            wait_until(lambda every=every: lab.monitoring()["gradients"] == every, "the begin of the watch")
            _wait_more(lab, "gradients")
            assert lab.check_drift().ok
            lab.watch_gradients(0)
            wait_until(lambda: lab.monitoring() == {"gradients": 0, "drift": 0, "pending": 0}, "the end of the watch")
        lab.watch_drift(5)
        _wait_more(lab, "drift")
        lab.watch_drift(0)
        wait_until(lambda: lab.monitoring()["drift"] == 0, "the end of the comparisons")
    finally:
        lab.interrupt()
        with pytest.raises((CellError, KeyboardInterrupt)):
            running.wait()
    watched = lab.timeline.watched_gradients(0)
    assert all(len(one["before"]) == 2 and None not in one["before"][0] + one["before"][1] for one in watched)
    assert lab.timeline.drift().ok.all()


def test_inside_join_the_check_says_why_not(lab: Lab, tmp_path: Path) -> None:
    """While join() is enabled replicas are not compared, whoever asks is told at once, and training goes on."""
    lab.run(MODEL)
    end = tmp_path / "end"
    loop = BARE.format(path=str(end)).replace("\n", "\n    ").rstrip()
    running = lab.run(f"with model.join():\n    {loop}", wait=False)
    try:
        wait_until(lambda: lab.timeline.reducers()[0].last_step > 5, "steps")
        found = lab.check_drift()
        assert not found.ok
        assert "check after join()" in found.error
    finally:
        end.touch()
        running.wait()
    assert lab.check_drift().ok


def test_a_rank_that_differs_is_named_between_cells(lab: Lab) -> None:
    """Compared at once where no cell runs: the parameter and the ranks that hold the same."""
    lab.run(MODEL)
    assert lab.check_drift().ok
    lab.run("if rank == 1: model.module[1].bias.data[0] += 1")
    found = lab.check_drift()
    assert not found.ok
    assert (found.first, found.groups, found.differing) == ("1.bias", ((0,), (1,)), 1)
    assert lab.timeline.drift(found.reducer)["first"].tolist()[-1] == "1.bias"


def test_after_a_failure_all_ranks_watch_or_none(lab: Lab) -> None:
    """A failure that came when one rank alone had begun to watch leaves both watching, and nothing hangs."""
    lab.run(MODEL)
    lab.run("if rank == 1: model._monitors.set_gradients(1)")
    with pytest.raises(CellError):
        lab.run("if rank == 0: raise ValueError('on purpose')\nstep()")
    lab.run("step(); step()", timeout=60)
    assert lab.values("model._monitors.gradients_every") == {0: 1, 1: 1}


def test_nonsense_is_refused(lab: Lab) -> None:
    """A negative number of steps is refused by the ranks, an unknown model here."""
    lab.run(MODEL)
    with pytest.raises(ClusterError, match="at least 0"):
        lab.watch_gradients(-1)
    with pytest.raises(ValueError, match="the timeline has no model 77"):
        lab.watch_drift(5, model=77)
