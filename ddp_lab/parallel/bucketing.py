"""`assign_buckets`, by its name on the rank side; the simulator asks the same function."""

from __future__ import annotations

from ..bucketing import assign_buckets

__all__ = ["assign_buckets"]
