"""The exceptions of ddp_lab.

    DdpLabError
    ├── ClusterError         the cluster failed: a rank did not start, exited, or is unreachable
    ├── CellError            a cell failed on some ranks; `.failures` holds rank -> error, first in time first
    ├── ExtensionError       the compiled extension is missing or was built for another torch (also an ImportError)
    └── BucketStateError     a bucket was asked for a transition that its state does not allow

An invalid argument raises a plain `ValueError` or `TypeError`. If this machine does not support the best way and
another one is used, there is a `FallbackWarning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "BucketStateError",
    "CellError",
    "ClusterError",
    "DdpLabError",
    "ExtensionError",
    "FallbackWarning",
    "RankFailure",
]


class DdpLabError(Exception):
    """Something outside the caller's code failed; the message says what, where and what to do."""


class ClusterError(DdpLabError):
    """The cluster could not start, lost a rank, or is unreachable."""


class ExtensionError(DdpLabError, ImportError):
    """The compiled extension is missing or was built for another torch; the message says how to rebuild it."""


class BucketStateError(DdpLabError, RuntimeError):
    """A gradient or bucket was reported in a state that does not allow it."""


class FallbackWarning(UserWarning):
    """Something works in a different way than intended, usually more slowly; the message says what, and why."""


@dataclass(frozen=True)
class RankFailure:
    """How a cell ended on one rank that failed.

    Attributes:
        rank: the rank.
        name: the exception's class name, e.g. ``"ValueError"``.
        message: the exception's text.
        traceback: the formatted traceback, ANSI-coloured as IPython renders it.
        time_ns: when it was raised, on the host's monotonic clock; orders failures in time.
        secondary: whether it only followed another rank's failure (its collective was unblocked).
        waited_in: of a secondary failure, what the rank waited in, e.g.
            ``"all_reduce #17 of 4 MiB (float32 [1048576])"``; "" where that is not known.
        broke_backward: whether a model's backward was in progress: it is discarded, with the model's gradients.
        short_traceback: the traceback without library frames between the user's own; "" if it would be the same.
    """

    rank: int
    name: str
    message: str
    traceback: str
    time_ns: int
    secondary: bool
    waited_in: str = ""
    broke_backward: bool = False
    short_traceback: str = ""


class CellError(DdpLabError):
    """A cell failed on at least one rank.

    Attributes:
        failures: rank -> `RankFailure`; the first one in time comes first, secondary ones last.
        report: the first failing rank's traceback and one line for each other rank, ANSI-coloured; IPython shows it
            instead of the client's own traceback.
    """

    def __init__(self, message: str, failures: Mapping[int, RankFailure], report: str = "") -> None:
        super().__init__(message)
        self.failures = dict(failures)
        self.report = report

    def _render_traceback_(self) -> list[str]:
        return (self.report or f"{type(self).__name__}: {self}").splitlines()
