"""The ranks' output in the notebook and the terminal."""

__all__ = ["board", "by_rank", "display", "logs", "progress", "status_table", "terminal", "throttle"]
