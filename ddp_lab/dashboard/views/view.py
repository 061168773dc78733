"""What a view of the dashboard is: one object with its words, its numbers, its scene and what a page shows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ...analysis.findings import Facts
from ...timeline.model_registry import Layout, newest
from ...timeline.steady_steps import ANALYSED_STEPS
from ...timeline.timeline import Timeline
from ..paint.figure import to_plotly
from ..paint.scene_json import blocks_json
from ..paint.scene_svg import framed
from ..scene import Block, Scene

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["Reported", "Selection", "View"]

_LEAST_PIXELS = 260


@dataclass(frozen=True)
class Selection:
    """What of a training to show.

    Attributes:
        model: which model; None for the most recently active.
        last_steps: how many of its newest steps; None for the view's default.
        between: the first and the last step that a reader chose; None: the newest ones.
        step: the step of a view of one step; None: the newest, or one that stands for all.
    """

    model: int | None = None
    last_steps: int | None = None
    between: tuple[int, int] | None = None
    step: int | None = None
    _known: dict[str, Facts | None] = field(default_factory=dict, compare=False, repr=False)

    def analysis_input_in(self, timeline: Timeline) -> Facts | None:
        """The facts of the analysed steps: the same for all views that get this selection, so that they agree."""
        if "analysis_input" not in self._known:
            self._known["analysis_input"] = timeline.analysis_input(
                self.model, self.last_steps or ANALYSED_STEPS, between=self.between
            )
        return self._known["analysis_input"]

    def model_in(self, timeline: Timeline) -> int:
        """The chosen model, else the newest one that has trained; -1 if there is none."""
        known = [one.reducer for one in timeline.reducers() if one.last_step >= 0]
        return self.model if self.model is not None else known[-1] if known else -1

    def layout_in(self, timeline: Timeline) -> Layout | None:
        """The bucket layout that is analysed, with its complete steps; None if there are none."""
        model = self.model_in(timeline)
        if self.between is None:
            return timeline.analysis_layout(model)
        first, last = self.between
        within = [one.only((one.step >= first) & (one.step <= last)) for one in timeline.layouts(model)]
        return newest([one for one in within if len(one.step)])


@dataclass(frozen=True)
class Reported:
    """A view in a report: `style` is a class of the report's style sheet."""

    title: str
    caption: str
    scene: Scene
    style: str = ""


class View:
    """A view: a subclass in a file of its own, one object of it in `views.VIEWS`.

    Only `name`, `title`, `about`, `facts` and `scene` are needed: the scene is painted in the page, in saved pictures
    and in figures. A view with a script of its own in ``static`` overrides `page`.

    Attributes:
        name: how it is called in code.
        title: what its tab is called.
        about: what it shows, in a sentence.
        question: the group of tabs it belongs to, as a reader asks; "" for a tab beside the groups.
        beside: the view whose tab it shares; "" if it has its own.
        steps: it shows recorded steps, so that there is nothing to see before the first one.
        model: it shows one model, which a reader chooses.
        ranks: it needs ranks that run, so that a recording does not have it.
        groups: it shows parameter groups, so that its tab is there once a model with `fully_shard` or `replicate` is.
        of_step: it shows one step, which a reader chooses.
        fed: a page has its numbers from the steps that it is sent, or from a control: it asks for no facts.
        kept: its last facts are there for a page that loses the kernel, even if the page has not shown it yet.
        also: facts that a page shows with it, by the names in `views.FACTS`.
        pixels: height of its plotly figure without lanes, and of each lane; None: it has no figure.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    question: ClassVar[str] = ""
    beside: ClassVar[str] = ""
    steps: ClassVar[bool] = True
    model: ClassVar[bool] = True
    ranks: ClassVar[bool] = False
    groups: ClassVar[bool] = False
    of_step: ClassVar[bool] = False
    fed: ClassVar[bool] = False
    kept: ClassVar[bool] = False
    also: ClassVar[Sequence[str]] = ("strip",)
    pixels: ClassVar[tuple[int, int] | None] = (_LEAST_PIXELS, 0)

    # ---- one for each view ------------------------------------------------------------------------------------

    def facts(self, timeline: Timeline, chosen: Selection) -> Any:
        """Returns the numbers, computed once for all that show them; None if they do not come from a timeline."""
        return None

    def scene(self, facts: Any) -> Scene:
        """Returns the facts as axes and marks."""
        return Scene(self.title, empty="it has no picture")

    def page(self, facts: Any) -> Mapping[str, Any]:
        """Returns what a page shows: blocks; or, for a view with a script of its own, what that script reads."""
        return {"blocks": blocks_json(self.blocks(facts))}

    def blocks(self, facts: Any) -> Sequence[Block]:
        """Returns the view as sentences, pictures, tables and advice."""
        scene = self.scene(facts)
        if scene.empty:
            return [f"{scene.empty[:1].upper()}{scene.empty[1:]}."]
        return [one for one in (scene.summary, scene, scene.table) if one]

    # ---- the same for most views ------------------------------------------------------------------------------

    def svg(self, facts: Any) -> str:
        """Returns the view as a self-contained SVG picture."""
        return framed(self.scene(facts))

    def words(self, timeline: Timeline, facts: Any) -> str:
        """Returns the content of the picture as text."""
        return timeline.summary()

    def picture(self, timeline: Timeline, chosen: Selection | None = None) -> str:
        """Returns the view of a timeline as SVG."""
        return self.svg(self.facts(timeline, chosen or Selection()))

    def figure(self, timeline: Timeline, **options: Any) -> go.Figure:
        """Returns the view as a plotly figure; options: ``model`` and ``last_steps``.

        Raises:
            ValueError: it has nothing to show.
            TypeError: it has no such option.
        """
        if wrong := sorted(options.keys() - {"model", "last_steps"}):
            raise TypeError(f"the view {self.name!r} takes model and last_steps, not {', '.join(wrong)}")
        scene = self.scene(self.facts(timeline, Selection(**options)))
        upright, lane = self.pixels or (_LEAST_PIXELS, 0)
        return to_plotly(scene, max(_LEAST_PIXELS, upright + lane * sum(len(panel.y.lanes) for panel in scene.panels)))

    def reported(self, timeline: Timeline, chosen: Selection) -> Reported | None:
        """Returns the view as it stands in a report; None: it does not."""
        return None
