"""What to change, ranked: each finding with its evidence and what it would gain, in percent of the step.

What a gain means, [Note: gains] says (`facts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from . import findings_buckets, findings_options, findings_ranks
from .facts import Facts, Finding

__all__ = ["Facts", "Finding", "findings"]

_Rule = Callable[[Facts], list[Finding]]

_BETWEEN_RANKS: Final[tuple[_Rule, ...]] = (
    findings_ranks.stragglers,
    findings_buckets.sizes,
    findings_buckets.first_bucket,
    findings_buckets.order,
    findings_buckets.last_parameter,
    findings_options.communication,
)
_OF_A_RANK: Final[tuple[_Rule, ...]] = (
    findings_options.unused_parameters,
    findings_options.search_of_unused,
    findings_options.copies,
    findings_options.small_tensors,
)


def findings(facts: Facts, minimum_percent: float = 0.5) -> list[Finding]:
    """All findings, the largest gain first.

    Args:
        facts: of one model.
        minimum_percent: what would gain less is left out, but for what is asked for and brings nothing
            (`findings_options.ALWAYS`).
    """
    if not len(facts.steps) or not facts.buckets or facts.step_ns <= 0:
        return []
    whole = sorted(index for bucket in facts.buckets for index in bucket) == list(range(len(facts.sizes)))
    together = len(facts.steps.ranks) > 1 and not facts.missing_ranks and whole
    rules = (*_BETWEEN_RANKS, *_OF_A_RANK) if together else _OF_A_RANK
    found = [one for rule in rules for one in rule(facts)]
    shown = [one for one in found if one.gain_percent >= minimum_percent or one.kind in findings_options.ALWAYS]
    return sorted(shown, key=lambda one: -one.gain_percent)
