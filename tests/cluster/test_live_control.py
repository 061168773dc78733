"""Models are reconfigured, broken on purpose and paused while a cell trains them, from the client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import CellError, ClusterError, faults
from ddp_lab.dashboard.controls import Controls
from ddp_lab.protocol.messages import GetStage
from ddp_lab.simulation.workload import shares
from tests.cluster.conftest import Lab
from tests.waiting import DEADLINE_S, wait_until

MODEL = """
torch.manual_seed(0)
model = ddp_lab.DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=1)
def step():
    model.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
"""
# Ends on all ranks after the same step
LOOP = """
import pathlib
while True:
    step()
    go = torch.tensor([0 if pathlib.Path({path!r}).exists() else 1])
    dist.broadcast(go, 0)
    if not go: break
"""
# Enters no collective but the model's
BARE = """
import pathlib
while not pathlib.Path({path!r}).exists():
    step()
"""
ALIKE = """
same = [torch.empty_like(model.module[0].weight.grad) for _ in range(world_size)]
dist.all_gather(same, model.module[0].weight.grad)
bool(torch.equal(*same))
"""
SMALL = 0.01  # MiB: less than a layer


def _steps(lab: Lab) -> int:
    known = lab.timeline.reducers()
    return known[-1].last_step if known else -1


def _wait_steps(lab: Lab, more: int) -> None:
    target = _steps(lab) + more
    wait_until(lambda: _steps(lab) >= target, f"{more} steps more")


def _trained(lab: Lab, steps: int) -> set[int]:
    """The models that were active last and have trained so many steps."""
    return {one.reducer for one in lab.timeline.reducers()[-1:] if one.last_step >= steps}


@contextmanager
def training(lab: Lab, folder: Path, code: str = MODEL, fails: str | None = None) -> Iterator[Any]:
    """A cell that trains a new model until the block ends; `fails`: or until it fails so."""
    before = {one.reducer for one in lab.timeline.reducers()}
    lab.run(code)
    path = folder / f"stop-{time.monotonic_ns()}"
    running = lab.run((BARE if fails else LOOP).format(path=str(path)), wait=False, timeout=DEADLINE_S)
    try:
        wait_until(lambda: _trained(lab, 3) - before != set(), "the first steps")
        yield running
        if fails is not None:
            with pytest.raises(CellError, match=fails):
                running.wait()
    finally:
        path.touch()
        lab.resume()
        lab.clear_faults()
    if fails is None:
        running.wait()


def test_buckets_and_hooks_change_while_a_cell_trains(lab: Lab, tmp_path: Path) -> None:
    """Four changes in a row of a model that trains all take, in one step on both ranks, and are on the timeline."""
    with training(lab, tmp_path) as running:
        reducer = lab.timeline.reducers()[-1].reducer
        asked: list[tuple[dict[str, Any], int]] = [
            ({"bucket_cap_mb": SMALL}, 4),
            ({"comm_hook": "fp16"}, 4),
            ({"comm_hook": "none", "first_bucket_mb": SMALL, "bucket_cap_mb": 1}, 2),
            ({"order": "registration", "bucket_cap_mb": 25}, 1),
        ]
        for what, buckets in asked:
            done = lab.reconfigure(**what)
            assert done.change == what
            described = lab.timeline.assignment(reducer, done.generation)
            assert described["first_step"] == done.step
            assert len(described["buckets"]) == buckets
            halved = what.get("comm_hook") == "fp16"
            assert shares(described) == (1.0, 0.5 if halved else 1.0)
            _wait_steps(lab, 15)
        assert not running.done
        compared = lab.before_after()
        assert compared.steps_before >= 10
        assert compared.steps_after >= 10
        assert compared.low_percent <= compared.percent <= compared.high_percent
    steps = lab.timeline.steps(reducer)
    assert (steps.groupby("step").generation.nunique() == 1).all()
    assert lab.values(ALIKE) == {0: True, 1: True}
    names = [name for _, _, name in lab.timeline.marks()]
    assert names.count(f"reconfigured: bucket_cap_mb={SMALL}") == 2


def test_a_change_before_the_cell(lab: Lab) -> None:
    """Without a cell that trains a change is withdrawn after its timeout, and the next cell trains as before."""
    lab.run(MODEL + "for _ in range(3): step()")
    with pytest.raises(ClusterError, match="Timed out waiting for two training steps"):
        lab.reconfigure(bucket_cap_mb=SMALL, timeout=0.2)
    found = lab.values("for _ in range(3): step()\nmodel._live.waiting, len(model.buckets())")
    assert found == {0: (False, 1), 1: (False, 1)}
    lab.run("for _ in range(3): step()")


def test_what_the_ranks_refuse(lab: Lab) -> None:
    """The ranks' refusal comes back in words, and no rank keeps anything of it."""
    lab.run(MODEL + "for _ in range(3): step()")
    with pytest.raises(ClusterError, match=r"rank 0 refused: .*did you mean 'fp16'"):
        lab.reconfigure(comm_hook="fp61")
    with pytest.raises(ClusterError, match="no change was given"):
        lab.reconfigure()
    with pytest.raises(ValueError, match="the timeline has no model 1234"):
        lab.reconfigure(1234, bucket_cap_mb=1)
    with pytest.raises(ClusterError, match=r"rank 1 refused: .*did you mean '0\.bias'"):
        lab.inject(faults.SlowLayer(1, "0.bais", 0.1))
    with pytest.raises(ClusterError, match=r"rank 1 refused: .*no breakpoint 'ready'"):
        lab.breakpoints("ready", ranks=[1])
    lab.resume()
    assert lab.values("model._live.waiting") == {0: False, 1: False}
    number = lab.timeline.reducers()[-1].reducer
    lab.run("import gc; del model; gc.collect()")
    with pytest.raises(ClusterError, match=rf"model {number} no longer exists"):
        lab.step_state(number)
    own = dict(lab.timeline.own_numbers(number))
    answers = lab.wire.request(None, GetStage(reducers=own), 30.0)  # as when they have not said so yet
    assert sorted(answers.errors) == [0, 1]
    assert all("no longer exists" in error for error in answers.errors.values())
    assert not lab.run("print(end='')").text(0)  # a refusal is not a failure: the ranks' logs are empty


def _shown_instead(lab: Lab, gone: int) -> None:
    """Waits until a page that shows a model that is gone is shown where the ranks stand in one that they have."""
    controls = Controls(lab.timeline, lab, lambda: None)
    try:
        controls.look("page", ["step"], gone)
        wait_until(lambda: len(controls.shown()["step"]["ranks"]) == 2, "where the ranks stand")
        assert gone not in controls.state()["living"]
    finally:
        controls.stop()


def test_controls_that_nobody_sees_rest(lab: Lab) -> None:
    """They ask the ranks nothing, and no thread of theirs is left, until somebody asks for something."""
    controls = Controls(lab.timeline, lab, lambda: None)
    try:
        assert controls._refresher.running
        controls.rest()
        wait_until(lambda: not controls._refresher.running, "the end of their thread")
        controls.ask({"type": "fault", "id": "asked", "do": "end"})
        wait_until(lambda: "asked" in controls.state()["heard"], "the request")
    finally:
        controls.stop()


def test_the_most_recent_model_of_those_that_exist(lab: Lab) -> None:
    """Without a number a model that is gone is never meant: an older one is that lives, and if none does it says so."""
    lab.run("import gc; model = kept = None; gc.collect()")
    lab.run(MODEL + "for _ in range(3): step()\nkept, older = model, step")
    number = lab.timeline.reducers()[-1].reducer
    lab.run(MODEL + "for _ in range(3): step()")
    newer = lab.timeline.reducers()[-1].reducer
    assert newer != number
    lab.run("del model, step; gc.collect()")
    assert lab.timeline.reducers()[-1].reducer == newer
    assert {state.step for state in lab.step_state().values()} == {3}
    _shown_instead(lab, newer)
    with pytest.raises(ClusterError, match="Timed out waiting for two training steps"):
        lab.reconfigure(bucket_cap_mb=SMALL, timeout=0.1)
    lab.inject(faults.SlowRank(rank=1, seconds=0.001))
    lab.run("model, step = kept, older\nstep()")
    assert lab.faults()[1][0]["begun"]
    lab.clear_faults()
    lab.run("step()\nmodel = kept = None; gc.collect()")
    with pytest.raises(ClusterError, match=r"no rank has a model any more.*wrap one in"):
        lab.breakpoints("launched")


def test_a_cell_that_fails_meanwhile(lab: Lab) -> None:
    """A change that is pending when the groups break is gone with them; the next one takes."""
    lab.run(MODEL + "for _ in range(3): step()")
    prepare = (
        "from ddp_lab.protocol.messages import Change\n"
        "model._live.prepare('broken', Change(bucket_cap_mb=0.01))\nstep()\n"
    )
    with pytest.raises(CellError, match="on purpose"):
        lab.run(prepare + "if rank == 1: raise ValueError('on purpose')\nstep()")
    found = lab.values("for _ in range(3): step()\nmodel._live.waiting, len(model.buckets()), model.reducer.finished()")
    assert found[0] == found[1]
    assert found[0][0] is False
    assert lab.values(ALIKE) == {0: True, 1: True}


def _found_late(lab: Lab, rank: int, parameter: str) -> bool:
    late = lab.timeline.stragglers(last_steps=15)
    return (rank, parameter) in [(place.rank, place.parameter) for place in late]


def test_faults_while_a_cell_trains(lab: Lab, tmp_path: Path) -> None:
    """A slow layer that is injected is found by the timeline, by rank and parameter, listed, and ended."""
    with training(lab, tmp_path):
        number = lab.inject(faults.SlowLayer(rank=1, parameter="2.weight", seconds=0.1))
        # Steps are short without the fault: some twenty may still be on their way to the timeline when it begins.
        wait_until(lambda: _found_late(lab, 1, "2.weight"), "the name of the late layer")
        (fault,) = lab.faults()[1]
        assert (fault["kind"], fault["begun"], fault["number"]) == ("SlowLayer", True, number)
        lab.clear_faults(rank=1, number=number)
        wait_until(lambda: lab.faults() == {}, "the end of the fault")
        lab.inject(faults.SlowLink(rank=0, latency_seconds=0.005))
        lab.inject(faults.SlowRank(rank=0, seconds=0.005))
        _wait_steps(lab, 3)
        assert len(lab.faults()[0]) == 2
        lab.clear_faults()
        wait_until(lambda: lab.faults() == {}, "the end of both faults")
    marks = [(rank, name) for rank, _, name in lab.timeline.marks()]
    text = "slow layer: 100 ms before the gradient of '2.weight'"
    assert (1, text) in marks
    assert (1, f"end of {text}") in marks
    assert lab.values("step(); model._live.waiting") == {0: False, 1: False}


def test_step_through(lab: Lab, tmp_path: Path) -> None:
    """Rank 1 pauses at its first bucket, is walked on by events and buckets, and then runs freely again."""
    with training(lab, tmp_path, MODEL.replace("bucket_cap_mb=1", "bucket_cap_mb=0.01")) as running:
        lab.breakpoints("bucket_ready", ranks=[1], buckets=[0])
        state = lab.wait_paused([1])[1]
        assert (state.point, state.bucket, state.in_flight) == ("bucket_ready", 0, True)
        assert [bucket.state for bucket in state.buckets] == ["ready", *["pending"] * 3]
        assert not lab.step_state()[0].paused
        begin = state.step
        assert lab.next_event()[1].point == "launched"
        state = lab.next_event()[1]
        assert (state.point, state.parameter) == ("gradient_ready", "2.bias")
        state = lab.next_bucket()[1]
        assert (state.point, state.bucket) == ("bucket_ready", 1)
        state = lab.next_breakpoint()[1]
        assert (state.bucket, state.step) == (0, begin + 1)
        lab.breakpoints("reduced", ranks=[0, 1], buckets=[2])
        lab.next_breakpoint(ranks=[1])
        states = lab.wait_paused([0, 1])
        assert {state.bucket for state in states.values()} == {2}
        assert states[0].finalizing
        lab.resume()
        _wait_steps(lab, 5)
        assert not running.done
    assert lab.values("step()\nmodel.reducer.in_flight()") == {0: False, 1: False}
    backend = "model.process_group._get_backend(torch.device('cpu'))"
    held = f"ddp_lab.parallel.core.process_groups.timeout_of({backend}).total_seconds()"
    assert lab.values(held) == {0: 1800.0, 1: 1800.0}


@pytest.mark.parametrize("point", ["bucket_ready", "reduced"])
def test_an_interrupt_ends_a_pause(lab: Lab, tmp_path: Path, point: str) -> None:
    """Interrupting a cell of which one rank pauses ends it on all ranks, which is told until they train on, and nothing
    pauses in the next cell."""
    before = {one.reducer for one in lab.timeline.reducers()}
    lab.run(MODEL)
    running = lab.run(LOOP.format(path=str(tmp_path / "never")), wait=False, timeout=DEADLINE_S)
    wait_until(lambda: _trained(lab, 3) - before != set(), "the first steps")
    lab.breakpoints(point, ranks=[1])
    assert lab.wait_paused([1])[1].point == point
    assert {rank: state.armed for rank, state in lab.step_state().items()} == {0: False, 1: True}
    lab.interrupt()
    with pytest.raises(CellError, match="interrupted"):
        running.wait()
    state = lab.step_state()[1]
    assert (state.armed, state.ended) == (False, "the cell was interrupted or failed")
    assert lab.values("for _ in range(3): step()\nmodel._live.waiting") == {0: False, 1: False}
    assert lab.step_state()[1].ended == ""


def test_a_failure_ends_a_pause(lab: Lab, tmp_path: Path) -> None:
    """If another rank fails while one pauses, the cell ends on both, and the next one trains."""
    lab.run(MODEL + "for _ in range(3): step()")
    lab.breakpoints("bucket_ready", ranks=[1])
    path = tmp_path / "fail"
    fail = f"    while not pathlib.Path({str(path)!r}).exists(): time.sleep(0.01)\n    raise ValueError('on purpose')\n"
    running = lab.run(f"import pathlib, time\nif rank == 0:\n{fail}step()", wait=False, timeout=DEADLINE_S)
    assert lab.wait_paused([1], timeout=DEADLINE_S)[1].paused
    path.touch()
    with pytest.raises(CellError, match="on purpose"):
        running.wait()
    assert lab.values("for _ in range(3): step()\nmodel._live.waiting") == {0: False, 1: False}
