"""A cluster of ranks: its members, its processes, and the cells that run on it."""

__all__ = ["cells", "cluster", "followed", "processes"]
