"""Prediction of step times with other buckets, another link or more ranks, and of memory. Pure functions."""

__all__ = [
    "calibration",
    "link_model",
    "memory",
    "module_names",
    "race",
    "settings",
    "sharding",
    "simulator",
    "workload",
]
