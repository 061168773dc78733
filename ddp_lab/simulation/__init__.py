"""Prediction of step times with other buckets, another link or more ranks, and of memory. Pure functions."""

__all__ = [
    "calibration",
    "link_model",
    "memory",
    "parameter_groups",
    "race",
    "settings",
    "simulator",
    "workload",
]
