"""Rank side: makes a process a rank of a cluster, and answers for it while its cell runs."""

__all__ = ["gpu", "groups", "model_control", "processes", "restore", "telemetry"]
