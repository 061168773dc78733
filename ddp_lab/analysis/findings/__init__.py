"""What to change, ranked: each finding with its evidence and what it would gain, in percent of the step.

What a gain means, [Note: gains] says (`facts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from ...formatting import counted, step_range
from . import buckets, options, ranks
from .facts import Facts, Finding

__all__ = ["Facts", "Finding", "findings", "headline", "ranks"]

_LEAST_PERCENT = 0.5
_Rule = Callable[[Facts], Iterable[Finding]]

_BETWEEN_RANKS: Final[tuple[_Rule, ...]] = (
    ranks.stragglers,
    ranks.disturbances,
    buckets.sizes,
    buckets.first_bucket,
    buckets.order,
    buckets.last_parameter,
    options.communication,
)
_OF_A_RANK: Final[tuple[_Rule, ...]] = (
    options.unused_parameters,
    options.search_of_unused,
    options.copies,
    options.small_tensors,
)
_OF_COLLECTIVES: Final = ("communication-bound", "bucket-too-small")
"""Kinds that start from how long collectives take, which is not known where ranks that share cores disturb them."""


def findings(facts: Facts | None) -> list[Finding]:
    """All findings, the largest gain first.

    What would gain less than half a percent is left out, but for what is asked for and brings nothing
    (`options.ALWAYS`).

    Args:
        facts: of one model; None if no step has ended on every rank.
    """
    if facts is None or not len(facts.steps) or not facts.buckets or facts.step_ns <= 0:
        return []
    rules = (*_BETWEEN_RANKS, *_OF_A_RANK) if facts.together else _OF_A_RANK
    judged = (int(facts.steps.step[0]), int(facts.steps.step[-1]))
    found = [replace(one, steps=judged) for rule in rules for one in rule(facts)]
    least = ranks.least_of_collectives(facts)
    found = [one for one in found if one.kind not in _OF_COLLECTIVES or one.gain_percent > least]
    shown = [one for one in found if one.gain_percent >= _LEAST_PERCENT or one.kind in options.ALWAYS]
    return sorted(shown, key=lambda one: -one.gain_percent)


def headline(facts: Facts | None, found: Sequence[Finding]) -> str:
    """What `findings` came to, in a sentence or two that say which steps were judged.

    Args:
        facts: None if no step has ended on every rank.
        found: in them.
    """
    if facts is None or not len(facts.steps):
        return "No step has ended yet on every rank."
    judged = f"{counted(len(facts.steps), 'step')} ({step_range(facts.steps.step.tolist())})"
    if facts.newer:
        judged += (
            f"; {counted(facts.newer, 'newer step')} with other buckets {'is' if facts.newer == 1 else 'are'} too few"
        )
    if found:
        return f"{'One thing' if len(found) == 1 else f'{len(found)} things'} to change, judged by {judged}."
    if not facts.buckets:
        return f"No rank has said what its buckets hold: nothing could be judged in {judged}."
    looked = "buckets, ranks, options, copies and communication" if facts.together else "options and copies"
    return f"Nothing that would gain half a percent of a step, judged by {judged}: {looked} were looked at."
