"""The widgets of a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError
from .collectives import DEFAULT_BYTES, choices, run_collective
from .displays import kernel_shell, write_line
from .engine_messages import RankFunction
from .live_control import LiveControl
from .membership import Membership, RankRecord
from .rank_sets import label_of
from .status_table import status_tables

if TYPE_CHECKING:
    from ..insight.link_model import LinkModel
    from ..widgets.cluster_panel import ClusterPanel
    from ..widgets.dashboard import Dashboard
    from ..widgets.views import Collectives, WhatIfSliders
    from .startup import Progress
    from .timeline import Timeline
    from .vitals import RankVitals
    from .wire import Wire

__all__ = ["ClusterViews"]


class ClusterViews(LiveControl):
    """The part of `Cluster` that makes widgets."""

    _panel: ClusterPanel | None = None

    if TYPE_CHECKING:
        timeline: Timeline
        name: str | None
        _link: LinkModel | None

        @property
        def wire(self) -> Wire: ...
        @property
        def running(self) -> bool: ...
        @property
        def world_size(self) -> int: ...
        def status(self) -> tuple[RankRecord, ...]: ...
        def _joined(self) -> Membership: ...
        def vitals(self, seconds: float = ...) -> tuple[RankVitals, ...]: ...
        def interrupt(self, ranks: Iterable[int] | None = None) -> None: ...
        def rejoin(self, replace: Iterable[int] = ()) -> dict[int, str]: ...
        def restart(self, progress: Progress | None = None) -> None: ...
        def run(self, code: RankFunction, *args: Any, **options: Any) -> Any: ...

    def panel(self) -> ClusterPanel:
        """Returns a widget that shows each rank live, with buttons to interrupt, rejoin and restart; always the same.

        State, device, memory, processor and GPU, newest step, seconds since the rank was last heard of. It works while
        a cell runs. A cluster that is the last expression of a notebook's cell shows it.
        """
        from ..widgets.cluster_panel import ClusterPanel

        if self._panel is None or self._panel.comm is None:  # it was closed
            self._panel = ClusterPanel(self)
        return self._panel

    def _ipython_display_(self) -> None:
        """Shows the panel in a notebook, the table of `status` elsewhere."""
        if kernel_shell() is not None:
            self.panel()._ipython_display_()
            return
        text = status_tables(self.status())[0] if self.running else "The cluster does not run: `.start()` starts it."
        write_line("stdout", text)

    def dashboard(self, *views: str) -> Dashboard:
        """Returns a widget that shows the timeline live.

        Args:
            views: of ``"timeline"``, ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"``, ``"findings"``,
                ``"step"`` (through a backward), ``"rehearsal"`` (faults on purpose), ``"what_if"`` (sliders),
                ``"gradients"`` and ``"collectives"``; none: all.
        """
        from ..widgets.dashboard import Dashboard

        return Dashboard(self.timeline, views=views or None, **self._means())

    def what_if(self) -> WhatIfSliders:
        """Returns a widget that predicts the step for what its sliders say, beside what was recorded.

        World size, bandwidth and latency of the link, bucket cap, "without the straggler"; "Run it" has the ranks that
        train take turns with a cap and with what they have, and tells the prediction's error.
        """
        from ..widgets.views import WhatIfSliders

        return WhatIfSliders(self.timeline, **self._means())

    def show_collective(
        self, collective: str = "all_reduce", algorithm: str | None = None, *, bytes: int = DEFAULT_BYTES
    ) -> Collectives:
        """Runs a collective step by step on the ranks, and returns a widget that plays what happened.

        The tensors are real, small and the algorithm's own: who held which part after each step is read off the numbers
        that arrived, and each step is timed (median of five runs). The widget runs others on demand.

        Args:
            collective: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"``, ``"reduce"``,
                ``"gather"``, ``"scatter"`` or ``"all_to_all"``; the root is rank 0.
            algorithm: ``"ring"``, ``"tree"``, ``"chain"``, ``"halving"``, ``"doubling"`` or ``"direct"``, where the
                collective has it; None for its first one.
            bytes: of the buffer on each rank, up to 64 MiB; rounded up to whole numbers in as many parts as ranks.

        Raises:
            ValueError: there is no such algorithm, or it can't run on so many ranks.
            ClusterError: the cluster does not run, a rank is dead, or the ranks run a cell.

        Example:
            lab.show_collective("all_reduce", "ring", bytes=1_000_000)
            lab.show_collective("broadcast", "tree").shown.table()
        """
        from ..widgets.views import Collectives

        shown = run_collective(self, collective, algorithm, bytes)
        made = Collectives(self.timeline, **self._means())
        made.show(shown)
        return made

    def _why_busy(self) -> str:
        """Why no collective can be run on the ranks just now; "" if one can, or if there are no ranks."""
        try:
            busy = self.busy_ranks()
        except ClusterError:
            return ""
        if not busy:
            return ""
        runs = "runs" if len(busy) == 1 else "run"
        return f"{label_of(busy).capitalize()} {runs} a cell: wait for its end, or interrupt it."

    def _means(self) -> dict[str, Any]:
        """What a dashboard can ask of the ranks."""
        from ..widgets.collectives import CollectiveStage

        def request_inspection(reducer: int, step: int) -> None:
            for rank, own in self.timeline.own_numbers(reducer).items():
                self.wire.send([rank], {"op": "inspect", "reducer": own, "step": step})

        def event_cost() -> float | None:
            replies = self.wire.request([0], "event_cost", timeout=0.5) if self.running else {}
            cost: float | None = replies.get(0, {}).get("ns")
            return cost

        return {
            "status": self.status,
            "request_inspection": request_inspection,
            "link": lambda: self._link,
            "event_cost": event_cost,
            "lost": lambda: self._joined().lost(),
            "cluster": self,
            "collectives": CollectiveStage(
                lambda *asked: run_collective(self, *asked), lambda: choices(self.world_size), self._why_busy
            ),
        }
