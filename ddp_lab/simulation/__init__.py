"""Prediction of step times with other buckets, another link or more ranks. Pure functions on numpy arrays."""

__all__ = ["calibration", "link_model", "race", "settings", "sharding", "simulator", "workload"]
