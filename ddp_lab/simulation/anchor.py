"""A simulation that agrees with the recording where both are known.

[Note: the anchor]
A replay of medians is faster than the steps were: in each step another rank is the slow one, and all wait for it. That
hardly depends on the buckets. So the recorded configuration is simulated, too, and what its recorded steps took beyond
that is added to whatever is predicted from this recording. What is asked is thus the difference that a change makes;
the part that does not change is measured. Where the simulation is slower than the steps were the link is not as slow as
it was taken for (it was measured at a bad moment, or apart from computation): it is made faster until both agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .configuration import Configuration
from .link_model import LinkModel
from .simulator import simulate_many
from .workload import Workload

__all__ = ["anchored", "as_recorded"]

_MEBIBYTE = 1024 * 1024
_FASTEST, _TRIED = 1 / 64, 17


def as_recorded(workload: Workload) -> Configuration | None:
    """What the workload was recorded with; None if that is not known."""
    return Configuration([cap / _MEBIBYTE for cap in workload.caps]) if workload.caps else None


def anchored(workload: Workload, link: LinkModel) -> tuple[Workload, LinkModel]:
    """Workload and link with which a simulation of the recorded configuration takes `step_ns`.

    Args:
        workload: as recorded; returned as it is, with its link, if its caps or its steps are unknown.
        link: that of the recording.

    Returns:
        The workload with its `waits_ns`, and the link, faster if need be (down to 1/64 of its times).
    """
    recorded = as_recorded(workload)
    if recorded is None or workload.step_ns is None:
        return workload, link
    bare = replace(workload, waits_ns=0.0)
    low, high = 0.0, 1.0  # powers of _FASTEST
    if _steps(bare, recorded, [link])[0] > workload.step_ns:
        for _ in range(2):
            powers = np.linspace(low, high, _TRIED)
            found = _steps(bare, recorded, [link.scaled(_FASTEST**power) for power in powers])
            enough = np.flatnonzero(found <= workload.step_ns)
            last = int(enough[0]) if len(enough) else _TRIED - 1
            low, high = float(powers[max(last - 1, 0)]), float(powers[last])
        link = link.scaled(_FASTEST**high)
    return replace(bare, waits_ns=workload.step_ns - float(_steps(bare, recorded, [link])[0])), link


def _steps(workload: Workload, configuration: Configuration, links: Sequence[LinkModel]) -> npt.NDArray[np.float64]:
    return simulate_many(workload, [configuration] * len(links), links).step_ns
