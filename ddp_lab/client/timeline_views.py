"""What a timeline shows of itself: dashboard, replay, sliders, report, figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..files import write_text
from .timeline_model import TimelineModel

if TYPE_CHECKING:
    from ..widgets.dashboard import Dashboard
    from ..widgets.views import WhatIfSliders
    from .timeline import Timeline

__all__ = ["TimelineViews"]


class TimelineViews(TimelineModel):
    """The part of `Timeline` that makes widgets and pages. Those are imported when they are asked for."""

    def dashboard(self, *views: str) -> Dashboard:
        """Returns a widget that shows this timeline: a recording's, say. It needs no ranks and no torch.

        `Cluster.dashboard` shows a cluster's timeline, and has controls for its ranks.

        Args:
            views: of ``"timeline"``, ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"``, ``"findings"``,
                ``"what_if"`` and ``"gradients"``; none: all.

        Example:
            ddp_lab.Timeline.load("run.npz").dashboard()
        """
        from ..widgets import dashboard

        return dashboard.of_recording(cast("Timeline", self), views)

    def replay(self, *views: str, speed: float = 1.0) -> Dashboard:
        """Returns a dashboard that plays what was recorded as if it happened now, with a bar to pause and to go back.

        Its ``player`` does the same from code: ``play()``, ``pause()``, ``seek(seconds)``, ``speed``. Pauses of more
        than a second, between two cells say, are played as one second.

        Args:
            views: as for `dashboard`.
            speed: seconds of the recording in one second; 0.05 shows how each step grows.

        Raises:
            ValueError: the speed is not positive, nothing was recorded, or there is no such view.

        Example:
            ddp_lab.Timeline.load("run.npz").replay(speed=0.1)
        """
        from ..widgets import dashboard
        from .player import Player

        player = Player(cast("Timeline", self), speed=speed)
        return dashboard.of_recording(player.timeline, views, player)

    def what_if(self) -> WhatIfSliders:
        """Returns a widget that predicts the step for what its sliders say, beside what was recorded."""
        from ..widgets.views import WhatIfSliders

        return WhatIfSliders(cast("Timeline", self))

    def report(self, path: str | os.PathLike[str], reducer: int | None = None) -> Path:
        """Writes one HTML page that needs no network: findings in words first, figures and tables after.

        Args:
            path: where to.
            reducer: which model; None for the most recently active.
        """
        from ..widgets import report

        target = Path(path)
        write_text(target, report.page(cast("Timeline", self), reducer))
        return target

    def figure(self, view: str = "timeline", **options: Any) -> Any:
        """A view as a plotly figure, for reports.

        Args:
            view: ``"timeline"`` (the spans of a step), ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"`` or
                ``"findings"``.
            options: see `ddp_lab.widgets.view_figures.figure`.
        """
        from ..widgets import view_figures

        return view_figures.figure(cast("Timeline", self), view, **options)
