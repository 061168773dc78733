"""Which setting wins from noisy turns: the faster one is found, and where nothing is faster nothing wins."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.analysis.comparison import student_t
from ddp_lab.simulation.candidate_selection import FinalTest, SuccessiveHalving


class _Machine:
    """Steps of several settings on a machine that drifts, with noise of turns and steps, and outliers.

    Args:
        steps_ms: of each setting.
        seed: of everything random.
        noise: of a turn, relative.
    """

    def __init__(self, steps_ms: list[float], seed: int, noise: float = 0.02) -> None:
        self.steps_ms, self.noise, self.taken = steps_ms, noise, 0
        self.rng = np.random.default_rng(seed)

    def turn(self, number: int) -> np.ndarray:
        self.taken += 1
        drift = 1 + 0.1 * np.sin(self.taken / 7)
        times = self.steps_ms[number] * drift * np.exp(self.rng.normal(0, self.noise)) * self.rng.normal(1, 0.03, 15)
        times[self.rng.random(15) < 0.05] *= 3
        return np.asarray(times)

    def race(self) -> SuccessiveHalving:
        race = SuccessiveHalving(len(self.steps_ms))
        while not race.over:
            race.add({number: self.turn(number) for number in race.order()})
        return race

    def tune(self) -> int:
        """The setting that would be applied: 0 if nothing is changed."""
        winner = self.race().best
        made = FinalTest()
        while winner and not made.over:
            order = (winner, 0) if made.winner_first else (0, winner)
            turns = {number: self.turn(number) for number in order}
            made.add(turns[0], turns[winner])
        return winner if made.clear else 0


@pytest.mark.parametrize(
    ("degrees", "probability", "quantile"),
    [
        (1, 0.975, 12.706),
        (2, 0.99, 6.965),
        (3, 0.975, 3.182),
        (7, 0.9995, 5.408),
        (11, 0.975, 2.201),
        (100, 0.95, 1.660),
    ],
)
def test_quantiles_of_students_t(degrees: int, probability: float, quantile: float) -> None:
    """The quantiles are those of printed tables."""
    assert student_t(probability, degrees) == pytest.approx(quantile, rel=2e-4)


def test_the_faster_setting_is_found() -> None:
    """A setting that is 10 % faster than the user's and 5 % than the others wins on 100 of 100 noisy machines. A
    setting that enters after two rounds is compared by the rounds that it shared."""
    found = [_Machine([10, 9.5, 9, 9.6, 12], seed).tune() for seed in range(100)]
    assert found.count(2) >= 95
    assert 0 not in found
    machine = _Machine([10, 10, 7], 5)
    race = SuccessiveHalving(2)
    for _ in range(2):
        race.add({number: machine.turn(number) for number in race.order()})
    assert race.enter() == 2
    while not race.over:
        race.add({number: machine.turn(number) for number in race.order()})
    assert race.best == 2
    assert race.taken(2) == race.rounds - 2


@pytest.mark.parametrize(
    ("steps_ms", "noise", "machines", "share"),
    [
        ([10, 10, 10, 10, 10], 0.02, 200, 0.97),  # all are equal: the bound allows for 0.95
        ([10, 10.1, 10.1, 10.1], 0.02, 200, 0.985),  # all others are 1 % slower
        ([10, 9.7, 10.3], 0.3, 200, 0.95),  # a gain of 3 % in turns that differ by 30 % among themselves
    ],
)
def test_without_a_difference_nothing_wins(steps_ms: list[float], noise: float, machines: int, share: float) -> None:
    """Where nothing is faster, or noise hides it, the user's setting is left on nearly all machines."""
    found = [_Machine(steps_ms, seed, noise).tune() for seed in range(machines)]
    assert found.count(0) > share * len(found)


def test_slow_settings_take_few_turns() -> None:
    """A setting that takes twice as long leaves after two rounds; the user's stays, however slow it is."""
    race = _Machine([20, 10, 20, 10.5], 3).race()
    assert race.taken(2) == 2
    assert race.taken(0) == race.rounds
    assert 0 in race.alive
    assert race.best == 1
    assert race.typical(1) == pytest.approx(10, rel=0.1)


def test_rounds_begin_differently_and_end_early() -> None:
    """Who is first in a round changes, so that no setting always follows the same one. Without noise two equal settings
    are known to be equal after two rounds."""
    race = SuccessiveHalving(3)
    firsts = []
    for _ in range(3):
        firsts.append(race.order()[0])
        race.add({number: [10.0, 10.1, 9.9] for number in race.order()})
    assert sorted(firsts) == [0, 1, 2]
    race = SuccessiveHalving(2)
    for _ in range(2):
        race.add({0: [10.0], 1: [10.0]})
    assert race.over


def test_a_confirmation_spends_its_bound() -> None:
    """The first look needs more than the last one: with the same turns the bound becomes narrower towards the end."""
    made = FinalTest(most_rounds=6, fewest_rounds=4)
    widths = []
    for number in range(6):
        made.add([10.0], [9.0 + 0.2 * (-1) ** number])
        widths.append(made.gain.high_percent - made.gain.low_percent)
    assert made.over
    assert made.clear
    assert made.gain.percent == pytest.approx(10, abs=0.1)
    assert made.winner_ms == pytest.approx(9.0)
    assert widths[5] < widths[3]
    assert not np.isfinite(widths[0])
