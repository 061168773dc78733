"""Events on a real cluster: live while the cell runs, complete when it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_lab.errors import CellError
from tests.cluster.conftest import Lab
from tests.waiting import wait_until

REPLACES_PROCESSES = True

MODEL = """
model = ddp_lab.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
def step():
    model(torch.randn(8, 64)).square().mean().backward()
    model.zero_grad()
"""


def _reducer(lab: Lab) -> int:
    return lab.timeline.reducers()[-1].reducer


def test_the_last_step_is_there_when_the_cell_returns(lab: Lab) -> None:
    """After each of 30 cells the timeline already holds the cell's step, complete on both ranks."""
    lab.run(MODEL)
    for number in range(30):
        lab.run("step()")
        last = lab.timeline.steps(_reducer(lab), last_steps=1)
        assert last.step.tolist() == [number, number]
        assert last.state.tolist() == ["complete", "complete"]


def test_the_last_step_is_there_when_the_cell_fails(lab: Lab) -> None:
    """What a cell recorded before it raised is on the timeline when the error is shown."""
    lab.run(MODEL)
    with pytest.raises(CellError, match="on purpose"):
        lab.run("step()\nstep()\nraise ValueError('on purpose')")
    wait_until(lambda: _complete(lab) == [0, 0, 1, 1], "the failed cell's steps")


def test_events_arrive_while_the_cell_runs(lab: Lab, tmp_path: Path) -> None:
    """A cell that has not ended shows its steps: the first is complete while the ranks still wait for the rest."""
    lab.run(MODEL)
    go_on = tmp_path / "go_on"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)"
    running = lab.run(f"step()\n{wait}\nstep()", wait=False)
    try:
        wait_until(lambda: _complete(lab) == [0, 0], "the first step of the running cell")
        assert not running.done
    finally:
        go_on.touch()
        running.wait()
    wait_until(lambda: _complete(lab) == [0, 0, 1, 1], "the second step")


def test_collectives_of_cells_need_no_model(lab: Lab) -> None:
    """A cell's collective is on the timeline with the cell's line; after a rejoin its group is another one."""
    for _ in range(2):
        lab.run("x = torch.ones(3)\ndist.all_reduce(x)")
        lab.rejoin()
    frame = lab.timeline.collectives()
    mine = frame[frame["operation"] == "all_reduce"]
    mine = mine[mine["place"].str.fullmatch(r"cell \d+ line 2")]
    assert sorted(mine["rank"]) == [0, 0, 1, 1]
    assert (mine["state"] == "complete").all()
    assert (mine["last_rank"] >= 0).all()
    assert len(set(mine["group"])) == 2
    assert "all_reduce" in lab.timeline.group_summary()


def _complete(lab: Lab) -> list[int]:
    if not lab.timeline.reducers():
        return []
    steps = lab.timeline.steps(_reducer(lab))
    return sorted(steps[steps.state == "complete"].step.tolist())


def test_a_restart_brings_new_models(lab: Lab) -> None:
    """The timeline outlives a restart: the models of before stay, those built after it are others."""
    known = [one.reducer for one in lab.timeline.reducers()]
    lab.restart()
    lab.run(MODEL)
    lab.run("step()")
    found = [one.reducer for one in lab.timeline.reducers()]
    assert found == [*known, known[-1] + 1]
    assert lab.timeline.spans().groupby("reducer").step.max()[found[-1]] == 0
    assert lab.wire.error is None
