"""Fresh processes and groups, and alternating measurements on them."""

__all__ = [
    "collectives",
    "command",
    "fresh_ranks",
    "noise",
    "ratios",
    "recording_cost",
    "workloads",
]
