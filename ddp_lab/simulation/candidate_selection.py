"""Statistics that find the fastest of several settings from alternating blocks of steps, without a cluster.

[Note: a race and a confirmation]
Settings alternate in turns of some steps each, all of them once per round, so that a machine that becomes slower slows
down all of them. A turn counts with the median of its steps, as a logarithm: differences are then percentages.

The *race* finds the best candidate. Turns form a table of rounds and settings; the residual after subtracting the means
of its rows and columns is noise, pooled over all settings. A setting that is slower than the fastest one beyond the
95 % bound of that noise takes no further turns. A mistake here can only miss a few percent of saving.

The *confirmation* decides. The winner of a race looks better than it is, so the race's turns are not used: the winner
and the user's setting take new ones. The winner is accepted only if the 95 % bound of their paired differences
(Student's t) excludes "not faster". Testing after every second round and stopping at the first success would succeed
by chance more often than 5 % of the time: each early test spends a share of the 5 %, the last one half of it
(Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..analysis.comparison import student_t

__all__ = ["FinalTest", "Gain", "SuccessiveHalving"]

_LEVEL = 0.05
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 6  # of a race
_CLOSE = 0.01  # a race is over when all that are left are so close to the fastest, as a fraction of the step
_Floats = npt.NDArray[np.float64]


class SuccessiveHalving:
    """The turns of several settings, and which settings remain.

    Args:
        entrants: number of settings; number 0 is the user's, which stays to the end.
    """

    def __init__(self, entrants: int) -> None:
        self.alive = list(range(entrants))
        self._turns: list[dict[int, float]] = []
        self._began: dict[int, int] = dict.fromkeys(self.alive, 0)

    @property
    def rounds(self) -> int:
        """Complete ones."""
        return len(self._turns)

    def enter(self) -> int:
        """Adds a setting from the next round on; returns its number."""
        number = len(self._began)
        self._began[number] = self.rounds
        self.alive.append(number)
        return number

    def leave(self, number: int) -> None:
        """Removes a setting (a model rejected it)."""
        if number in self.alive:
            self.alive.remove(number)

    def order(self) -> list[int]:
        """The settings of the next round, in order: each round starts with a different one."""
        first = self.rounds % max(1, len(self.alive))
        return self.alive[first:] + self.alive[:first]

    def add(self, turns: dict[int, Sequence[float] | _Floats]) -> None:
        """A complete round: the times of the steps of everyone's turn."""
        self._turns.append({number: math.log(float(np.median(times))) for number, times in turns.items()})
        if self.rounds >= _FEWEST_ROUNDS:
            self._drop()

    def logs(self, one: int, other: int) -> _Floats:
        """Logarithm of the ratio of two settings' turns, for each round in which both took part."""
        return np.array([turns[one] - turns[other] for turns in self._turns if one in turns and other in turns])

    def typical(self, number: int) -> float | None:
        """Typical step of a setting, NaN-free: the median of its turns; None before the first."""
        known = [turns[number] for turns in self._turns if number in turns]
        return math.exp(float(np.median(known))) if known else None

    def taken(self, number: int) -> int:
        """Turns of a setting."""
        return sum(number in turns for turns in self._turns)

    @property
    def best(self) -> int:
        """The fastest setting so far; the user's if nothing is known."""
        return min(self.alive, key=self._against_first)

    def _against_first(self, number: int) -> float:
        common = self.logs(number, 0)
        return 0.0 if number == 0 or not len(common) else float(common.mean())

    @property
    def over(self) -> bool:
        """Whether more rounds would not change the result."""
        if self.rounds < _FEWEST_ROUNDS:
            return False
        if len(self.alive) < 2 or self.rounds >= _MOST_ROUNDS:
            return True
        noise = self._noise()
        if noise is None:
            return False
        spread = [self._bounds(one, noise) for one in self.alive if one != self.best]
        return all(high < _CLOSE for _, high in spread)

    def _drop(self) -> None:
        noise, best = self._noise(), self.best
        if noise is not None:
            slower = [one for one in self.alive if one not in (0, best) and self._bounds(one, noise)[0] > 0]
            self.alive = [one for one in self.alive if one not in slower]

    def _bounds(self, one: int, noise: tuple[float, int]) -> tuple[float, float]:
        """Bounds of how much slower a setting is than the best one, as a logarithm."""
        common = self.logs(one, self.best)
        deviation, degrees = noise
        if not len(common):
            return -math.inf, math.inf
        reach = student_t(1 - _LEVEL / 2, degrees) * deviation * math.sqrt(2 / len(common))
        return float(common.mean()) - reach, float(common.mean()) + reach

    def _noise(self) -> tuple[float, int] | None:
        """Standard deviation of a turn, and its degrees of freedom."""
        squares, degrees = 0.0, 0
        first = max(self._began[one] for one in self.alive)
        for begin, end in ((0, first), (first, self.rounds)):
            rows = self._turns[begin:end]
            everywhere = [one for one in self._began if rows and all(one in turns for turns in rows)]
            if len(rows) < 2 or len(everywhere) < 2:
                continue
            table = np.array([[turns[one] for one in everywhere] for turns in rows])
            left = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
            squares += float(np.square(left).sum())
            degrees += (len(rows) - 1) * (len(everywhere) - 1)
        return (math.sqrt(squares / degrees), degrees) if degrees else None


@dataclass(frozen=True)
class Gain:
    """How much faster the winner is than the user's setting, in percent of the user's step; negative: slower.

    Attributes:
        percent: the mean over the rounds.
        low_percent: lower 95 % bound, corrected for early tests.
        high_percent: upper 95 % bound.
        rounds: that the confirmation took.
    """

    percent: float
    low_percent: float
    high_percent: float
    rounds: int


class FinalTest:
    """New turns of the winner and of the user's setting; see [Note: a race and a confirmation].

    Args:
        most_rounds: after which the answer is what it is.
        fewest_rounds: before the first look.
    """

    def __init__(self, *, most_rounds: int = 12, fewest_rounds: int = 4) -> None:
        self.most_rounds, self.fewest_rounds = most_rounds, fewest_rounds
        self._turns: list[tuple[float, float]] = []  # medians: the user's setting, the winner

    @property
    def rounds(self) -> int:
        """Complete ones."""
        return len(self._turns)

    @property
    def winner_first(self) -> bool:
        """Who has the first turn of the next round."""
        return self.rounds % 2 == 0

    def add(self, users: Sequence[float] | _Floats, winners: Sequence[float] | _Floats) -> None:
        """A round: the times of the steps of both turns."""
        self._turns.append((float(np.median(users)), float(np.median(winners))))

    @property
    def over(self) -> bool:
        """Whether the result is clear, or can't become clear."""
        if self.rounds >= self.most_rounds:
            return True
        return self._looks_now and (self.clear or self.gain.high_percent <= 0)

    @property
    def clear(self) -> bool:
        """Whether the winner is faster, at the 95 % bound."""
        return self.rounds >= self.fewest_rounds and self.gain.low_percent > 0

    @property
    def winner_ms(self) -> float:
        """Typical step of the winner: the median of its turns."""
        return float(np.median([winner for _, winner in self._turns]))

    @property
    def gain(self) -> Gain:
        """The current result; the bounds are infinite before the second round."""
        logs = np.array([math.log(winner / user) for user, winner in self._turns])
        mean = float(logs.mean()) if len(logs) else 0.0
        reach = math.inf
        if len(logs) >= 2:
            quantile = student_t(1 - self._spent / 2, len(logs) - 1)
            reach = quantile * float(logs.std(ddof=1)) / math.sqrt(len(logs))
        low, high = (_percent(mean + sign * reach) for sign in (1, -1))
        return Gain(_percent(mean), low, high, len(logs))

    @property
    def _looks_now(self) -> bool:
        return self.rounds >= self.fewest_rounds and (self.rounds - self.fewest_rounds) % 2 == 0

    @property
    def _spent(self) -> float:
        """The share of the 5 % for this test."""
        early = len(range(self.fewest_rounds, self.most_rounds, 2))
        if self.rounds >= self.most_rounds or not early:
            return _LEVEL / 2 if early else _LEVEL
        return _LEVEL / 2 / early


def _percent(log_ratio: float) -> float:
    return 100 * (1 - math.exp(log_ratio)) if log_ratio < 700 else -math.inf
