"""Tuning a real model on real ranks: the faster setting is found and applied, and else all is as it was.

A comm hook that spends 10 ms on each bucket makes few buckets faster than many beyond the noise of any machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import CellError, ClusterError
from ddp_lab.control import ab_trials
from ddp_lab.control.tuning import Session
from ddp_lab.simulation.settings import Setting
from tests.cluster.conftest import Lab
from tests.cluster.test_live_control import LOOP
from tests.waiting import DEADLINE_S, wait_until

MODEL = """
torch.manual_seed(0)
model = ddp_lab.DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.01)
def step():
    model.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
for _ in range(10): step()
"""


SLOW = """
import time
def slow_all_reduce(state, bucket):
    time.sleep(0.01)
    work = dist.all_reduce(bucket.buffer() / world_size, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
model.register_comm_hook(None, slow_all_reduce)
for _ in range(10): step()
"""


@pytest.fixture
def slow(lab: Lab) -> Lab:
    """Ranks with a new model of 8 buckets that cost 10 ms each."""
    lab.run(MODEL + SLOW)
    return lab


def _settings(lab: Lab) -> dict[str, Any]:
    """What the model has, equal on both ranks: caps, hook and the parameters of each bucket."""
    code = "{**model.configuration(), 'assigned': model._sync.assignment}"
    found = lab.values(code)
    assert found[0] == found[1]
    return dict(found[0])


@pytest.fixture
def kept(lab: Lab) -> Iterator[Lab]:
    """Ranks with a new model that has the same settings after the test."""
    lab.run(MODEL)
    before = _settings(lab)
    yield lab
    assert _settings(lab) == before


def test_the_faster_caps_are_found_and_applied(slow: Lab) -> None:
    """Fewer buckets win beyond doubt, the model has them, and the result says what to write."""
    told: list[str] = []
    found = slow.tune("step()", steps=4, seconds=150, tell=told.append)
    assert found.best is not None, str(found)
    assert found.applied
    assert found.gain is not None
    assert found.gain.low_percent > 0
    assert _settings(slow)["bucket_cap_mb"] == pytest.approx(found.best.caps_mb[-1], rel=1e-3)
    assert _settings(slow)["buckets"] < 8
    assert found.arguments in str(found)
    assert "bucket_cap_mb" in found.arguments
    assert any(line.startswith(f"{found.best} against {found.users}, after round 1: saves ") for line in told)
    assert {one.note for one in found.tried} == {"", "yours"}
    assert not {"tune", "measure the link"} & set(slow.results), "these are not the user's cells"


def test_a_given_setting_is_compared(slow: Lab) -> None:
    """As many rounds as asked for, each told, say what it saves; then the model has what it had."""
    before, told = _settings(slow), list[str]()
    turns = ab_trials.CellTrialRunner(slow, slow.timeline.reducers()[-1].reducer, 3, "step()")
    compared = Session(turns, None, tell=told.append).compare(Setting((4.0,)), 3)
    assert compared.rounds == 3
    assert [line.split(":")[0] for line in told] == [f"4 MiB against {turns.users}, after round {n}" for n in (1, 2, 3)]
    assert compared.winner_ms > 10
    assert compared.gain.percent > 0
    assert _settings(slow) == before


def test_while_a_cell_trains_an_interrupt_puts_all_back(kept: Lab, tmp_path: Path) -> None:
    """Steps of a cell are taken as they come; interrupted after a round the model has what it had, and trains on."""
    path = tmp_path / "stop"
    running = kept.run(LOOP.format(path=str(path)), wait=False, timeout=DEADLINE_S)

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            kept.tune(steps=4, tell=interrupt)
        assert not running.done
    finally:
        path.touch()
        running.wait()


def test_training_that_ends_too_early(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When training ends before a winner is sure that is noticed, however long steps might be waited for: the result
    says so, and the model has what it had."""
    monkeypatch.setattr(ab_trials, "_PATIENCE_SECONDS", 3600.0)
    lab.run(MODEL + SLOW.replace("0.01", "0.004"))
    before = _settings(lab)
    path = tmp_path / "stop"
    running = lab.run(LOOP.format(path=str(path)), wait=False, timeout=DEADLINE_S)
    found = lab.tune(steps=4, tell=lambda line: path.touch())
    running.wait()
    assert found.best is None
    assert not found.applied
    assert found.ended.startswith("Training ended")
    assert "Nothing was changed" in str(found)
    assert _settings(lab) == before


def test_a_cell_that_has_not_begun_counts(lab: Lab) -> None:
    """Ranks that were given a cell count as training before they begin it: here they are stopped."""
    lab.run(MODEL)
    turns = ab_trials.LiveTrialRunner(lab.training, lab.timeline.reducers()[-1].reducer, 4)
    assert not turns.training
    ranks = [pid for name, pid in lab.pids().items() if name.startswith("rank")]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        running = lab.run("1", wait=False)
        assert turns.training
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
    running.wait()
    wait_until(lambda: not turns.training, "the end of the cell is known")


def test_training_that_stands_still(lab: Lab, tmp_path: Path) -> None:
    """A turn whose steps do not come is given up; the setting that was there before is had again in steps to come."""
    lab.run(MODEL)
    before = _settings(lab)
    path = tmp_path / "go"
    wait = f"while not pathlib.Path({str(path)!r}).exists(): time.sleep(0.01)"
    loop = f"import pathlib, time\nfor _ in range(5): step()\n{wait}\nfor _ in range(20): step()"
    running = lab.run(loop, wait=False, timeout=DEADLINE_S)
    try:
        wait_until(lambda: lab.timeline.reducers()[-1].last_step >= 14, "the last step before it waits")
        turns = ab_trials.LiveTrialRunner(lab.training, lab.timeline.reducers()[-1].reducer, 4, patience=0.5)
        with pytest.raises(ab_trials.TrainingEnded, match="did not train a step for 0 s"):
            turns.take(turns.users)
        with pytest.raises(ClusterError, match="Timed out waiting for two training steps"):
            turns.take(Setting((4.0,)))
        assert turns.settle(turns.users) is False
    finally:
        path.touch()
        running.wait()
    assert _settings(lab) == before


class _KeptWaiting(ab_trials.LiveTrialRunner):
    """Comes back to each turn when its steps are long forgotten, as a thread of a busy machine may."""

    def _wait_step(self, step: int) -> None:
        super()._wait_step(step + 1_300)


def test_steps_that_are_forgotten(lab: Lab, tmp_path: Path) -> None:
    """A turn whose steps were forgotten before they were looked at has the next ones: they had the same setting."""
    lab.run(MODEL.replace("range(8)", "range(1)"))  # of a single bucket: its steps are short
    path = tmp_path / "stop"
    running = lab.run(LOOP.format(path=str(path)), wait=False, timeout=DEADLINE_S)
    try:
        turns = _KeptWaiting(lab.training, lab.timeline.reducers()[-1].reducer, 4)
        assert len(turns.take(turns.users)) == 4
    finally:
        path.touch()
        running.wait()


def test_turns_of_a_length_that_fits(kept: Lab) -> None:
    """Without a number of steps a turn has as many as fit, and a setting is had by a cell where nothing trains."""
    turns = ab_trials.CellTrialRunner(kept, kept.timeline.reducers()[-1].reducer, None, "step()")
    times = turns.take(Setting((0.02,)))
    assert turns.count is not None
    assert 5 <= turns.count <= 60
    assert 0 < len(times) <= turns.count
    assert turns.refusal(turns.users) == ""
    assert "size limit must be positive, got -1.0 MiB" in turns.refusal(Setting((-1.0,)))
    assert _settings(kept)["bucket_cap_mb"] == pytest.approx(0.02, rel=1e-3)
    assert turns.settle(turns.users)


def test_code_that_trains_no_step(kept: Lab) -> None:
    """Code that does not train the model each time is told so, and the model has what it had."""
    found = kept.tune("pass", steps=4, tell=lambda line: None)
    assert found.best is None
    assert "The code trained 0 steps of the model in 6 turns: it must train one each time." in str(found)


def test_a_step_that_fails(kept: Lab) -> None:
    """An error of the user's code is raised, and the model has what it had."""
    kept.run("turns = 0")
    with pytest.raises(CellError, match="on purpose"):
        kept.tune("turns += 1\nif turns == 30: raise ValueError('on purpose')\nstep()", steps=4, tell=lambda line: None)
    kept.run("for _ in range(2): step()")  # the ranks have rejoined: buckets are built again


def test_nothing_trains(lab: Lab) -> None:
    """Without a cell that trains, and without a step, it says how to use it."""
    lab.run(MODEL)
    with pytest.raises(ClusterError, match=r"%%distributed --no-wait"):
        lab.tune()


def test_a_hook_that_could_not_be_put_back(lab: Lab) -> None:
    """Lossy hooks are refused for a model that has a hook of its own."""
    lab.run(
        MODEL + "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook\n"
        "model.register_comm_hook(None, allreduce_hook)\nfor _ in range(6): step()"
    )
    with pytest.raises(ValueError, match="can't be restored"):
        lab.tune("step()", lossy=True)


def test_lossy_hooks_are_tried_and_taken_away(lab: Lab) -> None:
    """If they are allowed, hooks that round gradients take turns, too; afterwards the model has no hook, as before."""
    lab.run(MODEL)
    before = _settings(lab)
    found = lab.tune("step()", lossy=True, steps=3, seconds=30, apply=False, tell=lambda line: None)
    assert {"fp16", "bf16"} <= {one.setting.hook for one in found.tried if one.measured_ms is not None}
    assert before["comm_hook"] is None
    assert _settings(lab) == before
