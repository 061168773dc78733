"""The ranks' output in the notebook and the terminal."""

__all__ = ["board", "by_rank", "display", "logs", "progress", "quick_nbformat", "status_table", "terminal", "throttle"]
