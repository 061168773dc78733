"""The panel of a cluster: its ranks, its processes, and what can be done with them."""

__all__ = ["panel", "rows"]
