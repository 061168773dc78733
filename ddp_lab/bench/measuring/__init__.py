"""Fresh processes, groups and links, and alternating measurements on them."""

__all__ = [
    "collectives",
    "command",
    "fresh_ranks",
    "noise",
    "ratios",
    "recording_cost",
    "shaped_link",
    "workloads",
]
