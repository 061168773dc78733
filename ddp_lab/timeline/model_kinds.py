"""The kinds of models: all in which a `DistributedDataParallel` and a model with `fully_shard` or `replicate` differ.

A kind says how its gradients travel and what that is called, what its steps mean, which rank is late, and what to
change. `kind_of` finds it from a description; nobody else asks which kind a model is of. The times of a step are of
its `Communication`: `Waits` for parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np

from ..analysis import stragglers
from ..analysis.findings import Facts, Finding, buckets, options, parameter_groups, program, ranks
from ..analysis.findings.parameter_groups import words_of_phase
from ..analysis.parameter_groups import BEFORE, ModelCollectives, grouped_steps
from ..analysis.step_metrics import typical
from ..analysis.stragglers import ARRIVAL, EVERYWHERE, VARYING, LatePlace
from ..formatting import counted, ms, size
from . import summary
from .tables.collectives import CollectiveTable, GroupInfo
from .tables.parameter_groups import collectives_of, with_waits
from .tables.span_columns import TableView

__all__ = ["BUCKETS", "KINDS", "OF_GRADIENTS", "ModelKind", "ParameterGroups", "kind_of"]

_Rule = Callable[[Facts], Iterable[Finding]]
_Found = Sequence[ModelCollectives]
_Layout = Sequence[Mapping[str, Any]]

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
OF_GRADIENTS: Final[frozenset[_Rule]] = frozenset(
    {buckets.order, buckets.last_parameter, options.unused_parameters, options.copies, options.small_tensors}
)
"""Rules that need to know when each gradient was there: `Steps.tells_gradients`."""
_OF_COLLECTIVES: Final = ("communication-bound", "bucket-too-small")
"""Kinds based on how long collectives take. That is not known while ranks disturb each other, e.g. on shared cores."""
_TOGETHER_MS = 0.1
_OPERATIONS_KEPT = 16  # steps whose collectives a rank's table surely holds


class ModelKind:
    """A `DistributedDataParallel`, ours or torch's: its gradients travel in buckets, beside the backward.

    Attributes:
        name: ``"kind"`` in descriptions.
        unit: what gradients are reduced in; a view has its words by it.
        reductions: the collective that reduces them, by the number of dimensions of its mesh, the last one for more.
        views: those of the dashboard that only models of this kind have.
    """

    name: str = ""
    unit: ClassVar[str] = "bucket"
    reductions: Sequence[str] = ("all-reduce",)
    views: ClassVar[tuple[str, ...]] = ()

    # ---- its tables ---------------------------------------------------------------------------------------

    def steps_behind(self, max_steps: int) -> int:
        """How many steps a history may be behind tables of `max_steps`, which forget what it is made from."""
        return max_steps // 4

    def collectives(
        self, view: TableView, table: CollectiveTable, calls: _Layout, groups: Mapping[int, GroupInfo], layout: _Layout
    ) -> list[ModelCollectives]:
        """What was communicated in these steps of a rank, beside buckets: none, or one record.

        Args:
            view: of one rank.
            table: the operations of that rank.
            calls: descriptions of type ``"call"`` by their numbers.
            groups: process groups by their numbers.
            layout: the buckets, or parameter groups, as they are described.
        """
        return []

    def measured(self, view: TableView, found: _Found, table: CollectiveTable) -> TableView:
        """The same view with the times that follow from its `collectives`."""
        return view

    def check_predictable(self) -> None:
        """Raises ValueError if no step of this kind with other settings can be predicted."""

    # ---- ranks that are late --------------------------------------------------------------------------------

    def with_late(self, facts: Facts, found: _Found, layout: _Layout, least_ms: float, least_share: float) -> Facts:
        """The same facts with where ranks fall behind.

        Args:
            facts: of some steps.
            found: of each rank, of these steps: `collectives`.
            layout: the buckets, or parameter groups, as they are described.
            least_ms: smaller delays of a rank count as noise.
            least_share: fraction of the steps in which a rank must be late at one place.
        """
        times = facts.steps.begin, facts.steps.places(), facts.steps.forward_ns()
        late = stragglers.find_stragglers(*times, minimum_ns=least_ms * 1e6, minimum_share=least_share)
        return ranks.with_varying(replace(facts, late=late), least_ms * 1e6)

    def late_places(self, facts: Facts) -> list[LatePlace]:
        """The straggler locations, the most expensive first."""
        made = []
        for one in facts.late:
            bucket, parameter = facts.place_of(one)
            cost = ranks.cost_ns(facts, one) if facts.buckets else one.delay_ns * one.share
            made.append(
                LatePlace(
                    rank=facts.steps.ranks[one.rank],
                    bucket=bucket,
                    parameter=parameter,
                    delay_ms=one.delay_ns / 1e6,
                    share=one.share,
                    where={ARRIVAL: "arrival", EVERYWHERE: "everywhere", VARYING: "varying"}.get(one.place, "place"),
                    pattern=one.pattern,
                    cost_percent=float(np.clip(facts.percent(cost), 0.0, 100.0)),
                )
            )
        return sorted(made, key=lambda one: -one.cost_percent)

    # ---- findings -------------------------------------------------------------------------------------------

    def findings(self, facts: Facts) -> list[Finding]:
        """What to change, in any order."""
        every = (*_BETWEEN_RANKS, *_OF_A_RANK) if facts.together else _OF_A_RANK
        found = _found(every, facts)
        least = ranks.least_of_collectives(facts)
        if program.shares_cores(facts):
            found = [one for one in found if one.kind not in (*program.REPLAYED, *_OF_COLLECTIVES)]
        return [one for one in found if one.kind not in _OF_COLLECTIVES or one.gain_percent > least]

    def findings_of_few(self, facts: Facts) -> list[Finding]:
        """The same for steps that are too few to say something of their speed."""
        return _found(_OF_A_RANK, facts)

    def analysed(self, facts: Facts) -> str:
        """What `findings` are about, besides the program around the model."""
        return "buckets, ranks, options, copies, communication" if facts.together else "options, copies"

    # ---- sentences of the summary ---------------------------------------------------------------------------

    def communication(self, facts: summary.Facts) -> str:
        """How much of it there is, and how much is overlapped."""
        steps, one = facts.steps, facts.typical
        of_step = int(np.median(steps["buckets"]))
        told = f"{counted(of_step, 'bucket')} ({size(float(np.median(steps['bytes'])))}) per step"
        if len(facts.info.ranks) == 1:
            return f"{told}; a single rank has no communication."
        if one is None or one.overlapped_share != one.overlapped_share:
            return f"{told}; no collective has finished yet."
        share = f"{100 * one.overlapped_share:.0f} % of the communication overlapped with the backward computation"
        if of_step == 1 and one.overlapped_share < 0.05:
            share += " (a single bucket cannot overlap: lower bucket_cap_mb)"
        return f"{told}, {ms(one.in_flight_ms)} in flight; {share}."

    def waiting(self, facts: summary.Facts) -> list[str]:
        """Which bucket is exposed most, and whether its collective or a rank is the cause."""
        return [_most_exposed(facts), _last(facts)]


class ParameterGroups(ModelKind):
    """A model with `fully_shard` or `replicate`: its gradients travel in parameter groups, and ranks meet in each.

    Args:
        name: the function of torch.
        reductions: the collective by the number of dimensions of its mesh, the last one for more.
    """

    unit = "parameter group"
    views = ("parameter_groups",)

    def __init__(self, name: str, *reductions: str) -> None:
        self.name, self.reductions = name, reductions

    def steps_behind(self, max_steps: int) -> int:
        """As many as a table of collectives surely holds."""
        return _OPERATIONS_KEPT

    def collectives(
        self, view: TableView, table: CollectiveTable, calls: _Layout, groups: Mapping[int, GroupInfo], layout: _Layout
    ) -> list[ModelCollectives]:
        """All-gathers and reductions of its groups."""
        return [collectives_of(view, table, calls, groups, layout)]

    def measured(self, view: TableView, found: _Found, table: CollectiveTable) -> TableView:
        """With how long the rank waited for them."""
        return with_waits(view, found[0], table)

    def check_predictable(self) -> None:
        """There is no simulator of parameter groups."""
        raise ValueError(f"a model with {self.name} has no buckets: how long its step would take can't be predicted")

    def with_late(self, facts: Facts, found: _Found, layout: _Layout, least_ms: float, least_share: float) -> Facts:
        """By parameter group: [Note: late in a parameter group] in `analysis/parameter_groups.py`."""
        return replace(facts, groups=grouped_steps(found, layout, facts.step_ns))

    def late_places(self, facts: Facts) -> list[LatePlace]:
        """With where they are in words."""
        made = []
        for one in facts.groups.late:
            cost = float(np.clip(facts.percent(one.delay_ns * one.share), 0.0, 100.0))
            delay, group = one.delay_ns / 1e6, one.group if one.group >= 0 else None
            where = words_of_phase(one.phase, facts.groups.names[one.group] if one.group >= 0 else "")
            kind = "arrival" if one.phase == BEFORE else "place"
            rank = facts.steps.ranks[one.rank]
            made.append(LatePlace(rank, group, None, delay, one.share, kind, cost_percent=cost, words=where))
        return sorted(made, key=lambda one: -one.cost_percent)

    def findings(self, facts: Facts) -> list[Finding]:
        """Those about its groups, and about the program."""
        found = [one for rule in parameter_groups.RULES for one in rule(facts, facts.groups)]
        return found + _found(_OF_THE_PROGRAM, facts)

    def findings_of_few(self, facts: Facts) -> list[Finding]:
        """None."""
        return []

    def analysed(self, facts: Facts) -> str:
        """Groups and ranks."""
        return "parameter groups, ranks"

    def communication(self, facts: summary.Facts) -> str:
        """How long ranks wait for it."""
        one = facts.typical
        told = f"{counted(len((facts.assignment or {})['buckets']), 'parameter group')}"
        if one is None:
            return f"{told}; how much of the communication is exposed is not known here: {summary.UNTOLD}."
        overlapped = f"{ms(one.overlapped_ms)} are overlapped" if one.overlapped_ms > 0 else "nothing is overlapped"
        return f"{told}; ranks wait {ms(one.ms('exposed'))} for their collectives in each step, and {overlapped}."

    def waiting(self, facts: summary.Facts) -> list[str]:
        """Nothing: ranks meet in each collective, so that the longest one has no cause of its own."""
        return []


BUCKETS: Final = ModelKind()
"""The kind of models of which nothing else is known."""
KINDS: Final[Mapping[str, ModelKind]] = {
    # The second reduction is for a mesh of several dimensions (HSDP): a reduce-scatter, then an all-reduce.
    one.name: one
    for one in (
        BUCKETS,
        ParameterGroups("fully_shard", "reduce-scatter", "reduction"),
        ParameterGroups("replicate", "all-reduce"),
    )
}
"""All kinds by their names."""


def kind_of(description: Mapping[str, Any] | None) -> ModelKind:
    """The kind of a model.

    Args:
        description: of its layout (see tutorials/site/descriptions.md); None if it is not known.
    """
    return KINDS.get(str((description or {}).get("kind", "")), BUCKETS)


def _found(rules: Sequence[_Rule], facts: Facts) -> list[Finding]:
    known = [rule for rule in rules if facts.steps.tells_gradients or rule not in OF_GRADIENTS]
    return [one for rule in known for one in rule(facts)]


def _most_exposed(facts: summary.Facts) -> str:
    """The bucket with the most exposed communication, and whether its collective or a late rank causes it."""
    sync, of_step = facts.sync, typical if facts.typical is None else facts.typical.of
    spans = {int(b): facts.spans["bucket"] == b for b in np.unique(sync["bucket"])}
    exposed = {b: of_step(facts.spans["step"][of], facts.spans["exposed_ms"][of]) for b, of in spans.items()}
    late = {b: summary.median_of(sync["late_ms"][sync["bucket"] == b]) or 0.0 for b in spans}
    bucket = max(exposed, key=lambda b: (exposed[b], late[b]))
    of_it = sync["bucket"] == bucket
    speed = summary.median_of(sync["bandwidth_gb_s"][of_it])
    told = (
        f"Bucket {bucket}{summary.parameters_of(facts, bucket)} has the most exposed communication, "
        f"{ms(exposed[bucket])}; its all-reduce takes {ms(summary.median_of(sync['all_reduce_ms'][of_it]))} once all "
        "ranks have launched it"
    )
    return told + (f" ({speed:.2g} GB/s)." if speed is not None else ".")


def _last(facts: summary.Facts) -> str:
    """The rank that was last most often; nothing if a straggler is named."""
    if facts.late or facts.judged is None:
        return ""
    last = facts.judged.last
    if last.most is None or last.delay_ns[last.most] < 1e6 * _TOGETHER_MS:
        together = ms(summary.median_of(facts.sync["late_ms"]))
        return f"The ranks launch their collectives within {together} of each other (median)."
    return ranks.last_most_often(facts.judged)
