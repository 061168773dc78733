"""What the dimensions of a `DeviceMesh` communicate, where some lie between hosts and others within them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..analysis.findings import Facts, MeshDimension
from .tables.span_columns import Columns

if TYPE_CHECKING:
    from .model import TimelineModel

__all__ = ["mesh_dimensions"]


def mesh_dimensions(timeline: TimelineModel, found: Facts) -> list[MeshDimension]:
    """The dimensions that communicate in the steps of these facts; empty unless they differ in crossing hosts."""
    hosts = {rank: str(about["host"]) for rank, about in found.processes.items()}
    crosses = {
        one.group: len({hosts[rank] for rank in one.ranks if rank in hosts}) > 1
        for one in timeline.groups()
        if one.mesh_dimension and len(one.ranks) > 1
    }
    if len(set(crosses.values())) < 2 or not len(found.steps):
        return []
    columns, steps = timeline.collective_columns(), found.steps
    begin = int(np.where(steps.forward_begin > 0, steps.forward_begin, steps.begin).min())
    within = (columns["entered_ns"] >= begin) & (columns["entered_ns"] <= int(steps.end.max()))
    within &= np.isfinite(columns["transfer_ms"]) & np.isin(columns["group"], list(crosses))
    names = {one.group: one.mesh_dimension for one in timeline.groups()}
    by_name: dict[str, list[int]] = {}
    for group in np.unique(columns["group"][within]).tolist():  # an older mesh may have dimensions of the same names
        by_name.setdefault(names[group], []).append(group)
    made = []
    for name, groups in by_name.items():
        rows = np.flatnonzero(within & np.isin(columns["group"], groups))
        between = any(crosses[group] for group in groups)
        made.append(_dimension(name, between, {of: columns[of][rows] for of in columns}, len(steps)))
    return made


def _dimension(name: str, between_hosts: bool, rows: Columns, steps: int) -> MeshDimension:
    times = steps * len(np.unique(rows["rank"]))
    return MeshDimension(
        name,
        between_hosts,
        bytes=float((rows["bus_gb_s"] * rows["transfer_ms"]).sum()) * 1e6 / times,
        ns=float(rows["transfer_ms"].sum()) * 1e6 / times,
        waited_ns=float(rows["waited_ms"].sum()) * 1e6 / times,
    )
