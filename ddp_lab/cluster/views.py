"""The widgets of a cluster, and the questions that they can ask its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..control.collectives import DEFAULT_BYTES, choices, run_collective
from ..control.ranks import Ranks
from ..errors import ClusterError
from ..formatting import label_of
from ..output.display import RunView, kernel_shell
from ..protocol.messages import InspectGradients, MeasureEventCost

if TYPE_CHECKING:
    from ..dashboard.cluster_panel import ClusterPanel
    from ..dashboard.collectives import Collectives
    from ..dashboard.dashboard import Dashboard


class Views:
    """The widgets of one cluster.

    Args:
        cluster: the cluster.
    """

    def __init__(self, cluster: Ranks) -> None:
        self._cluster = cluster
        self._panel: ClusterPanel | None = None

    def panel(self) -> ClusterPanel:
        """Returns the widget that shows each rank live, with buttons to interrupt, rejoin and restart.

        It shows state, device, memory, CPU and GPU use, newest step, and seconds since the rank was last heard from,
        also while a cell runs. A cluster that is the last expression of a notebook's cell shows it.
        """
        from ..dashboard.cluster_panel import ClusterPanel

        if self._panel is None or self._panel.comm is None:  # it was closed
            self._panel = ClusterPanel(self._cluster)
        return self._panel

    def dashboard(self, *views: str) -> Dashboard:
        """Returns a widget that shows the timeline live.

        Args:
            views: of ``"timeline"``, ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"``, ``"findings"``,
                ``"step"`` (through a backward), ``"fault_injection"``, ``"what_if"`` (sliders),
                ``"gradients"``, ``"groups"`` (every collective) and ``"collectives"``; none: all.
        """
        from ..dashboard.dashboard import Dashboard

        return Dashboard(self._cluster.timeline, views=views or None, **self.means())

    def what_if(self) -> Dashboard:
        """Returns a widget that predicts the step for the values of its sliders, next to the recorded step.

        Sliders: world size, bandwidth and latency of the interconnect, bucket size limit, "without the straggler".
        "Run it" tests a bucket size limit against the current one on the training ranks and shows the prediction's
        error.
        """
        return self.dashboard("what_if")

    def animate_collective(
        self, collective: str = "all_reduce", algorithm: str | None = None, *, bytes: int = DEFAULT_BYTES
    ) -> Collectives:
        """Runs a collective step by step on the ranks, and returns a widget that animates it.

        The tensors are small and real: the numbers that arrived show which rank held which part after each step. Each
        step is timed (median of five runs). The widget runs other collectives on demand.

        Args:
            collective: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"``, ``"reduce"``,
                ``"gather"``, ``"scatter"`` or ``"all_to_all"``; the root is rank 0.
            algorithm: ``"ring"``, ``"tree"``, ``"chain"``, ``"halving"``, ``"doubling"`` or ``"direct"``, where the
                collective has it; None for its first one.
            bytes: size of the buffer on each rank, up to 64 MiB; rounded up so that each part holds whole numbers.

        Raises:
            ValueError: there is no such algorithm, or it does not support this number of ranks.
            ClusterError: the cluster is not running, a rank has failed, or the ranks are running a cell.

        Example:
            >>> lab.animate_collective("all_reduce", "ring", bytes=1_000_000)
            >>> lab.animate_collective("broadcast", "tree").shown.table()
        """
        from ..dashboard.collectives import Collectives

        shown = run_collective(self._cluster, collective, algorithm, bytes)
        made = Collectives(self._cluster.timeline, **self.means())
        made.show(shown)
        return made

    def of_run(self, waited: bool, after: str) -> RunView | None:
        """The view of a cell's progress; None without a notebook.

        Args:
            waited: whether the cell is waited for: then it is for pages opened meanwhile.
            after: what becomes of the ranks when the kernel ends.
        """
        if kernel_shell() is None:
            return None
        from ..dashboard.background_cell import BackgroundCell

        return BackgroundCell(self._cluster.timeline, after, waited)

    def means(self) -> dict[str, Any]:
        """The questions that a dashboard can ask the ranks: arguments of `Dashboard`."""
        from ..dashboard.controls import CollectiveStage

        cluster = self._cluster

        def request_inspection(reducer: int, step: int) -> None:
            for rank, own in cluster.timeline.own_numbers(reducer).items():
                cluster.wire.send([rank], InspectGradients(own, step))

        def event_cost() -> float | None:
            replies = cluster.wire.request([0], MeasureEventCost(), 0.5) if cluster.running else {}
            return replies[0].ns if 0 in replies else None

        return {
            "status": cluster.status,
            "request_inspection": request_inspection,
            "link": lambda: cluster.link,
            "event_cost": event_cost,
            "lost": cluster.lost,
            "cluster": cluster,
            "collectives": CollectiveStage(
                lambda *asked: run_collective(cluster, *asked),
                lambda: choices(cluster.world_size),
                lambda: _why_busy(cluster),
            ),
        }


def _why_busy(cluster: Ranks) -> str:
    """Why no collective can be run on the ranks now; "" if one can, or if there are no ranks."""
    try:
        busy = cluster.busy_ranks()
    except ClusterError:
        return ""
    if not busy:
        return ""
    are = "is" if len(busy) == 1 else "are"
    return f"{label_of(busy).capitalize()} {are} running a cell: wait until it ends, or interrupt it."
