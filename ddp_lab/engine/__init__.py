"""Rank side: makes a process a rank of a cluster, and answers for it while its cell runs."""

__all__ = ["groups", "model_control", "processes", "restore", "status", "telemetry"]
