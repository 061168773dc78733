"""Exposed communication from times with and without it."""

from __future__ import annotations

from functools import partial

import pytest

from ddp_lab.bench.measuring import noise, ratios

JUDGE = partial(noise.figure, others=[0.01] * 5)


def builds(times: dict[str, float]) -> list[list[ratios.Build]]:
    """Five sets of two builds with three turns each."""
    turns = [1 + 0.01 * step for step in (-2, 1, 0, -1, 2)]
    return [[{who: [ms * turn] * 3 for who, ms in times.items()} for _ in range(2)] for turn in turns]


def test_exposed_is_what_is_above_the_floor() -> None:
    """The difference is taken turn by turn: a machine that slows down for a while does not change it."""
    sets = [[{"torch": [30.0, 60.0, 31.0], "ours": [22.0, 44.0, 23.0]}] for _ in range(5)]
    floors = [[{"torch": [20.0, 50.0, 21.0], "ours": [20.0, 42.0, 21.0]}] for _ in range(5)]
    found = ratios.exposed({"gloo": (sets, floors)}, JUDGE)["gloo"]
    assert found["torch"]["exposed"]["median"] == pytest.approx(10)
    assert found["ours"]["exposed"]["median"] == pytest.approx(2)
    assert found["torch"]["step"]["median"] == 31
    assert found["torch"]["floor"]["median"] == 21


def test_ours_on_one_backend_against_torchs_on_another() -> None:
    """2 ms instead of 10 is a fifth; a part that is too noisy makes the ratio so, and about 0 can't be divided by. What
    ranks that only meet expose, above the floor of ours and against what torch's class does."""
    ours = builds({"ours": 22.0}), builds({"ours": 20.0})
    torchs = builds({"torch": 30.0}), builds({"torch": 20.0})
    sound, noisy = noise.figure([1.0] * 3), noise.figure([1.0, 2.0, 3.0])
    found = ratios.exposed_left(ours, torchs, (sound, sound))
    assert (found["ratio"], found["upper"]) == (pytest.approx(0.2), pytest.approx(0.2))
    assert not found["noisy"]
    assert ratios.exposed_left(ours, torchs, (sound, noisy))["why"] == noisy["why"] != ""
    nothing = ratios.exposed_left(ours, (torchs[1], torchs[1]), (sound, sound))
    assert nothing["ratio"] is None
    assert nothing["noisy"]
    ours = builds({"ours": 22.0}), builds({"torch": 20.0, "ours": 20.0, "limit": 21.5})
    sound = noise.figure([1.0] * 3)
    assert ratios.exposed_left(ours, torchs, (sound, sound))["limit"] == pytest.approx(0.15)
    unknown = ours[0], builds({"ours": 20.0})
    assert ratios.exposed_left(unknown, torchs, (sound, sound))["limit"] is None
    both = builds({"torch": 30.0, "ours": 22.0, "torch again": 30.0})
    found = ratios.exposed({"shm": (both, ours[1])}, JUDGE)["shm"]["limit"]
    assert found["exposed"]["median"] == pytest.approx(1.5)
