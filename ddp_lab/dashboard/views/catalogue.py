"""The views of the dashboard: names, titles, tabs, and what each needs. Python and the browser read this list."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TABS", "VIEWS", "View"]


@dataclass(frozen=True)
class View:
    """A view of the dashboard.

    Attributes:
        title: what its tab is called.
        about: what it shows, in a sentence.
        question: the group of tabs it belongs to, as a reader asks; "" for a tab beside the groups.
        beside: the view whose tab it shares; "" if it has its own.
        steps: it shows recorded steps, so that there is nothing to see before the first one.
        model: it shows one model, which a reader chooses.
        ranks: it needs ranks that run, so that a recording does not have it.
        groups: it shows parameter groups, so that its tab is there once a model with `fully_shard` or `replicate` is.
    """

    title: str
    about: str
    question: str = ""
    beside: str = ""
    steps: bool = True
    model: bool = True
    ranks: bool = False
    groups: bool = False


_FAST, _LATE, _CHANGE, _TRY, _INSIDE = "How fast", "Who is late", "What to change", "Try it", "Look inside"

VIEWS = {
    "overview": View("Overview", "How training is going, what a step consists of, and what to change first."),
    "timeline": View(
        "Timeline",
        "When each bucket on each rank became ready, was launched and was reduced, for one or several steps.",
        _FAST,
    ),
    "sync": View(
        "Gradient sync",
        "The synchronisation of each bucket: bytes, bandwidths, waits, compared with the measured link.",
        _FAST,
        beside="timeline",
    ),
    "overlap": View(
        "Overlap",
        "The time breakdown of each step, and its efficiency: the share that is not exposed communication.",
        _FAST,
    ),
    "parameter_groups": View(
        "Parameter groups",
        "With fully_shard or replicate: when each parameter group was gathered and reduced, and what ranks waited for.",
        _FAST,
        groups=True,
    ),
    "stragglers": View(
        "Stragglers",
        "How long the others waited for each rank, by bucket and step, and where its own computation fell behind.",
        _LATE,
    ),
    "groups": View(
        "Collectives by group",
        "Every collective, send and receive of every process group, from any source: who was last, how fast it was.",
        _LATE,
        steps=False,
        model=False,
    ),
    "findings": View("Findings", "What to change, the largest estimated saving first.", _CHANGE),
    "buckets": View("Buckets", "The bucket layout as a map of the model.", _CHANGE),
    "what_if": View(
        "What if",
        "Sliders for world size, link, bucket size limit and straggler; the predicted step beside the recorded one.",
        _TRY,
        steps=False,
        model=False,
    ),
    "fault_injection": View(
        "Fault injection", "Injects, lists and ends faults.", _TRY, steps=False, model=False, ranks=True
    ),
    "step": View(
        "Step through",
        "Pauses a backward at chosen points, shows the reducer as a state machine, and continues step by step.",
        _INSIDE,
        steps=False,
        model=False,
        ranks=True,
    ),
    "gradients": View(
        "Gradients",
        "Norms before and after averaging by rank and bucket, noise scale, NaN, drift of replicas.",
        _INSIDE,
        steps=False,
    ),
    "collectives": View(
        "Collectives",
        "A collective step by step: the parts on each rank, the data sent, the time of each step.",
        _INSIDE,
        steps=False,
        model=False,
        ranks=True,
    ),
}
"""The views by name, in the order of their tabs."""

TABS = tuple(
    (name, *(other for other, one in VIEWS.items() if one.beside == name))
    for name, view in VIEWS.items()
    if not view.beside
)
"""The names of the views in each tab."""
