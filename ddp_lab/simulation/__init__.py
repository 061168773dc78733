"""Prediction of step times with other buckets, another link or more ranks, and of memory. Pure functions."""

__all__ = [
    "calibration",
    "candidate_selection",
    "link_model",
    "memory",
    "parameter_groups",
    "settings",
    "simulator",
    "workload",
]
