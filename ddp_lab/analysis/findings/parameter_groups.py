"""Findings about models with `fully_shard` or `replicate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from ...formatting import counted, ms, names, size
from ..parameter_groups import (
    ALL_REDUCE,
    BACKWARD,
    BACKWARD_UNSHARD,
    BEFORE,
    FORWARD,
    FORWARD_UNSHARD,
    REDUCE,
    REDUCE_SCATTER,
    GroupedSteps,
)
from ..steps import fit_line
from .facts import Facts, Finding
from .options import accumulation_words

__all__ = ["RULES", "words_of_phase"]

_LEAST_PERCENT = 3.0  # of the step
_SMALL = 0.7  # share of a group's communication that a group without parameters would take as well
_FEWEST_SMALL = 4
_NEARLY_ALL, _LARGE = 0.9, 1 << 22  # share of the parameters, and their bytes


def words_of_phase(phase: str, group: str) -> str:
    """Where in a step a rank is late."""
    return {
        BEFORE: "before the forward (input data, optimizer, code between the steps)",
        FORWARD: f"in the forward of {group}",
        BACKWARD: f"in the backward of {group}",
        REDUCE: f"between the reductions of {group}",
    }[phase]


def _late(facts: Facts, found: GroupedSteps) -> Iterator[Finding]:
    """Ranks that are late in one group."""
    for one in found.late:
        rank = facts.steps.ranks[one.rank]
        where = words_of_phase(one.phase, found.names[one.group] if one.group >= 0 else "")
        yield Finding(
            kind="late-parameter-group",
            title=f"Rank {rank} is late {where}.",
            evidence=f"By itself it takes {ms(one.delay_ns / 1e6)} longer there than every other rank (median), in "
            f"{100 * one.share:.0f} % of {counted(len(facts.steps), 'step')}; the others wait for it in the next "
            "collective.",
            remedy="Look for work that only this rank does there; then check its GPU or host (clock speed, other "
            "processes, memory).",
            gain_percent=facts.percent(one.delay_ns * one.share),
            rank=rank,
            bucket=one.group if one.group >= 0 else None,
        )


_PREFETCH: Final = (
    "Start all-gathers earlier: set_modules_to_forward_prefetch() of fully_shard's modules, with the next one or two. "
    "If they wait all the same, the link is the limit: gather fewer bytes "
    "(MixedPrecisionPolicy(param_dtype=torch.bfloat16), a smaller sharded dimension)."
)
_ORDER: Final = (
    "{first} prefetches {announced}, but {then} comes next: pass that one to the set_modules_to_forward_prefetch() of "
    "{first}."
)
_UNSHARD: Final = (
    "Start the all-gather of the next module before a module computes: module.unshard(async_op=True) of fully_shard's "
    "modules. set_modules_to_forward_prefetch() alone does not help on the CPU, where the host waits for each "
    "all-gather that it starts."
)


def _exposed(facts: Facts, found: GroupedSteps) -> Iterator[Finding]:
    """Forwards that wait for parameters which could have been gathered earlier."""
    waited = found.typical(found.exposed)[FORWARD_UNSHARD]
    if not np.isfinite(waited).all() or np.count_nonzero(waited) < 2:
        return
    later = waited.copy()
    later[np.flatnonzero(waited)[0]] = 0.0  # nothing runs before the first one
    on_device = found.device_step_ns > 0  # of which only its waits and the whole step are known
    whole = found.device_step_ns if on_device else np.median(facts.steps.forward_ns(), axis=1).min()
    computed = whole - waited.sum()
    gain = facts.percent(min(float(later.sum()), max(float(computed), 0.0)))
    if not gain >= _LEAST_PERCENT:
        return
    most = int(later.argmax())
    remedy = _PREFETCH if on_device else _UNSHARD
    if on_device and found.missed:
        first, announced, then = found.missed[0]
        told = names([found.names[one] for one in announced])
        remedy = _ORDER.format(first=found.names[first], announced=told, then=found.names[then])
    yield Finding(
        kind="exposed-unshard",
        title="The forward waits for parameters that could be gathered earlier.",
        evidence=f"All-gathers in the forward make it wait {ms(float(waited.sum()) / 1e6)} in each step (for each "
        f"group, median of the rank that waits least), most for {found.names[most]} ({ms(float(waited[most]) / 1e6)}).",
        remedy=remedy,
        gain_percent=gain,
        bucket=most,
    )


def _gathered_again(facts: Facts, found: GroupedSteps) -> Iterator[Finding]:
    """Backwards that wait for parameters which the forward had, too."""
    waits = found.exposed[BACKWARD_UNSHARD]
    if not np.isfinite(waits).all():
        return
    # No rank meets another one there then, so the waits for one that is late in a single group are saved, too.
    waited = float(np.median(waits.sum(axis=2).min(axis=0)))
    gain = facts.percent(waited)
    if gain < _LEAST_PERCENT:
        return
    by_group = found.typical(found.exposed)[BACKWARD_UNSHARD]
    most = int(by_group.argmax())
    kept = sum(found.sizes[group] for group in np.flatnonzero(found.typical(found.took)[BACKWARD_UNSHARD]).tolist())
    yield Finding(
        kind="exposed-backward-unshard",
        title="The backward waits for parameters that the forward had gathered before.",
        evidence=f"All-gathers in the backward make it wait {ms(waited / 1e6)} in each step (median of the rank that "
        f"waits least), most for {found.names[most]}.",
        remedy="If there is memory for it, keep them: fully_shard(module, reshard_after_forward=False). That takes up "
        f"to {size(kept)} more on each rank.",
        gain_percent=gain,
        bucket=most,
    )


def _accumulated(facts: Facts, found: GroupedSteps) -> Iterator[Finding]:
    """Gradient accumulation that reduces in each backward."""
    if facts.accumulation is None:
        return
    waits = found.exposed[[REDUCE_SCATTER, ALL_REDUCE]].sum(axis=0)
    if not np.isfinite(waits).all():
        return
    title, evidence, share = accumulation_words(facts.accumulation)
    waited = float(np.median(waits.sum(axis=2).min(axis=0)))
    yield Finding(
        kind="reduced-in-each-backward",
        title=title,
        evidence=f"{evidence} Each step here is one backward, which waits {ms(waited / 1e6)} for its reductions "
        "(median of the rank that waits least).",
        remedy="Call model.set_requires_gradient_sync(False) before all but the last backward of an optimizer step, "
        "and True before the last; until then each rank keeps whole gradients. With a replicated dimension, "
        "set_requires_all_reduce(False) keeps them sharded.",
        gain_percent=facts.percent(share * waited),
    )


def _small(facts: Facts, found: GroupedSteps) -> Iterator[Finding]:
    """Groups whose collectives take as long as empty ones."""
    took = found.typical(found.took).sum(axis=0)
    known = np.flatnonzero(took > 0)
    if len(known) < _FEWEST_SMALL:
        return
    line = fit_line([found.sizes[group] for group in known.tolist()], took[known].tolist())
    small = [group for group in known.tolist() if line.start_ns >= _SMALL * line.time_ns(found.sizes[group])]
    gain = facts.percent(line.start_ns * (len(small) // 2))  # two in one
    if line.assumed or len(small) < _FEWEST_SMALL or gain < _LEAST_PERCENT:
        return
    yield Finding(
        kind="parameter-groups-too-small",
        title=f"{counted(len(small), 'parameter group')} are so small that their size hardly matters.",
        evidence=f"Collectives of a group without parameters would take {ms(line.start_ns / 1e6)} in each step; those "
        f"of {names([found.names[group] for group in small], 2)} take {ms(float(np.median(took[small])) / 1e6)}.",
        remedy=f"Put several modules into one group: {found.made_by}([first, second]), or apply it to a module that "
        "holds them.",
        gain_percent=gain,
    )


_AT_ONCE: Final = {
    "fully_shard": "gathered at once, so no part of the model computes meanwhile, and every rank holds the whole model "
    "at that time.",
    "replicate": "all-reduced at once, so no part of the model computes meanwhile.",
}


def _one_group(facts: Facts, found: GroupedSteps) -> Iterator[Finding]:
    """A group that holds nearly the whole model."""
    total, largest = sum(found.sizes), int(np.argmax(found.sizes))
    if total < _LARGE or found.sizes[largest] < _NEARLY_ALL * total or len(facts.names) < _FEWEST_SMALL:
        return
    waited = found.typical(found.exposed)
    if not np.isfinite(waited).all():
        return
    computed = max(0.0, facts.step_ns - float(waited.sum()))
    # In four groups all but the first can be gathered, and all but the last reduced, while others compute.
    gain = facts.percent(0.75 * min(float(waited[:, largest].sum()), computed))
    yield Finding(
        kind="parameter-group-too-large",
        title=f"One parameter group, {found.names[largest]}, holds {100 * found.sizes[largest] / total:.0f} % of the "
        "parameters.",
        evidence=f"Its {size(found.sizes[largest])} are {_AT_ONCE[found.made_by]}",
        remedy=f"Apply {found.made_by}() to the blocks of the model before the model itself.",
        gain_percent=gain,
        bucket=largest,
    )


RULES = (_late, _exposed, _gathered_again, _accumulated, _small, _one_group)
"""Functions of the facts and of the steps by parameter group."""
