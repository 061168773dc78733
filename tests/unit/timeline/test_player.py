"""A recording that is played: what has happened at each moment, and that a kernel without torch shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddp_lab.protocol.events import DTYPE, Batch
from ddp_lab.timeline.recorded.player import Player
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training

STEPS, APART_MS = 20, 30

# What a reader does with a recording, where `import torch` fails and no process may be started.
WITHOUT_TORCH = """
import os, subprocess, sys
sys.modules["torch"] = None
def refuse(*args, **options):
    raise AssertionError("a recording needs no other process")
subprocess.Popen.__init__ = os.fork = refuse
import ddp_lab
timeline = ddp_lab.Timeline.load("run.npz")
print(timeline.findings()[0].title)
print(timeline.summary().splitlines()[0])
shown = timeline.dashboard()
print([name for names in shown.tabs for name in names], [row["state"] for row in shown.ranks])
for view in shown.tabs:
    assert timeline.dashboard(*view).svg().startswith("<svg")
print(timeline.simulate(bucket_cap_mb=1).step_ms > 0, len(timeline.figure().data) > 0, len(timeline.spans()))
replay = timeline.replay(speed=50)
while replay.player.playing:
    replay.refresh()
print(replay.player.timeline.spans().equals(timeline.spans()))
"""


class _Clock:
    """Seconds that a test lets pass."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def recorded(pause_ms: int = 0) -> Timeline:
    """Twenty steps of two ranks, 30 ms apart; before the last one comes a pause."""
    timeline, training = Timeline(), Training(delays={(1, 1): 9.0}, forward_ms=2.0)
    for step in range(STEPS):
        late = pause_ms if step == STEPS - 1 else 0
        training.feed(timeline, step, 10**15 + (step * APART_MS + late) * 1_000_000)
    return timeline


def last_step(player: Player) -> int:
    return max((one.last_step for one in player.timeline.reducers()), default=-1)


def test_events_come_in_their_time() -> None:
    """At each moment the timeline holds what had happened by then, at whatever speed; at the end, all of it."""
    clock, whole = _Clock(), recorded()
    player = Player(whole, speed=0.5, clock=clock)
    for step in range(STEPS - 1):
        clock.now = 100.0 + (step * APART_MS + 20) / 1e3 / 0.5
        assert player.advance()
        assert last_step(player) == step
        assert player.timeline.steps().state.eq("complete").all()
    player.speed = 1000
    clock.now += 1
    assert not player.advance()
    assert player.position == player.seconds
    assert player.timeline.spans().equals(whole.spans())
    assert player.timeline.steps().equals(whole.steps())
    assert player.timeline.findings() == whole.findings() != []
    assert [one.dropped for one in player.timeline.ranks()] == [0, 0]


def test_pause_and_seek() -> None:
    """A paused replay stays; it goes forwards, back and, from its end, to the beginning. What a reader did between two
    cells is not waited for: long pauses are played as a second."""
    clock = _Clock()
    player = Player(recorded(), clock=clock)
    player.pause()
    clock.now += 5
    assert not player.advance()
    assert player.position == 0.0
    player.seek(0.2)
    assert last_step(player) == 6
    player.seek(0.05)
    assert last_step(player) == 1
    player.seek(99)
    assert last_step(player) == STEPS - 1
    player.play()
    assert (player.position, player.playing) == (0.0, True)
    clock.now += 0.05
    player.advance()
    assert last_step(player) == 1
    assert Player(recorded(60_000)).seconds == pytest.approx(1 + Player(recorded()).seconds - APART_MS / 1e3, abs=0.02)


def test_lost_events_and_refusals(tmp_path: Path) -> None:
    """A replay says of each rank how many events its recording lacks, also after it has gone back. Nothing recorded, or
    no speed, is refused with the reason."""
    whole = recorded()
    whole.extend(Batch(1, 1, 10**6, 0, np.zeros(0, DTYPE)))
    lost = [one.dropped for one in whole.ranks()]
    assert lost[0] == 0 < lost[1]
    player = Player(Timeline.load(whole.save(tmp_path / "run.npz")), clock=_Clock())
    for seconds in (99, 0.05, 99):
        player.seek(seconds)
        assert [one.dropped for one in player.timeline.ranks()] == lost
    assert player.timeline.spans().equals(whole.spans())
    with pytest.raises(ValueError, match="nothing to replay"):
        Timeline().replay()
    with pytest.raises(ValueError, match="speed must be positive, got 0"):
        recorded().replay(speed=0)


def test_without_torch_and_ranks(tmp_path: Path) -> None:
    """Where torch can't be imported a recorded file opens, is diagnosed, shown in all its views, and replayed."""
    recorded().save(tmp_path / "run.npz")
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    finding, words, shown, predicted, replayed = done.stdout.splitlines()
    assert finding.startswith("Rank 1 falls behind at the gradient of layers.2.weight")
    assert words.startswith("DigitsNet on 2 ranks")
    assert shown == (
        "['overview', 'timeline', 'sync', 'overlap', 'parameter_groups', 'stragglers', 'groups', 'findings', "
        "'buckets', 'what_if', 'gradients'] "
        "['recorded', 'recorded']"
    )
    assert predicted == f"True True {2 * 3 * STEPS}"
    assert replayed == "True"
