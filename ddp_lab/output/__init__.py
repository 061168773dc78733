"""The ranks' output in the notebook and the terminal."""

__all__ = ["board", "display", "logs", "progress", "status_table", "terminal", "throttle"]
