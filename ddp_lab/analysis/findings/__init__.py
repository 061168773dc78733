"""What to change, ranked: each finding with its evidence and its estimated saving, in percent of the step.

[Note: gains] in `facts.py` explains what a saving means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from ...formatting import counted, step_range
from . import buckets, options, parameter_groups, program, ranks
from .facts import Accumulation, Facts, Finding, MeshDimension, UnchangedBuffers

__all__ = [
    "Accumulation",
    "Facts",
    "Finding",
    "MeshDimension",
    "UnchangedBuffers",
    "findings",
    "has_speed",
    "headline",
    "parameter_groups",
    "ranks",
]

_LEAST_PERCENT = 0.5
_FEWEST_STEPS = 17  # to say something of their speed: of 20 steps, the first 3 are warm-up and left out before
_Rule = Callable[[Facts], Iterable[Finding]]

_BETWEEN_RANKS: Final[tuple[_Rule, ...]] = (
    ranks.stragglers,
    ranks.disturbances,
    buckets.sizes,
    buckets.first_bucket,
    buckets.order,
    buckets.last_parameter,
    options.communication,
    options.reduced_in_each_backward,
    program.shared_cores,
)
_OF_THE_PROGRAM: Final[tuple[_Rule, ...]] = (
    program.data_loading,
    program.collectives,
    program.seldom_work,
    program.lines,
    program.values_read,
    program.copies,
    program.contexts,
    options.mesh_between_hosts,
)
_OF_A_RANK: Final[tuple[_Rule, ...]] = (
    options.unused_parameters,
    options.search_of_unused,
    options.unchanged_buffers,
    options.copies,
    options.small_tensors,
    *_OF_THE_PROGRAM,
)
_OF_COLLECTIVES: Final = ("communication-bound", "bucket-too-small")
"""Kinds based on how long collectives take. That is not known while ranks disturb each other, e.g. on shared cores."""


def findings(facts: Facts | None) -> list[Finding]:
    """Returns all findings, the largest saving first.

    Findings that would save less than half a percent are omitted, except for options and parameters that have
    no effect (`options.ALWAYS`). Of fewer than 20 steps, warm-up included, there are only these, of a run that failed
    there are none.

    Args:
        facts: those of one model; None if no step is complete on every rank.
    """
    if facts is None or facts.failed or not _judged(facts):
        return []
    judged = (int(facts.steps.step[0]), int(facts.steps.step[-1]))
    if not has_speed(facts):
        rules = _OF_A_RANK if facts.groups is None else ()
        return [replace(one, steps=judged) for rule in rules for one in rule(facts) if one.kind in options.ALWAYS]
    if facts.groups is not None:
        found = [one for rule in parameter_groups.RULES for one in rule(facts, facts.groups)]
        found += [one for rule in _OF_THE_PROGRAM for one in rule(facts)]
        return _ranked([replace(one, steps=judged) for one in found])
    every = (*_BETWEEN_RANKS, *_OF_A_RANK) if facts.together else _OF_A_RANK
    found = [replace(one, steps=judged) for rule in every for one in rule(facts)]
    least = ranks.least_of_collectives(facts)
    if program.shares_cores(facts):
        found = [one for one in found if one.kind not in (*program.REPLAYED, *_OF_COLLECTIVES)]
    found = [one for one in found if one.kind not in _OF_COLLECTIVES or one.gain_percent > least]
    return _ranked(found)


def has_speed(facts: Facts) -> bool:
    """Whether there are enough steps, of a run that did not fail, to say something of its speed."""
    return not facts.failed and len(facts.steps) >= _FEWEST_STEPS


def _ranked(found: Sequence[Finding]) -> list[Finding]:
    shown = [one for one in found if one.gain_percent >= _LEAST_PERCENT or one.kind in options.ALWAYS]
    return sorted(shown, key=lambda one: -one.gain_percent)


def _judged(facts: Facts) -> bool:
    return bool(len(facts.steps) and facts.buckets and facts.step_ns > 0)


def headline(facts: Facts | None, found: Sequence[Finding]) -> str:
    """Returns a summary of the findings in one or two sentences, with the steps that were analysed.

    Args:
        facts: None if no step is complete on every rank.
        found: the findings in them.
    """
    if facts is None or not len(facts.steps):
        return "No step is complete on every rank yet."
    judged = f"{counted(len(facts.steps), 'step')} ({step_range(facts.steps.step.tolist())})"
    if facts.newer:
        judged += (
            f"; {counted(facts.newer, 'newer step')} with another bucket layout {'is' if facts.newer == 1 else 'are'}"
            " not enough to analyse"
        )
    if found:
        return f"{counted(len(found), 'finding')} in {judged}."
    if not facts.buckets:
        return f"The bucket layout is not known, so nothing is said of {judged}."
    if facts.failed:
        return f"The run failed, so its speed is not judged: {judged}."
    if not _judged(facts) or not has_speed(facts):
        return f"Too few steps to say that no change would save time: {judged}."
    if facts.groups is not None:
        return (
            "No change would save half a percent of the step. Analysed: parameter groups, ranks and the program around "
            f"the model in {judged}."
        )
    checked = "buckets, ranks, options, copies, communication" if facts.together else "options, copies"
    checked += " and the program around the model"
    return f"No change would save half a percent of the step. Analysed: {checked} in {judged}."
