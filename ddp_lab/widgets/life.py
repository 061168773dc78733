"""What has ended of the cluster that a dashboard shows: in words, and whether another one runs that it could show."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ..formatting import label_of

if TYPE_CHECKING:
    from ..control.ranks import Ranks

__all__ = ["life_of", "name_of", "successor_of"]


def name_of(cluster: Any) -> str:
    """The cluster's name; "" without one: a run that is followed has none."""
    return getattr(cluster, "name", None) or ""


def successor_of(cluster: Any) -> Ranks | None:
    """The cluster of this notebook that took the place of one that does not run; None if there is none."""
    return None if cluster is None else cast("Ranks | None", cluster.successor())


def life_of(cluster: Any, lost: Mapping[int, str]) -> dict[str, Any]:
    """Returns ``what`` has ended, the ``remedy``, whether all ranks have ``ended``, and what ``adopt`` is called.

    Args:
        cluster: whose ranks are shown; None: there are none.
        lost: rank -> how its process ended, for those that have.

    Returns:
        Empty as long as there is nothing to say.
    """
    if cluster is None:
        return {}
    if not cluster.running:
        what, remedy = _end_of(cluster)
        successor = successor_of(cluster)
        if successor is not None:
            other = "" if successor.name == cluster.name else ", and another one runs"
            return {"what": what + other, "remedy": "", "ended": True, "adopt": "Show the cluster that runs"}
        return {"what": what, "remedy": remedy, "ended": True, "adopt": ""}
    if not lost:
        return {}
    ranks: dict[str, list[int]] = {}
    for rank, how in sorted(lost.items()):
        ranks.setdefault(how, []).append(rank)
    what = "; ".join(f"{label_of(of)} {_of_several(how) if len(of) > 1 else how}" for how, of in ranks.items())
    given = "it a new process" if len(lost) == 1 else "them new processes"
    remedy = f"The next cell gives {given}, without the variables."
    return {"what": what[:1].upper() + what[1:], "remedy": remedy, "ended": False, "adopt": ""}


def _end_of(cluster: Any) -> tuple[str, str]:
    """How a cluster that does not run came to its end, and the remedy where that does not name it."""
    attached = {one.name: one.attached for one in cluster.detached()}
    if cluster.name not in attached:
        how = "was stopped" if cluster.timeline.ranks() else "does not run"
        return f"The cluster {how}", "%cluster start starts another one, which can be shown here."
    if attached[cluster.name] == os.getpid():
        return f"This notebook was attached to the cluster {cluster.name} again", ""
    return f"This notebook no longer uses the cluster {cluster.name} (%cluster attach {cluster.name} does again)", ""


def _of_several(how: str) -> str:
    """`was killed` -> `were killed`."""
    return f"were{how[3:]}" if how.startswith("was ") else how
