"""How many backwards of a model each rank made, and which one a rank left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..formatting import counted, ordinal

__all__ = ["SAME_STEPS", "SKIP", "Steps", "counts", "left_out"]

SAME_STEPS = (
    "If ranks have different numbers of batches, train inside `with model.join():`, or stop all ranks together."
)
SKIP = (
    "All ranks must make the same number of backwards: decide on all of them together whether to skip a batch "
    "(all_reduce a flag), or make the backward with the model's output times zero."
)


@dataclass(frozen=True)
class Steps:
    """The steps of a model on one rank.

    Attributes:
        module: class of the model.
        backwards: synchronised backwards that have begun.
        ended: those that have ended.
        forwards: step -> forwards that have ended for it.
    """

    module: str
    backwards: int
    ended: int
    forwards: Mapping[int, int] = field(default_factory=dict)


def counts(steps: Mapping[int, Steps]) -> tuple[str, int | None]:
    """How many backwards each rank made, in a sentence, and the first step at which the rank with the fewest made a
    forward without a backward; None if its forwards do not tell.

    Args:
        steps: rank -> its steps, of all ranks concerned.
    """
    most, fewest = (pick(steps, key=lambda rank: steps[rank].backwards) for pick in (max, min))
    more, fewer = steps[most], steps[fewest]
    if more.backwards == fewer.backwards:
        return f"All have begun {counted(more.backwards, 'backward')} of {more.module}.", None
    last = f"is in its {ordinal(more.backwards)}" if more.backwards > more.ended else f"made {more.backwards}"
    told = f"Rank {fewest} made {counted(fewer.ended, 'backward')} of {fewer.module}; rank {most} {last}."
    skipped = _skipped(fewer, more)
    if skipped is not None:
        told += f" Rank {fewest} made a forward at step {skipped} without a backward."
    return told, skipped


def left_out(steps: Mapping[int, Steps]) -> str:
    """The first step of a sharded model whose backward a rank left out, in a sentence; "" if there is none. Others may
    not have begun a backward more: they wait in the forward before it.

    Args:
        steps: rank -> its steps, of all ranks concerned.
    """
    for rank, own in steps.items():
        for other in steps.values():
            more = [step for step in sorted(own.forwards) if own.forwards[step] > other.forwards.get(step, 0) > 0]
            if own.backwards <= other.backwards and more:
                made = counted(own.ended, "backward")
                return (
                    f"Rank {rank} made {made} of {own.module} and left one out at step {more[0]}: it made a forward "
                    "there without a backward."
                )
    return ""


def _skipped(fewer: Steps, more: Steps) -> int | None:
    for step in sorted(fewer.forwards.keys() & more.forwards.keys()):
        with_backward = more.forwards[step] if step < fewer.backwards else 0
        if fewer.forwards[step] > with_backward:
            return step
    return None
