"""The panel of a cluster: its ranks, their processes, and actions on them."""

__all__ = ["panel", "processes", "rows"]
