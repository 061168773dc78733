"""The widget that shows a collective which was run from the notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..control.collectives import ShownCollective
from ..timeline.timeline import Timeline
from .dashboard import Dashboard
from .paint.figure import to_plotly
from .views import collective_scene

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["Collectives"]


class Collectives(Dashboard):
    """A dashboard that shows a collective step by step."""

    def __init__(self, timeline: Timeline, **means: Any) -> None:
        super().__init__(timeline, views=["collectives"], **means)

    @property
    def shown(self) -> ShownCollective | None:
        """The last collective that was run; None before the first."""
        return self._shown.stage.shown

    def show(self, shown: ShownCollective) -> None:
        """Shows a collective that was run elsewhere."""
        self._shown.stage.show(shown)
        self.refresh()

    def figure(self) -> go.Figure:
        """Returns bytes and time of each step as a plotly figure, for reports.

        Raises:
            ValueError: no collective has been run yet.
        """
        return to_plotly(collective_scene(self.shown), 460)
