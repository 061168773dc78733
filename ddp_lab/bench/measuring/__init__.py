"""Processes, groups and links made anew, and what is measured on them in turns."""

__all__ = [
    "collectives",
    "command",
    "drawing",
    "fresh_ranks",
    "noise",
    "ratios",
    "recording_cost",
    "shaped_link",
    "workloads",
]
