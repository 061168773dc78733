"""What a step would take: with other buckets, another link, more ranks. Pure functions on numpy arrays."""

__all__ = ["calibration", "link_model", "race", "settings", "simulator", "workload"]
