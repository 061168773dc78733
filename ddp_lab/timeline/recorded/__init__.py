"""Recorded runs: reading, merging, replaying, and exporting to other tools."""

__all__ = ["chrome_trace", "ends", "merge", "player"]
