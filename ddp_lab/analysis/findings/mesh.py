"""Findings about the dimensions of a `DeviceMesh`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...formatting import ms, rate, size
from .facts import Facts, Finding

__all__ = ["between_hosts"]

_FASTER = 1.5  # the links within a host, at least
_LEAST_PERCENT = 3.0  # of the step


def between_hosts(facts: Facts) -> Iterator[Finding]:
    """A dimension that crosses the network, though it sends more than another one that does not.

    If both changed places, each would send its bytes at the rate of the other one. At most the waits are saved: where
    they are not known (NCCL, but for `fully_shard`), nothing is found.
    """
    for outer, inner in product(facts.dimensions, facts.dimensions):
        if not (outer.between_hosts and not inner.between_hosts and outer.bytes > inner.bytes > 0):
            continue
        slow, fast = outer.bytes / outer.ns, inner.bytes / inner.ns  # bytes per ns are GB/s
        saved = (outer.bytes - inner.bytes) * (1 / slow - 1 / fast)
        gain = facts.percent(min(saved, outer.waited_ns))
        if fast < _FASTER * slow or gain < _LEAST_PERCENT:
            continue
        yield Finding(
            kind="mesh-dimension-between-hosts",
            title=f"The mesh dimension {outer.name} sends more than {inner.name}, but its ranks are on several hosts.",
            evidence=f"In each step it sends {size(outer.bytes)} over each link at {rate(slow)} and {inner.name} "
            f"{size(inner.bytes)} at {rate(fast)}; a rank waits {ms(outer.waited_ns / 1e6)} for it.",
            remedy=f"Make {outer.name} the last dimension of init_device_mesh(), whose ranks are neighbours, and "
            "number the ranks host by host.",
            gain_percent=gain,
        )
        return
