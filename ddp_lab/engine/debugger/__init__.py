"""Rank side of Jupyter's visual debugger: pydevd in the rank, its requests and events on the client's wire."""

__all__ = ["rank_debugger", "tracing"]
