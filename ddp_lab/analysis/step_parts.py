"""The named parts of a step by rank: where its time goes, to the last line of the program.

[Note: parts]
A step lasts from the end of the previous step's gradient synchronisation to the end of its own. Forward, backward and
communication follow from the model's events; data loading, optimizers and earlier forwards (accumulation) are spans of
their own. What remains are blanks. Their time is divided in proportion to the samples of the main thread's stack that
fall into them, so it is an estimate. The smaller the blanks, the fewer samples will do: what n of them say about a
blank that is a share b of the step is wrong by about b / sqrt(4 n) of the step at most. The times are means over the
steps, so that they add up to the mean step, and work that is done once in many steps has its share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["PARTS", "SPANS", "STARTS", "Place", "PlaceTime", "RankSteps", "StepParts", "step_parts"]

_Times = npt.NDArray[np.int64]

SPANS: Final = ("data", "optimizer", "accumulation")
"""Parts that are recorded as spans, in each step."""
PARTS: Final[dict[str, str]] = {
    "data": "data loading",
    "copies": "copies to the device",
    "accumulation": "gradient accumulation",
    "forward": "forward",
    "modules": "loss and other torch.nn calls",
    "backward": "rest of backward()",
    "alone": "backward without communication",
    "hidden": "overlapped communication",
    "exposed": "exposed communication",
    "written": "writing gradients back",
    "clipping": "gradient clipping",
    "optimizer": "optimizer",
    "collectives": "other collectives",
    "evaluation": "evaluation",
    "logging": "logging",
    "checkpoint": "checkpoints",
    "code": "other lines of the program",
    "unnamed": "unaccounted",
}
"""The parts of a step in the order in which they are listed: key -> name."""
STARTS: Final = " (starting its workers)"
"""End of the name of a data loader's place where it makes an iterator."""
# Samples of a rank, else of all together, that name blanks of this share of the step or more; smaller ones need fewer.
_FEWEST_SAMPLES, _LARGE_BLANK = 8, 0.25


@dataclass(frozen=True)
class Place:
    """A part of the program outside of models.

    Attributes:
        part: key of `PARTS`.
        name: a line of the program (``"train.py:31"``), a library's function, or the class of a dataset or optimizer.
        text: the line's source; "" if unknown.
        workers: of a data loader, else -1.
        pin_memory: of a data loader.
    """

    part: str
    name: str
    text: str = ""
    workers: int = -1
    pin_memory: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.text})" if self.text else self.name


@dataclass(frozen=True)
class PlaceTime:
    """Estimated seconds of each step at one place."""

    place: Place
    seconds: float


@dataclass(frozen=True)
class RankSteps:
    """Steps of one rank: arrays of ns, shape ``[steps]`` unless said; `samples` are those in their blanks.

    Attributes:
        whole: from the end of the previous step to the end of this one; 0 or less where unknown.
        forward, compute, hidden, exposed, backward: as the columns of `Timeline.steps`.
        spans: shape ``[steps, len(SPANS)]``.
        places: of the spans: index of each place, and the ns spent there in all steps.
        samples: indices of places and weights.
    """

    whole: npt.NDArray[np.float64]
    forward: npt.NDArray[np.float64]
    compute: npt.NDArray[np.float64]
    hidden: npt.NDArray[np.float64]
    exposed: npt.NDArray[np.float64]
    backward: npt.NDArray[np.float64]
    spans: _Times
    places: Sequence[tuple[int, int]]
    samples: tuple[_Times, _Times]


@dataclass(frozen=True)
class StepParts:
    """Where the time of a step goes, in named parts.

    Forward, backward, communication, data loading, optimizers and earlier forwards are measured. The rest is estimated
    from samples of the main thread's stack. Times are means over the steps, so they add up to the mean step.

    Attributes:
        steps: how many steps the means are taken over.
        by_rank: rank -> key of `PARTS` -> seconds of each step, in the order of `PARTS`, without parts that take no
            time.
        places: rank -> the places of its spans and blanks, the longest first.
        samples: rank -> how many samples the blanks' estimates are based on.
    """

    steps: int
    by_rank: Mapping[int, Mapping[str, float]]
    places: Mapping[int, Sequence[PlaceTime]]
    samples: Mapping[int, int]

    def seconds(self, part: str) -> Mapping[int, float]:
        """rank -> seconds of each step in this part."""
        return {rank: parts.get(part, 0.0) for rank, parts in self.by_rank.items()}

    def lines(self, part: str) -> list[tuple[Place, dict[int, float]]]:
        """The places of a part, each with its seconds by rank; the longest first."""
        found: dict[Place, dict[int, float]] = {}
        for rank, places in self.places.items():
            for one in places:
                if one.place.part == part:
                    found.setdefault(one.place, {})[rank] = one.seconds
        return sorted(found.items(), key=lambda one: -sum(one[1].values()))

    @property
    def mean(self) -> dict[str, float]:
        """Key of `PARTS` -> seconds of each step, the mean over the ranks."""
        ranks = max(1, len(self.by_rank))
        found = {part: sum(self.seconds(part).values()) / ranks for part in PARTS}
        return {part: seconds for part, seconds in found.items() if seconds > 0}

    @property
    def total(self) -> float:
        """Seconds of the mean step. The parts add up to it; the median step is shorter if a few are far longer."""
        return sum(self.mean.values())

    @property
    def named(self) -> float:
        """The share of the step that has a name, 0 to 1; NaN without steps."""
        total = self.total
        return 1 - self.mean.get("unnamed", 0.0) / total if total > 0 else float("nan")


def step_parts(by_rank: Mapping[int, RankSteps], places: Sequence[Place]) -> StepParts:
    """Returns the named parts of steps, by rank.

    Args:
        by_rank: the steps of each rank, in the order of the ranks; all of the same steps.
        places: to which the samples refer.
    """
    made, lines, counts, steps = {}, {}, {}, 0
    none = np.zeros(0, np.int64)
    index, weight = (np.concatenate([none, *(one.samples[column] for one in by_rank.values())]) for column in (0, 1))
    for rank, one in by_rank.items():
        known = one.whole > 0
        if not known.any():
            continue
        steps = max(steps, int(known.sum()))
        counts[rank] = len(one.samples[0])
        found, blank = _measured({name: getattr(one, name)[known] for name in _FIELDS}, one.spans[known])
        fewest = max(2, math.ceil(_FEWEST_SAMPLES * min(1.0, blank / one.whole[known].mean() / _LARGE_BLANK)))
        shares = _shares(*one.samples, places, fewest) or _shares(index, weight, places, fewest)
        spent = [(places[index], ns / int(known.sum())) for index, ns in one.places if index >= 0 and ns > 0]
        spent += [(place, blank * share) for place, share in shares]
        lines[rank] = [PlaceTime(place, ns / 1e9) for place, ns in sorted(spent, key=lambda one: -one[1])]
        for place, share in shares:
            part = place.part if place.part in PARTS else "code"
            found[part] = found.get(part, 0.0) + blank * share
        if not shares:
            found["unnamed"] = blank
        made[rank] = {part: found[part] / 1e9 for part in PARTS if found.get(part, 0.0) > 0}
    return StepParts(steps, made, lines, counts)


_FIELDS = ("whole", "forward", "compute", "hidden", "exposed", "backward")


def _measured(steps: Mapping[str, npt.NDArray[np.float64]], spans: _Times) -> tuple[dict[str, float], float]:
    """Mean ns of the parts that events tell, and of the blanks."""
    mean = {name: float(np.nan_to_num(values).mean()) for name, values in steps.items()}
    hidden = min(mean["hidden"], mean["compute"])  # a device may time collectives on another clock
    exposed = min(mean["exposed"], max(0.0, mean["backward"] - mean["compute"]))
    found = {
        "forward": mean["forward"],
        "alone": mean["compute"] - hidden,
        "hidden": hidden,
        "exposed": exposed,
        "written": max(0.0, mean["backward"] - mean["compute"] - exposed),
        **{name: float(spans[:, number].mean()) for number, name in enumerate(SPANS)},
    }
    return found, max(0.0, mean["whole"] - sum(found.values()))


def _shares(index: _Times, weight: _Times, places: Sequence[Place], fewest: int) -> list[tuple[Place, float]]:
    """Each place's share of the blanks, the largest first; none if there are too few samples."""
    known = index >= 0
    index, weight = index[known], np.maximum(weight[known], 1)
    if len(index) < fewest:
        return []
    sums = np.bincount(index, weights=weight, minlength=len(places))
    order = np.argsort(-sums, kind="stable")
    return [(places[number], float(sums[number] / sums.sum())) for number in order if sums[number] > 0]
