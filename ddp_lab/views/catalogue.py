"""The views of the dashboard: names, titles, tabs, and what each needs. Python and the browser read this list."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMER_NAMES", "TABS", "VIEWS", "View"]


@dataclass(frozen=True)
class View:
    """A view of the dashboard.

    Attributes:
        title: what its tab is called.
        about: what it shows, in a sentence.
        beside: the view whose tab it shares; "" if it has its own.
        steps: it shows recorded steps, so that there is nothing to see before the first one.
        model: it shows one model, which a reader chooses.
        ranks: it needs ranks that run, so that a recording does not have it.
    """

    title: str
    about: str
    beside: str = ""
    steps: bool = True
    model: bool = True
    ranks: bool = False


VIEWS = {
    "timeline": View(
        "Timeline",
        "When each bucket on each rank became ready, was launched and was reduced, for one or several steps.",
    ),
    "sync": View(
        "Gradient sync",
        "The synchronisation of each bucket: bytes, bandwidths, waits, compared with the measured link.",
        beside="timeline",
    ),
    "overlap": View(
        "Overlap",
        "The time breakdown of each step, and its efficiency: the share that is not exposed communication.",
    ),
    "stragglers": View(
        "Stragglers",
        "How long the others waited for each rank, by bucket and step, and where its own computation fell behind.",
    ),
    "buckets": View("Buckets", "The bucket layout as a map of the model."),
    "findings": View("Findings", "What to change, the largest estimated saving first."),
    "step": View(
        "Step through",
        "Pauses a backward at chosen points, shows the reducer as a state machine, and continues step by step.",
        steps=False,
        model=False,
        ranks=True,
    ),
    "fault_injection": View("Fault injection", "Injects, lists and ends faults.", steps=False, model=False, ranks=True),
    "what_if": View(
        "What if",
        "Sliders for world size, link, bucket size limit and straggler; the predicted step beside the recorded one.",
        steps=False,
        model=False,
    ),
    "gradients": View(
        "Gradients",
        "Norms before and after averaging by rank and bucket, noise scale, NaN, drift of replicas.",
        steps=False,
    ),
    "groups": View(
        "Collectives by group",
        "Every collective, send and receive of every process group, whoever started it: who was last, how fast it was.",
        steps=False,
        model=False,
    ),
    "collectives": View(
        "Collectives",
        "A collective step by step: the parts on each rank, the data sent, the time of each step.",
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

FORMER_NAMES = {"rehearsal": "fault_injection"}
"""Names of views that are still accepted."""
