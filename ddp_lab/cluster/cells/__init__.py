"""Cells on some ranks: one from its text to its values or its error, and the runner that keeps all of a cluster."""

__all__ = ["doctor", "failures", "front_end", "run", "runner", "variables"]
