"""What to change, ranked: each finding with its evidence and its estimated saving, in percent of the step.

[Note: gains] in `facts.py` explains what a saving means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...formatting import counted, step_range
from . import buckets, options, parameter_groups, program, ranks
from .facts import Accumulation, Facts, Finding, MeshDimension, UnchangedBuffers

__all__ = [
    "Accumulation",
    "Facts",
    "Finding",
    "MeshDimension",
    "UnchangedBuffers",
    "buckets",
    "findings",
    "has_speed",
    "headline",
    "options",
    "parameter_groups",
    "program",
    "ranks",
]

_LEAST_PERCENT = 0.5
_FEWEST_STEPS = 17  # to say something of their speed: of 20 steps, the first 3 are warm-up and left out before


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
        return [replace(one, steps=judged) for one in facts.kind.findings_of_few(facts) if one.kind in options.ALWAYS]
    found = [replace(one, steps=judged) for one in facts.kind.findings(facts)]
    shown = [one for one in found if one.gain_percent >= _LEAST_PERCENT or one.kind in options.ALWAYS]
    return sorted(shown, key=lambda one: -one.gain_percent)


def has_speed(facts: Facts) -> bool:
    """Whether there are enough steps, of a run that did not fail, to say something of its speed."""
    return not facts.failed and len(facts.steps) >= _FEWEST_STEPS


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
    checked = f"{facts.kind.analysed(facts)} and the program around the model"
    return f"No change would save half a percent of the step. Analysed: {checked} in {judged}."
